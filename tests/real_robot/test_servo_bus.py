"""The driver of servo buses: on servos behind a pseudo-terminal, and in simulated time on a wire
that loses bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, build
from embodied.real_robot.control.chunk_follower import Chunk
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.drivers.servos import bus as serial_port
from embodied.real_robot.drivers.servos.bus import FEETECH, PATIENCE, SerialPort
from embodied.real_robot.drivers.servos.driver import Config, Hand, Joint, ServoBus
from embodied.real_robot.emulators.servos.bus import SILENCE, FakeBus, Faults, FeetechServo
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.messages import Command, Mode
from tests.builders import wait_until
from tests.real_robot.control_bench import ControlBench
from tests.real_robot.test_control import Sum
from tests.tiers import only_all

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
            wait_until(lambda: float(np.abs(arm.read().q - goal).max()) <= TICK)
            wait_until(lambda: arm.read() is not None and abs(arm.width - 0.03) < 1e-4)
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
def test_one_servo_that_no_longer_answers_and_the_others_are_held(protocol: str) -> None:
    with (
        FakeBus(protocol, START) as bus,
        ServoBus(config(protocol, bus.path, timeout=0.03, retries=2)) as arm,
    ):
        bus.gone.add(2)
        arm.write(arm.read().q + 0.4, 0.05)
        with pytest.raises(DriverError, match=r"joint elbow \(id 2\).*asked \d+ times.*cable"):
            for _ in range(PATIENCE):
                arm.read()
        arm.stop()
        held = [bus.servos[i] for i in (1, 3)]
        wait_until(lambda: all(abs(s.goal() - s.at) < 1 for s in held))
        assert bus.servos[2].table[bus.servos[2].TORQUE] == 1


@pytest.mark.parametrize(
    ("servo", "register", "value", "says"),
    [
        (3, None, 0, r"no answer from joint wrist \(id 3\)"),
        (2, 33, 1, r"elbow .* in operating mode 1"),
        (1, "at", 4090.0, r"stands at tick 4090, outside of its"),
    ],
)
def test_what_refuses_to_connect_leaves_torque_off(
    servo: int, register: int | str | None, value: Any, says: str
) -> None:
    with FakeBus("feetech", START) as bus:
        if register is None:
            bus.gone.add(servo)
        elif register == "at":
            bus.servos[servo].at = value
        else:
            bus.servos[servo].table[register] = value
        with pytest.raises(DriverError, match=says):
            ServoBus(config("feetech", bus.path, timeout=0.03, retries=2)).connect()
        assert not any(servo.table[servo.TORQUE] for servo in bus.servos.values())


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
SUM = Sum("a", "b", "c")
PERIOD = 0.02  # s
STATE = 0.1  # s: an arm that was not measured for so long is a fault, as in so101.yaml


@BOTH
def test_a_pulled_cable_is_a_latched_stop_of_the_control_process(
    protocol: str, tmp_path: Path
) -> None:
    with FakeBus(protocol, START) as bus:
        arm = ServoBus(config(protocol, bus.path))
        fresh = FreshConfig(hold=20.0, stop=30.0, state=10.0)
        bench = ControlBench(tmp_path, arm, SUM, LIMITS, period=PERIOD, fresh=fresh, pace=PERIOD)
        assert bench.ask(Command.ARM, 5) == Mode.ARMED
        bus.unplug()
        assert bench.turn() == Mode.ESTOP
        says = r"/dev/pts/\d+ is gone .*check the cable"
        assert re.search(says, bench.fault)
        assert bench.ask(Command.START, 5) == Mode.ESTOP
        assert bench.ask(Command.RESET, 5) == Mode.ESTOP, "nothing to reset: the wire is gone"
        state = bench.there.state
        assert state.receive() and Mode(int(state.fields["mode"][0])) == Mode.ESTOP
        assert "is gone" in state.fields["fault"][0].decode()
        with pytest.raises(DriverError, match=says):
            arm.write(np.zeros(3), 0.0)
        arm.stop()
        arm.close()


SAID = 8  # newest answers of a servo that may still be what is known of it


class ServoLine(FakeBus):
    """Both the bus and, for a `ServoWire`, its port. `now` (s) only moves on with what is waited
    for. `said` are the newest positions that each servo told, whether they arrived or not."""

    path = "the line"
    baud = 1_000_000

    def __init__(
        self, protocol: str, ticks: Sequence[float], faults: Faults | None = None, seed: int = 0
    ) -> None:
        self.now = self.time = 0.0  # of the client; of the bus
        super().__init__(protocol, ticks, faults, seed)
        self.echo = False
        self.said: dict[int, deque[bytes]] = {id: deque(maxlen=SAID) for id in self.servos}
        self._written = 0.0
        self._coming: deque[tuple[float, bytes]] = deque()
        for servo in self.servos.values():
            servo.then = servo.heard = 0.0

    def clock(self) -> float:
        return self.time

    def open(self) -> None: ...

    def close(self) -> None: ...

    def latency(self) -> str:
        return ""

    def wait(self, seconds: float) -> None:
        """Nobody says anything for some time."""
        self.now += seconds
        self.time = max(self.time, self.now)
        self._move()

    def write(self, data: bytes) -> None:
        """As the serial port: what was not asked for is dropped."""
        while self._coming and self._coming[0][0] <= self.now:
            self._coming.popleft()
        if self.now - self._written > SILENCE:
            self._buffer.clear()
        self._written = self.now
        self.time = max(self.time, self.now) + 10 * len(data) / self.baud
        self._move()
        self._hear(data)

    def read(self, deadline: float) -> bytes:
        """As the serial port, but that waiting takes no time."""
        if self._coming and self._coming[0][0] < deadline:
            came, data = self._coming.popleft()
            self.now = max(self.now, came)
            return data
        self.now = max(self.now, deadline)
        return b""

    def drain(self, quiet: float, most: float) -> None:
        """As the serial port."""
        end = self.now + most
        while self.read(min(end, self.now + quiet)):
            pass

    def send(self, data: bytes) -> None:
        self._coming.append((self.time, data))

    def _wait(self, seconds: float) -> None:
        self.time += seconds

    def _answer(self, ids: list[int], data: bytes, error: int = 0) -> None:
        for id in ids:
            self.said[id].append(data)
        super()._answer(ids, data, error)


def wired(protocol: str, seed: int = 0, **changes: Any) -> tuple[ServoLine, ServoBus]:
    """Such a line, and the driver, not connected."""
    line = ServoLine(protocol, START, Faults(turnaround=2e-4, baud=1_000_000), seed)
    settings = {"timeout": 0.01, "watchdog": 0.2, **changes}
    arm = ServoBus(config(protocol, "", **settings), lambda: line.now)
    arm.wire.port = line  # pyright: ignore[reportAttributeAccessIssue]
    return line, arm


def test_the_watchdog_of_a_dynamixel_stops_it_and_the_driver_says_so() -> None:
    line, arm = wired("dynamixel", watchdog=0.6)
    servo = line.servos[1]
    servo.fastest = 300.0  # ticks/s
    with arm:
        begin = arm.read().q
        assert servo.table[98] == 30
        arm.write(begin + np.array([2.0, 0, 0]), 0.05)  # four seconds away
        line.wait(1.0)
        with pytest.raises(DriverError, match=r"stopped itself after \d+\.\d+ s without"):
            arm.write(begin, 0.05)
        there = servo.at
        assert START[0] + 150 < there < START[0] + 200, "it stopped on its way"
        assert servo.table[98] == 255, "until somebody has seen it"
        arm.stop()
        assert servo.table[98] == 30, "awake again"
        for _ in range(40):
            line.wait(PERIOD)
            arm.read()
            assert servo.at == pytest.approx(there, abs=1)
    line.wait(1.0)
    assert servo.table[98] == 255, "nobody is there any more"
    with arm:
        line.wait(PERIOD)
        assert arm.read().q[0] == pytest.approx((there - 2048) * TICK, abs=TICK)


def test_a_reset_wakes_watchdogs_that_noise_left_asleep_or_off() -> None:
    line, arm = wired("dynamixel")
    with arm:
        line.servos[1].table[98] = 255
        line.servos[1].held = START[0]  # pyright: ignore[reportAttributeAccessIssue]
        line.servos[2].table[98] = 0
        arm.read()
        arm.recover()
        assert {servo.table[98] for servo in line.servos.values()} == {10}
        goal = arm.read().q + 0.05
        for _ in range(20):
            arm.write(goal, 0.0)
            line.wait(PERIOD)
        assert arm.read().q == pytest.approx(goal, abs=TICK)
        line.gone.add(2)
        with pytest.raises(DriverError, match="does not take"):
            arm.recover()


@BOTH
def test_released_servos_have_no_torque_until_they_are_engaged(protocol: str) -> None:
    line, arm = wired(protocol)
    servos = line.servos.values()
    with arm:
        assert arm.falls_when_released
        arm.release()
        assert [servo.table[servo.TORQUE] for servo in servos] == [0, 0, 0, 1], "the hand holds"
        for id in (1, 2, 3):
            line.servos[id].at += 150  # by hand
        led = [servo.at for servo in servos]
        arm.engage()
        assert all(servo.table[servo.TORQUE] for servo in servos)
        line.wait(0.2)
        assert [servo.at for servo in servos] == pytest.approx(led, abs=2)
        arm.release()
        arm.stop()
        assert all(servo.table[servo.TORQUE] for servo in servos), "a stop holds it"
        line.gone.add(2)
        with pytest.raises(DriverError, match=r"elbow \(id 2\) does not take"):
            arm.release()


def test_a_firm_grasp_is_limited_and_no_fault() -> None:
    line, arm = wired("feetech")
    hand = line.servos[4]
    assert isinstance(hand, FeetechServo)
    hand.wall = 2500.0  # something between the jaws
    with arm:
        q = arm.read().q
        for _ in range(150):
            line.wait(PERIOD)
            arm.write(q, 0.0)
            arm.read()
            assert hand.force <= 0.5 + 1e-9
        assert hand.alert & 0x20 and hand.force == pytest.approx(0.2), "its own protection"
        assert arm.width == pytest.approx(0.06 * 500 / 1200, abs=1e-3)
    assert [hand.table[i] for i in (16, 17, 28, 29, 36)] == [244, 1, 250, 0, 25]
    assert hand.table[55] == 1, "locked again"
    kept = hand.kept
    with arm:
        assert hand.kept == kept, "its lasting memory is not written twice"


@pytest.mark.parametrize(
    ("protocol", "register", "most"), [("feetech", 48, 1000), ("dynamixel", 100, 885)]
)
def test_the_hand_presses_with_no_more_than_it_is_told(
    protocol: str, register: int, most: int
) -> None:
    """A share of its strength, 30 N, and of the settings' half; no force: it is limp."""
    line, arm = wired(protocol)
    hand = line.servos[4]
    with arm:
        assert hand.word(register) == round(most * 0.5)
        kept = getattr(hand, "kept", 0)
        for force, share in ((10.0, 1 / 3), (100.0, 0.5), (0.0, 0.0)):
            arm.limit_hand(0.2, force)
            assert hand.word(register) == round(most * share)
        assert getattr(hand, "kept", 0) == kept, "its memory does not wear"
        arm.wire.silent.add(4)
        arm.limit_hand(0.2, 10.0)  # not waited for


