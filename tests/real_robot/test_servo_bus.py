"""The servo-bus driver from end to end, on servos behind a pseudo-terminal."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, build
from embodied.real_robot.control.chunk_follower import Chunk, ChunkFollower, control_loop
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.servos import bus as serial_port
from embodied.real_robot.drivers.servos.bus import PATIENCE, SerialPort
from embodied.real_robot.drivers.servos.codecs import FEETECH
from embodied.real_robot.drivers.servos.driver import Config, Hand, Joint, ServoBus
from embodied.real_robot.emulators.servos.bus import FakeBus, Faults, FeetechServo
from embodied.real_robot.ipc.channels import Channels, Role
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.chain import Chain
from embodied.real_robot.kernel.checks import Enabled, Finite, Fresh, FreshConfig, Torque, Tracking
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.messages import Command, Mode
from tests.builders import wait_until
from tests.real_robot.test_control import Sum

START = (2100, 1500, 2500, 3000)
TICK = math.tau / 4096
BOTH = pytest.mark.parametrize("protocol", ["dynamixel", "feetech"])


def config(protocol: Any, path: str, **changes: Any) -> Config:
    """Three joints and a hand; time-outs for a machine that is busy with something else."""
    joints = (
        Joint("shoulder", 1, 100, 4000, torque=1.0),
        Joint("elbow", 2, 100, 4000, zero=1000, sign=-1, torque=1.0),
        Joint("wrist", 3, 100, 4000, ratio=2.0),
    )
    plain = Config(protocol, path, joints, Hand(4, 2000, 3200, 0.06), timeout=0.1, watchdog=2.5)
    return dataclasses.replace(plain, **changes)


@BOTH
@pytest.mark.parametrize("echo", [False, True])
def test_it_connects_without_a_move_reads_and_follows(protocol: str, echo: bool) -> None:
    with FakeBus(protocol, START, Faults(echo=echo)) as bus:
        for servo in bus.servos.values():  # as left by somebody: a goal far away, torque off
            servo.table[servo.GOAL : servo.GOAL + 2] = b"\x10\x00"
        with ServoBus(config(protocol, bus.path)) as arm:
            assert arm.wire.port.echo == echo
            assert all(servo.table[servo.TORQUE] == 1 for servo in bus.servos.values())
            first = arm.read()
            assert [round(servo.at) for servo in bus.servos.values()] == list(START)
            assert all(servo.moved == 0 for servo in bus.servos.values())
            # By hand: (2100-2048)/4096 turns; (1500-1000)/4096 turns, the other way; half of
            # (2500-2048)/4096 turns, behind a gear of 2.
            assert first.q == pytest.approx(np.array([52, -500, 226]) * TICK)
            assert arm.width == pytest.approx(0.05)
            goal = first.q + np.array([0.3, -0.2, 0.1])
            arm.write(goal, 0.03)
            moving = arm.read()
            wait_until(lambda: float(np.abs(arm.read().q - goal).max()) <= TICK)
            wait_until(lambda: arm.read() is not None and abs(arm.width - 0.03) < 1e-4)
            assert moving.dq[0] >= 0 and moving.dq[1] <= 0 and moving.dq[2] >= 0
        assert all(servo.table[servo.TORQUE] == 1 for servo in bus.servos.values()), "never off"


@BOTH
def test_signs_of_velocity_and_torque(protocol: str) -> None:
    with FakeBus(protocol, START) as bus, ServoBus(config(protocol, bus.path)) as arm:
        first = arm.read()
        seen: list[ArmState] = []

        def moving() -> bool:
            arm.write(first.q + 0.5 * (len(seen) % 2), 0.05)
            seen.append(arm.read())
            return bool((np.abs(seen[-1].dq) > 0.2).all() and (np.abs(seen[-1].tau[:2]) > 0).all())

        wait_until(moving)
        up = seen[-1].dq > 0
        assert up.all() or not up.any(), "all joints were sent the same way"
        assert (np.sign(seen[-1].tau[:2]) == np.sign(seen[-1].dq[:2])).all()
        assert seen[-1].tau[2] == 0, "its torque constant is not known"
        bus.servos[3].alert = 0x20
        with pytest.raises(DriverError, match=r"joint wrist \(id 3\) reports overload"):
            arm.read()


@BOTH
def test_a_percent_of_everything_going_wrong_is_survived(protocol: str) -> None:
    noise = Faults(flip=0.01, lose=0.01, late=0.01, delay=0.03, split=0.05)
    with FakeBus(protocol, START, noise, seed=3) as bus:
        settings = config(protocol, bus.path, timeout=0.05, retries=6)
        with ServoBus(settings) as arm:
            begin = arm.read().q
            for k in range(300):
                goal = begin + 0.3 * math.sin(k / 40)
                arm.write(goal, 0.05)
                assert np.abs(arm.read().q - begin).max() < 0.4, "nothing made up by noise"
            arm.write(begin, 0.05)
            wait_until(lambda: arm.write(begin, 0.05) or np.abs(arm.read().q - begin).max() < TICK)
            assert 0 < arm.wire.repeated < 150


@BOTH
def test_one_servo_that_no_longer_answers_and_the_others_are_held(protocol: str) -> None:
    with FakeBus(protocol, START) as bus:
        arm = ServoBus(config(protocol, bus.path, timeout=0.03, retries=2))
        with arm:
            begin = arm.read().q
            bus.gone.add(2)
            arm.write(begin + 0.4, 0.05)
            with pytest.raises(DriverError, match=r"joint elbow \(id 2\).*asked \d+ times.*cable"):
                for _ in range(PATIENCE):
                    arm.read()
            arm.stop()
            held = [bus.servos[i] for i in (1, 3)]
            wait_until(lambda: all(abs(s.goal() - s.at) < 1 for s in held))
            assert bus.servos[2].table[bus.servos[2].TORQUE] == 1


def test_the_watchdog_of_a_dynamixel_stops_it_and_the_driver_says_so() -> None:
    with FakeBus("dynamixel", START) as bus:
        servo = bus.servos[1]
        servo.fastest = 300.0
        with ServoBus(config("dynamixel", bus.path, watchdog=0.6)) as arm:
            begin = arm.read().q
            assert servo.table[98] == 30
            arm.write(begin + np.array([2.0, 0, 0]), 0.05)  # four seconds away
            wait_until(lambda: servo.table[98] == 255)
            there = servo.at
            assert START[0] < there < START[0] + 400, "it stopped on its way"
            with pytest.raises(DriverError, match=r"stopped itself after \d+\.\d+ s without"):
                arm.write(begin, 0.05)
            assert servo.at == there and servo.table[98] == 255, "until somebody has seen it"
            arm.stop()
            assert servo.table[98] == 30, "awake again"
            end = time.monotonic() + 0.8
            while time.monotonic() < end:
                assert arm.read().q[0] == pytest.approx((there - 2048) * TICK, abs=100 * TICK)
        wait_until(lambda: servo.table[98] == 255, "nobody is there any more")
        with ServoBus(config("dynamixel", bus.path)) as arm:
            assert arm.read().q[0] == pytest.approx((there - 2048) * TICK, abs=100 * TICK)


def test_a_reset_wakes_watchdogs_that_noise_left_asleep_or_off() -> None:
    with FakeBus("dynamixel", START) as bus, ServoBus(config("dynamixel", bus.path)) as arm:
        bus.servos[1].table[98] = 255
        bus.servos[1].held = bus.servos[1].at  # pyright: ignore[reportAttributeAccessIssue]
        bus.servos[2].table[98] = 0
        arm.read()
        arm.recover()
        assert {servo.table[98] for servo in bus.servos.values()} == {125}
        q = arm.read().q
        goal = q + 0.05
        wait_until(lambda: (arm.write(goal, 0.0), np.abs(arm.read().q - goal).max() < 0.01)[1])
        bus.gone.add(2)
        with pytest.raises(DriverError, match="does not take"):
            arm.recover()


def test_what_refuses_to_connect_leaves_torque_off() -> None:
    with FakeBus("feetech", START) as bus:
        arm = ServoBus(config("feetech", bus.path, timeout=0.03, retries=2))

        def refused(match: str) -> None:
            with pytest.raises(DriverError, match=match):
                arm.connect()
            arm.close()
            assert not any(servo.table[servo.TORQUE] for servo in bus.servos.values())

        bus.gone.add(3)
        refused(r"no answer from joint wrist \(id 3\)")
        bus.gone.clear()
        bus.servos[2].table[33] = 1
        refused(r"elbow .* in operating mode 1")
        bus.servos[2].table[33], bus.servos[1].at = 0, 4090.0
        refused(r"stands at tick 4090, outside of its")


def test_a_target_outside_of_the_calibration_is_not_sent() -> None:
    with FakeBus("feetech", START) as bus, ServoBus(config("feetech", bus.path)) as arm:
        q = arm.read().q
        for to, width, match in (
            (q + np.array([3.2, 0, 0]), 0.05, r"joint shoulder \(id 1\) was sent to tick 4\d+"),
            (q * np.nan, 0.05, "sent to tick"),
            (q + np.inf, 0.05, "sent to tick"),
            (q, math.nan, "the hand was sent to nan"),
        ):
            with pytest.raises(DriverError, match=match):
                arm.write(to, width)
        assert bus.servos[1].goal() == START[0]


def test_ports_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with FakeBus("feetech", START) as bus:
        first = SerialPort(bus.path, 1_000_000)
        first.open()
        for path, rate, match in (
            (str(tmp_path / "ttyUSB0"), 1_000_000, r"no serial port that is there .*by-id"),
            (str(tmp_path / "file"), 1_000_000, "no serial port"),
            (bus.path, 12345, "no serial rate of 12345"),
            (bus.path, 1_000_000, "in use by another process"),
        ):
            with pytest.raises(DriverError, match=match):
                SerialPort(path, rate).open()
        first.close()
        with pytest.raises(DriverError, match="not open"):
            first.write(b"x")


def test_an_echo_is_dropped_and_nothing_else() -> None:
    question = FEETECH.read(2, 56, 2)
    with FakeBus("feetech", START, Faults(echo=True)) as bus:
        port = SerialPort(bus.path, 1_000_000)
        port.open()
        for echo in (False, True):
            port.echo = echo
            port.write(question)
            wanted = (b"" if echo else question) + FEETECH.answer(2, 0, b"\xdc\x05")
            seen, end = b"", time.monotonic() + 5
            while len(seen) < len(wanted):
                data = port.read(end)
                assert data, f"only {seen.hex(' ')}"
                seen += data
            assert seen == wanted
        port.close()


def test_an_adapter_that_keeps_bytes_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeBus("feetech", START) as bus:
        device = tmp_path / Path(bus.path).name
        device.mkdir()
        (device / "latency_timer").write_text("16\n")
        monkeypatch.setattr(serial_port, "DEVICES", tmp_path)
        bus.gone.add(1)
        arm = ServoBus(config("feetech", bus.path, timeout=0.02, retries=1))
        with pytest.raises(DriverError, match=r"type: echo 1 \| sudo tee .*latency_timer"):
            arm.connect()


def test_settings() -> None:
    joints = [{"name": "a", "id": 1, "low": 0, "high": 4095, "sign": -1}]
    node = {"_target_": "embodied.real_robot.drivers.servos.driver.ServoBus", "protocol": "feetech"}
    node |= {"port": "/dev/ttyACM0", "joints": joints}
    assert build(node, Driver).joints == ("a",)
    hand = {"id": 4, "closed": 2000, "open": 3200, "width": 0.06, "force": 1.5}
    for wrong, says in (
        ({"joints": joints * 2}, "different"),
        ({"joints": [joints[0] | {"sign": 0}]}, "sign"),
        ({"hand": hand}, "force"),
    ):
        with pytest.raises(ConfigError, match=says):
            build(node | wrong, Driver)


LIMITS = Limits(*((value,) * 3 for value in (-2.0, 2.0, 0.05, 2.0, 10.0, 200.0, 50.0, 1.5)))


class Deployed:
    """The control loop on a bus, at 50 Hz; `sent` [ticks, 3] and when (s)."""

    def __init__(self, arm: ServoBus, folder: Path) -> None:
        fresh = Fresh(FreshConfig(hold=20.0, stop=30.0, state=10.0))
        stages = [Finite(), fresh, Enabled(), Torque(LIMITS), Tracking(LIMITS)]
        chain = Chain(stages, Limiter(LIMITS, 0.02))
        here = Channels.make(folder, 3, len(chain.names))
        self.there = Channels.open(folder, 3, len(chain.names), role=Role.ALL)
        self.control = control_loop(arm, chain, ChunkFollower(Sum("a", "b", "c"), 0.05), here)
        arm.close()
        self.control.connect()
        self.sent: list[tuple[float, Floats]] = []

    def ask(self, wish: Command, turns: int = 1) -> Mode:
        request = self.there.request.fields
        request["number"] += 1
        request["command"] = wish
        request["stop"] = self.there.estop.number
        self.there.request.send()
        return self.turn(turns)

    def turn(self, turns: int) -> Mode:
        for _ in range(turns):
            due = time.monotonic() + 0.02
            self.control.turn()
            self.sent.append((time.monotonic(), self.control.chain.limiter.q.copy()))
            time.sleep(max(0.0, due - time.monotonic()))
        return self.control.mode

    def running(self, speed: float) -> None:
        assert self.ask(Command.ARM, 30) == Mode.ARMED
        assert self.control.arm is not None
        now = time.monotonic()
        chunk = np.full((64, 3), 0.05 * speed)
        self.control.source.follower.take(Chunk(chunk, now, now))
        self.turn(1)  # the source is asked once in a tick
        assert self.ask(Command.START, 25) == Mode.RUNNING, self.control.fault


@BOTH
def test_a_pulled_cable_is_a_latched_stop_of_the_control_process(
    protocol: str, tmp_path: Path
) -> None:
    with FakeBus(protocol, START) as bus, ServoBus(config(protocol, bus.path)) as arm:
        site = Deployed(arm, tmp_path)
        control, state = site.control, site.there.state
        assert control.arm is not None
        begin = control.arm.q.copy()
        site.running(0.1)
        site.turn(25)
        assert (arm.read().q - begin > 0.02).all(), "it moved"
        bus.unplug()
        assert site.turn(1) == Mode.ESTOP
        assert "is gone" in control.fault and "check the cable" in control.fault
        assert site.ask(Command.START, 5) == Mode.ESTOP
        assert site.ask(Command.RESET, 5) == Mode.ESTOP, "nothing to reset: the wire is gone"
        assert state.receive() and Mode(int(state.fields["mode"][0])) == Mode.ESTOP
        assert "is gone" in state.fields["fault"][0].decode()
        with pytest.raises(DriverError, match=r"/dev/pts/\d+ is gone .*check the cable"):
            arm.write(np.zeros(3), 0.0)
        arm.stop()


@BOTH
def test_one_silent_servo_does_not_stretch_the_braking_of_the_others(
    protocol: str, tmp_path: Path
) -> None:
    """Before, each tick of braking took four time-outs: the set-point came to rest after seconds,
    and goals jumped between braking and where the servos were."""
    with FakeBus(protocol, START) as bus, ServoBus(config(protocol, bus.path, timeout=0.05)) as arm:
        site = Deployed(arm, tmp_path)
        site.running(0.8)
        bus.gone.add(3)
        while site.turn(1) != Mode.ESTOP:
            pass
        latched = len(site.sent)
        site.turn(60)
        times = [t for t, _ in site.sent[latched:]]
        moved = np.diff(np.stack([q for _, q in site.sent[latched:]]), axis=0).any(1)
        assert not moved[30:].any(), "0.6 s of ticks"
        assert times[-1] - times[0] < 2.4, "none of which waits for the silent servo"
        assert "wrist" in site.control.fault
        assert all(abs(bus.servos[i].goal() - bus.servos[i].at) < 30 for i in (1, 2))
        bus.gone.clear()
        assert site.ask(Command.RESET, 5) == Mode.IDLE, site.control.fault


def test_an_overloaded_joint_lets_go_of_what_it_presses_on(tmp_path: Path) -> None:
    """A servo that reports overload is a fault, and its measurements are good."""
    with FakeBus("feetech", START) as bus, ServoBus(config("feetech", bus.path)) as arm:
        site = Deployed(arm, tmp_path)
        bus.servos[1].wall = START[0] - 10.0
        site.running(-0.5)
        bus.servos[1].alert = 0x20
        assert site.turn(2) == Mode.ESTOP and "overload" in site.control.fault
        site.turn(40)
        assert abs(bus.servos[1].goal() - bus.servos[1].at) < 5


def test_a_stopped_arm_stays_up_as_it_drooped_before_it_was_started(tmp_path: Path) -> None:
    """Servos know no gravity: an arm whose set-point went to the measured pose would sink."""
    with FakeBus("feetech", START) as bus:
        for servo in bus.servos.values():
            servo.sag = 20.0  # ticks, 0.03 rad
        with ServoBus(config("feetech", bus.path)) as arm:
            site = Deployed(arm, tmp_path)
            site.turn(20)
            site.running(0.0)
            for wish in (Command.ESTOP, Command.RESET, Command.ARM):
                before = [servo.at for servo in bus.servos.values()]
                site.ask(wish, 40)
                after = [servo.at for servo in bus.servos.values()]
                assert after[:3] == pytest.approx(before[:3], abs=3.0), wish
            assert pytest.approx(arm.droop(np.zeros(3))[0], abs=3 * TICK) == 20 * TICK


@BOTH
def test_released_servos_have_no_torque_until_they_are_engaged(protocol: str) -> None:
    with FakeBus(protocol, START) as bus, ServoBus(config(protocol, bus.path)) as arm:
        torque = bus.servos[1].TORQUE
        assert arm.falls_when_released
        arm.release()
        assert [bus.servos[i].table[torque] for i in (1, 2, 3, 4)] == [0, 0, 0, 1], "the hand holds"
        for i in (1, 2, 3):
            bus.servos[i].at += 150  # by hand
        led = [servo.at for servo in bus.servos.values()]
        arm.engage()
        assert all(servo.table[torque] for servo in bus.servos.values())
        time.sleep(0.2)
        assert [servo.at for servo in bus.servos.values()] == pytest.approx(led, abs=2)
        arm.release()
        arm.stop()
        assert all(servo.table[torque] for servo in bus.servos.values()), "a stop holds it"
        bus.gone.add(2)
        with pytest.raises(DriverError, match=r"elbow \(id 2\) does not take"):
            arm.release()


def test_a_firm_grasp_is_limited_and_no_fault(tmp_path: Path) -> None:
    with FakeBus("feetech", START) as bus:
        hand = bus.servos[4]
        assert isinstance(hand, FeetechServo)
        hand.wall = 2500.0  # something between the jaws
        with ServoBus(config("feetech", bus.path)) as arm:
            q = arm.read().q

            def protected() -> bool:
                arm.write(q, 0.0)
                arm.read()
                assert hand.force <= 0.5 + 1e-9
                return bool(hand.alert & 0x20) and hand.force == pytest.approx(0.2)

            wait_until(protected, "its own protection")
            assert arm.width == pytest.approx(0.06 * 500 / 1200, abs=1e-3)
        assert [hand.table[i] for i in (16, 17, 28, 29, 36)] == [244, 1, 250, 0, 25]
        assert hand.table[55] == 1, "locked again"
        kept = hand.kept
        with ServoBus(config("feetech", bus.path)):
            assert hand.kept == kept, "its lasting memory is not written twice"
        with ServoBus(config("feetech", bus.path, hand=Hand(4, 2000, 3200, 0.06, force=0.3))):
            assert int.from_bytes(hand.table[48:50], "little") == 300 and hand.kept > kept
    with FakeBus("dynamixel", START) as bus, ServoBus(config("dynamixel", bus.path)):
        assert int.from_bytes(bus.servos[4].table[100:102], "little") == 442


@pytest.mark.parametrize(
    ("protocol", "register", "most"), [("feetech", 48, 1000), ("dynamixel", 100, 885)]
)
def test_the_hand_presses_with_no_more_than_it_is_told(
    protocol: str, register: int, most: int
) -> None:
    """A share of its strength, 30 N, and of the settings' half; no force: it is limp."""
    with FakeBus(protocol, START) as bus, ServoBus(config(protocol, bus.path)) as arm:
        table = bus.servos[4].table
        kept = getattr(bus.servos[4], "kept", 0)
        for force, share in ((10.0, 1 / 3), (100.0, 0.5), (0.0, 0.0)):
            arm.limit_hand(0.2, force)
            said = int.from_bytes(table[register : register + 2], "little")
            assert said == round(most * share)
        assert getattr(bus.servos[4], "kept", 0) == kept, "its memory does not wear"
        arm.wire.silent.add(4)
        arm.limit_hand(0.2, 10.0)  # not waited for