class Site(ControlBench):
    """The driver and the control process on such a line, at 50 Hz in simulated time."""

    def __init__(self, folder: Path, protocol: str, seed: int = 0) -> None:
        self.line, self.arm = wired(protocol, seed)
        fresh, now = FreshConfig(0.25, 0.5, STATE), lambda: self.line.now
        super().__init__(
            folder, self.arm, SUM, LIMITS, period=PERIOD, fresh=fresh, pace=0.0, clock=now
        )
        self.due = self.line.now
        self.speed = 0.0  # rad/s of all joints, which the policy asks for

    @property
    def measured(self) -> ArmState:
        assert self.control.arm is not None
        return self.control.arm

    def turn(self, turns: int = 1) -> Mode:
        for _ in range(turns):
            now = self.line.now = max(self.line.now, self.due)
            self.due += PERIOD * max(1, math.ceil((now - self.due) / PERIOD + 1e-9))
            self.there.beat(now)
            self.follower.take(Chunk(np.full((4, 3), 0.05 * self.speed), now, now))
            self.control.turn()
        return self.mode

    def run(self, speed: float) -> None:
        """Start a policy that moves all joints at `speed` (rad/s)."""
        self.speed = speed
        assert self.ask(Command.ARM, 30) == Mode.ARMED
        assert self.ask(Command.START, 25) == Mode.RUNNING, self.fault

    def made_up(self) -> list[int]:
        """Servos that are known to be where they never said that they are."""
        motion, known = self.arm.make.motion, self.arm._motion
        return [
            id
            for id, said in self.line.said.items()
            if known[id] not in [motion(data) for data in said if len(data) > 1]
        ]


@BOTH
def test_one_silent_servo_does_not_stretch_the_braking_of_the_others(
    protocol: str, tmp_path: Path
) -> None:
    """No tick of the braking waits for it until its time-out, and goals do not jump back to where
    the servos are."""
    site = Site(tmp_path, protocol)
    site.run(0.8)
    site.line.gone.add(3)
    while site.turn() != Mode.ESTOP:
        pass
    began, sent = site.line.now, list[Floats]()
    for _ in range(60):
        site.turn()
        sent.append(site.control.chain.limiter.q.copy())
    assert not np.diff(sent, axis=0)[30:].any(), "at rest after 0.6 s"
    assert site.line.now - began < 60.5 * PERIOD
    assert "wrist" in site.fault
    assert all(abs(site.line.servos[i].goal() - site.line.servos[i].at) < 30 for i in (1, 2))
    site.line.gone.clear()
    assert site.ask(Command.RESET, 5) == Mode.IDLE, site.fault


def test_an_overloaded_joint_lets_go_of_what_it_presses_on(tmp_path: Path) -> None:
    """A servo that reports overload is a fault, and its measurements are good."""
    site = Site(tmp_path, "feetech")
    servo = site.line.servos[1]
    servo.wall = START[0] - 10.0
    site.run(-0.5)
    servo.alert = 0x20
    assert site.turn(2) == Mode.ESTOP and "overload" in site.fault
    site.turn(40)
    assert abs(servo.goal() - servo.at) < 5


def test_a_stopped_arm_stays_up_as_it_drooped_before_it_was_started(tmp_path: Path) -> None:
    """Servos know no gravity: an arm whose set-point went to the measured pose would sink."""
    site = Site(tmp_path, "feetech")
    servos = [site.line.servos[i] for i in (1, 2, 3)]
    for servo in servos:
        servo.sag = 20.0  # ticks, 0.03 rad
    site.turn(20)
    site.run(0.0)
    before = [servo.at for servo in servos]
    for wish in (Command.ESTOP, Command.RESET, Command.ARM):
        site.ask(wish)
        for _ in range(40):
            assert [servo.at for servo in servos] == pytest.approx(before, abs=3.0), wish
            site.turn()
    assert pytest.approx(site.arm.droop(np.zeros(3))[0], abs=3 * TICK) == 20 * TICK
    site.arm.stop()
    site.line.wait(0.2)
    assert [servo.at for servo in servos] == pytest.approx(before, abs=3.0), "by the driver alone"


@BOTH
@pytest.mark.parametrize(
    ("noise", "seconds", "seed"),
    [
        ({"drop": 0.005}, 20, 0),
        ({"flip": 0.01, "lose": 0.01, "late": 0.01, "split": 0.05}, 20, 3),
        *(pytest.param({"drop": 0.002}, 600, seed, marks=only_all) for seed in (1, 2)),
    ],
)
def test_noise_is_no_fault_and_a_silent_bus_is(
    protocol: str, noise: dict[str, float], seconds: int, seed: int, tmp_path: Path
) -> None:
    """Before, one servo of 0.2% lost bytes was given up every 100 s: four requests in one tick."""
    site = Site(tmp_path, protocol, seed)
    site.run(0.0)
    vars(site.line.faults).update(noise)
    ticks = round(seconds / PERIOD)
    for tick in range(ticks):
        site.speed = 0.15 * math.cos(tick / 40)
        assert site.turn() == Mode.RUNNING, site.fault
        assert not site.made_up()
    assert site.arm.wire.repeated > 0.02 * ticks
    vars(site.line.faults).update(dict.fromkeys(noise, 0.0))
    site.turn()
    began = site.line.now
    site.line.gone |= set(site.line.servos)
    assert site.turn(PATIENCE) == Mode.ESTOP
    assert re.search(r"no answer from joint shoulder .*asked \d+ times", site.fault)
    assert site.line.now - began < STATE + PERIOD


@BOTH
@pytest.mark.parametrize(("id", "name"), [(1, "joint shoulder"), (4, "the hand")])
def test_a_lost_answer_ages_the_measurement(
    protocol: str, id: int, name: str, tmp_path: Path
) -> None:
    """The hand is no part of it; both are a fault where they stay silent."""
    site = Site(tmp_path, protocol)
    for _ in range(2):
        site.turn()
        before = site.line.now
        site.line.gone.add(id)
        for _ in range(PATIENCE - 1):
            site.turn()
            assert (site.measured.t < before) == (id == 1)
        site.line.gone.clear()
        assert site.turn() == Mode.IDLE and not site.fault and site.measured.t > before
    site.line.gone.add(id)
    assert site.turn(PATIENCE) == Mode.ESTOP and f"no answer from {name}" in site.fault


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_frame_that_ends_with_a_part_of_the_next_is_none(cut: int, tmp_path: Path) -> None:
    """Feetech's one byte of checksum fits one such frame in 256; `cut`: bytes of the next frame
    that come together with it."""
    site = Site(tmp_path, "feetech")
    bus, line = site.arm.wire, site.line
    second = FEETECH.answer(2, 0, bytes(15))

    def short(value: int) -> bytes:
        """The answer of servo 1 without its last byte of data."""
        frame = FEETECH.answer(1, 0, bytes((*range(14), value)))
        return frame[:-2] + frame[-1:]

    shorts = (short(value) for value in range(256))
    first = next(each for each in shorts if FEETECH.opened(each + second[:1]) is not None)
    soon = line.now + 1e-3
    line._coming = deque((soon, data) for data in (first + second[:cut], second[cut:]))
    bus.retries = 0
    bus.port.write = lambda data: None
    assert not bus.ask(56, 15, (1, 2)), "the next one is spoilt, too"
