"""The Crazyflie's driver, by cflib, before an emulator that flies in the simulator; and that
emulator by itself: packets by hand, its rules on a clock that the test moves, and noise."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cflib.crazyflie.commander import Commander
from cflib.crazyflie.high_level_commander import HighLevelCommander
from cflib.crtp.crtpstack import CRTPPacket

from embodied.embodiments.flight import Config as FlightConfig
from embodied.embodiments.flight import Flight
from embodied.envs.hardware_sim.crazyflie import Config as SimConfig
from embodied.envs.hardware_sim.crazyflie_flight import PLACES, STEP, Flown
from embodied.real_robot.drivers.crazyflie.driver import Config, Crazyflie, Phase
from embodied.real_robot.emulators import crazyflie as crtp
from embodied.real_robot.emulators.crazyflie import OFF, Landing, Setpoint, State, setpoint_of
from embodied.real_robot.kernel.arm_state import Limits
from embodied.real_robot.kernel.checks import FreshConfig
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.messages import Command, Mode
from tests.builders import node_of, wait_until
from tests.fakes.crazyflie import FakeCrazyflie
from tests.real_robot.control_bench import ControlBench

PATIENT, TICK = 60.0, 0.02
ALL = ((value,) * 4 for value in (0.0, 1.0, 4.0, 80.0, 1.0))
LIMITS = Limits((-1, -1, -0.2, -7), (1, 1, 1.5, 7), *ALL, (1.5, 1.5, 1.5, 3))


@pytest.fixture
def fake() -> Iterator[FakeCrazyflie]:
    with FakeCrazyflie() as fake:
        yield fake


def driver(fake: FakeCrazyflie, **settings: Any) -> Crazyflie:
    calm = {"low": 3.2, "silence": 10.0, "arming": 20.0, "patience": PATIENT}
    return Crazyflie(Config(fake.uri, **(calm | settings)))


def until(so: Callable[[], Any], what: str, do: Callable[[], Any] = lambda: None) -> None:
    """Until `so`, while `do` is done at 50 Hz."""
    wait_until(lambda: so() or (do(), False)[1], what, PATIENT, TICK)


def towards(arm: Crazyflie, q: list[float]) -> Callable[[], None]:
    def tick() -> None:
        arm.read()
        arm.write(np.array(q), 0.0)

    return tick


def near(fake: FakeCrazyflie, place: list[float], most: float = 0.03) -> Callable[[], bool]:
    return lambda: math.dist(fake.place, place) < most


def take_off(arm: Crazyflie, fake: FakeCrazyflie, height: float = 0.4) -> None:
    goal = [0.0, 0.0, height]
    until(near(fake, goal), "it takes off", towards(arm, [*goal, 0.0]))


def lands(arm: Crazyflie, fake: FakeCrazyflie, do: Callable[[], Any] | None = None) -> None:
    until(lambda: arm.phase == Phase.GROUND, "it lands", do or arm.read)
    assert fake.height == 0 and fake.firmware.state != State.LOCKED


def falls(fake: FakeCrazyflie, do: Callable[[], Any] = lambda: None) -> None:
    """It locks itself, and what it is told afterwards is nothing to it."""
    until(lambda: fake.firmware.state == State.LOCKED, "motors off", do)
    until(lambda: fake.height == 0, "it falls", do)


def fault(arm: Crazyflie, q: list[float] | None = None) -> str:
    """What reading and writing it says, as soon as it says anything."""
    with pytest.raises(DriverError) as error:
        until(lambda: False, "a fault", towards(arm, q or [0.0, 0.0, 0.4, 0.0]))
    return str(error.value)


def test_it_takes_off_follows_and_lands(fake: FakeCrazyflie) -> None:
    with driver(fake) as arm:
        assert arm.phase == Phase.GROUND and arm.read().q == pytest.approx([0, 0, 0, 0], abs=0.02)
        for _ in range(10):
            arm.read()
            assert not arm.hold(np.array([0, 0, 0.5, 0]), 0.0), "nobody moves it: it stays there"
        assert fake.height == 0 and not fake.firmware.armed
        take_off(arm, fake)
        goal = [0.3, -0.2, 0.5, 1.0]
        until(near(fake, goal[:3]), "it follows", towards(arm, goal))
        until(lambda: abs(arm.read().q[3] - 1) < 0.05, "it turns", towards(arm, goal))
        assert arm.read().q[:3] == pytest.approx(fake.place, abs=0.05)
        arm.stop()
        assert not arm.hold(np.array(goal), 0.0), "what it does now is its own"
        lands(arm, fake)
        assert fake.place[:2] == pytest.approx(goal[:2], abs=0.1)
        until(lambda: not fake.firmware.armed, "it is disarmed", arm.read)
    assert fake.firmware.state in (State.READY, State.NOT_READY), "no watchdog had to act"


@pytest.mark.parametrize("command", ["full_state", "hover"])
def test_other_ways_to_say_where(fake: FakeCrazyflie, command: str) -> None:
    with driver(fake, command=command) as arm:
        take_off(arm, fake)
        goal = [0.2, 0.1, 0.5]
        until(near(fake, goal, 0.06), "it follows", towards(arm, [*goal, 0.0]))
        arm.cut()


def test_an_emergency_stop_lets_it_fall_and_only_a_restart_leads_on(fake: FakeCrazyflie) -> None:
    with driver(fake) as arm:
        take_off(arm, fake)
        arm.cut()
        falls(fake, lambda: arm.write(np.array([0, 0, 1.0, 0]), 0.0))
        with pytest.raises(DriverError, match="switch it off and on"):
            arm.recover()


def test_a_lost_link_is_a_fault_and_the_drone_stops_by_itself(fake: FakeCrazyflie) -> None:
    with driver(fake, silence=0.5) as arm:
        take_off(arm, fake)
        fake.air.silent = True
        assert "nothing heard for more than 0.5 s" in fault(arm)
        arm.stop()
        falls(fake)


def test_an_emulator_that_is_gone_is_a_lost_link(fake: FakeCrazyflie) -> None:
    arm = driver(fake)
    arm.connect()
    fake.over.set()
    assert "link is lost" in fault(arm)
    arm.close()
    arm.close()


def test_a_low_battery_lands_it(fake: FakeCrazyflie) -> None:
    with driver(fake) as arm:
        take_off(arm, fake)
        fake.drain(3.1)
        assert "battery has 3.10 V left" in fault(arm)
        arm.stop()
        lands(arm, fake)
        with pytest.raises(DriverError, match="charge it"):
            arm.recover()


def test_what_does_not_start(fake: FakeCrazyflie) -> None:
    with driver(fake, arming=0.5) as arm:
        arm.check(LIMITS)
        with pytest.raises(DriverError, match=r"velocity of y is 1.5 m/s, its own controller"):
            arm.check(replace(LIMITS, velocity=(1.0, 1.5, 1.0, 1.0)))
        fake.firmware.fit = False
        said = fault(arm)
        assert "refuses to arm" in said and "cannot be armed" in said
        assert fake.height == 0 and arm.phase == Phase.GROUND
    fake.firmware.stopping = True
    until(lambda: fake.firmware.state == State.LOCKED, "it is locked")
    with pytest.raises(DriverError, match="locked, motors off"):
        driver(fake).connect()
    with pytest.raises(DriverError, match=r"udp://127.0.0.1:9: .*switched on"):
        Crazyflie(Config("udp://127.0.0.1:9", 3.2, patience=5.0)).connect()


def test_a_place_from_outside(tmp_path: Path) -> None:
    """A motion capture system sees it; when nobody does any more, that is a fault."""
    folder = tmp_path / "seen"
    folder.mkdir()
    reader = "real_robot.ipc.external_state.ExternalStateReader"
    seen = node_of(reader, folder=str(folder), names=PLACES, age=2.0)
    fake = FakeCrazyflie(folder, external=True, place=(0.4, 0.3, 0.0))
    with fake, driver(fake, tracker=seen) as arm:
        estimator = partial(fake.air.server.parameter, "stabilizer.estimator")
        until(lambda: estimator() == 2, "it is told of the tracker")
        assert arm.read().q[:2] == pytest.approx([0.4, 0.3], abs=0.02)
        goal = [0.2, 0.2, 0.4]
        until(near(fake, goal), "it flies", towards(arm, [*goal, 0.0]))
        fake.air.writer = None
        assert "last measured" in fault(arm, [*goal, 0.0])
        arm.cut()


def test_it_lands_where_nobody_moves_it_and_after_a_fault(
    tmp_path: Path, fake: FakeCrazyflie
) -> None:
    """Whatever goes wrong with the policy: no motor stops in the air, unless somebody says stop."""
    home, fresh = np.array([0.0, 0.0, 0.4, 0.0]), FreshConfig(hold=5.0, stop=20.0, state=20.0)
    with closing(driver(fake, hover=1.0)) as arm:
        flight = Flight(FlightConfig())
        bench = ControlBench(
            tmp_path, arm, flight, LIMITS, period=TICK, fresh=fresh, pace=TICK, home=home
        )

        def flies() -> None:
            assert bench.ask(Command.HOME) == Mode.HOMING
            bench.until(lambda: fake.height > 0.1, "it takes off")

        flies()
        bench.becomes(Mode.IDLE)
        assert arm.phase == Phase.FLYING
        lands(arm, fake, bench.turn)
        assert bench.mode == Mode.IDLE and not bench.fault
        assert bench.ask(Command.ARM) == Mode.ARMED and not fake.firmware.flying, "not in the air"
        bench.ask(Command.STOP)
        bench.becomes(Mode.IDLE)
        flies()
        bench.becomes(Mode.IDLE)
        bench.control.chain.fault = "a test says so"
        bench.becomes(Mode.ESTOP)
        lands(arm, fake, bench.turn)
        assert bench.fault == "a test says so"
        assert bench.ask(Command.RESET) == Mode.IDLE and not bench.fault
        flies()
        assert bench.ask(Command.ESTOP) == Mode.ESTOP
        falls(fake, bench.turn)
        bench.until(lambda: "operator" in bench.fault, "and says why")


UP = Setpoint("place", (0.0, 0.0, 0.5))


class Radio:
    """What cflib sends, as bytes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.platform = self

    def get_protocol_version(self) -> int:
        return 12

    def send_packet(self, packet: CRTPPacket) -> None:
        self.sent.append(bytes([packet.get_header()]) + bytes(packet.data))


class Drone:
    """The emulator on the floor, and a clock."""

    def __init__(self) -> None:
        self.body = Flown(SimConfig(noise=0.0))
        self.firmware = crtp.Firmware(self.body, 0.0)
        self.server = crtp.Server(self.firmware)

    def run(self, seconds: float, say: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / STEP)):
            say()
            self.firmware.tick(self.firmware.now + STEP)

    def up(self, seconds: float) -> None:
        """As long as somebody streams that it should be half a metre up."""
        self.run(seconds, lambda: self.firmware.follow(UP))

    def fly(self) -> None:
        """Half a metre up, and steady."""
        self.run(0.1)
        assert self.firmware.arm(True)
        self.up(3.0)
        assert self.firmware.state == State.FLYING and abs(self.height - 0.5) < 0.02

    @property
    def height(self) -> float:
        return float(self.body.state[2])


def test_packets_by_hand() -> None:
    # Port 7, channel 0: 0b0111_11_00; type 7 and four floats.
    frame = crtp.pack(crtp.GENERIC, 0, struct.pack("<B4f", 7, 1.0, 2.0, 3.0, 90.0))
    assert frame.hex() == "7c070000803f00000040000040400000b442"
    packet = crtp.parse(frame)
    assert packet is not None and packet[:2] == (7, 0)
    made = setpoint_of(packet.data)
    assert made is not None and made.place == (1, 2, 3)
    assert made.yaw == pytest.approx(math.pi / 2) and not made.spins
    assert crtp.parse(b"") is None and crtp.parse(bytes(32)) is None
    for bad in (b"\x07", frame[1:-1], frame[1:] + b"\0", struct.pack("<B4f", 7, math.nan, 0, 0, 0)):
        assert setpoint_of(bad) is None
    with pytest.raises(ValueError, match="31 bytes"):
        crtp.pack(0, 0, bytes(31))


def test_what_the_client_says_is_what_is_heard() -> None:
    radio = Radio()
    commander, planner = Commander(radio), HighLevelCommander(radio)
    commander.send_position_setpoint(0.1, -0.2, 0.3, 45)
    commander.send_hover_setpoint(0.1, 0.2, -90, 0.4)
    half = math.radians(-100) / 2
    facing = [0.0, 0.0, math.sin(half), math.cos(half)]
    commander.send_full_state_setpoint([1, -2, 0.5], [0.1, 0, 0], [0, 0, 0], facing, 0, 0, 0)
    commander.send_stop_setpoint()
    assert all(frame[0] == 0x7C for frame in radio.sent)
    place, hover, full, stop = (setpoint_of(frame[1:]) for frame in radio.sent)
    assert place and hover and full and stop == OFF
    assert place.place == pytest.approx((0.1, -0.2, 0.3))
    assert hover.across == "velocity" and hover.place[2] == pytest.approx(0.4)
    assert hover.yaw == pytest.approx(-math.pi / 2) and hover.spins
    assert hover.velocity[:2] == pytest.approx((0.1, 0.2))
    assert full.place == (1, -2, 0.5) and full.velocity == (0.1, 0, 0)
    assert full.yaw == pytest.approx(math.radians(-100), abs=0.01)
    radio.sent.clear()
    bench = Drone()
    bench.firmware.follow(UP)
    planner.land(0.2, 2.0, yaw=None)
    assert bench.server.hear(radio.sent.pop()) is not None
    assert bench.firmware.landing == Landing(2.0, pytest.approx(0.2))
    commander.send_setpoint(0, 0, 0, 0)
    bench.server.hear(radio.sent.pop())
    assert bench.firmware.setpoint == OFF and bench.firmware.streamed, "it takes leave"


def test_it_levels_after_half_a_second_and_falls_after_two() -> None:
    bench = Drone()
    bench.fly()
    bench.run(0.48)
    assert bench.firmware.state == State.FLYING
    bench.run(0.05)
    assert bench.firmware.state == State.LEVEL and bench.height > 0.45
    bench.up(0.1)
    assert bench.firmware.state == State.FLYING, "it was heard of again"
    bench.run(1.98)
    assert bench.firmware.state == State.LEVEL and bench.height > 0.4, "the height is kept"
    bench.run(0.05)
    assert bench.firmware.state == State.LOCKED and not bench.firmware.can_fly
    bench.up(2.0)
    assert bench.height == 0 and bench.firmware.state == State.LOCKED, "for good"
    assert not bench.firmware.arm(True) and bench.firmware.info & 1 << 6


def test_its_planner_lands_it_without_anyone() -> None:
    bench = Drone()
    bench.fly()
    bench.firmware.land(Landing(1.0, 0.0))
    bench.run(0.3)
    assert bench.height > 0.45, "who streams set-points comes first, until it lets go"
    bench.up(0.1)
    bench.firmware.relax()
    bench.firmware.land(Landing(2.0, 0.0))
    bench.run(1.0)
    assert 0.15 < bench.height < 0.4 and bench.firmware.landing
    bench.run(2.0)
    assert bench.height < 0.02 and not bench.firmware.landing
    assert bench.firmware.flying, "it waits two seconds before it believes that"
    bench.run(2.5)
    assert bench.firmware.state == State.READY and not bench.firmware.armed


def test_what_its_supervisor_is_told() -> None:
    """To arm, without which it does not fly, and to stop."""
    bench = Drone()
    bench.run(0.1)
    bench.up(1.0)
    assert bench.height == 0 and bench.firmware.state == State.READY, "nobody armed it"
    bench.firmware.follow(OFF)  # or it would start at once
    answer = bench.server.hear(crtp.pack(crtp.SUPERVISOR, 1, b"\x01\x01"))
    assert answer == crtp.pack(crtp.SUPERVISOR, 1, b"\x81\x01\x01")
    bench.run(0.1)
    assert bench.firmware.state == State.ARMED
    bench.up(1.0)
    assert bench.server.hear(crtp.pack(crtp.SUPERVISOR, 1, b"\x03")) is None
    bench.up(0.02)
    assert bench.firmware.state == State.LOCKED


def test_a_place_that_is_told_is_believed() -> None:
    body = Flown(SimConfig(place=(0.3, 0.2, 0.0), external=True, noise=0.0))
    assert body.measure().place == pytest.approx((0, 0, 0), abs=1e-6)
    assert body.measure().variance > 1
    server = crtp.Server(crtp.Firmware(body, 0.0))
    server.hear(crtp.pack(crtp.LOCALIZATION, 0, struct.pack("<3f", 1.3, 0.2, 0.0)))
    assert body.measure().place == pytest.approx((1.3, 0.2, 0.0), abs=1e-6)
    assert body.measure().variance < 0.01


def test_noise_is_survived() -> None:
    """Random, flipped and cut frames are answered or dropped."""
    draw, bench, answered = random.Random(0), Drone(), 0
    good = [
        crtp.pack(crtp.GENERIC, 0, struct.pack("<B4f", 7, 0.1, 0.2, 0.3, 4.0)),
        crtp.pack(crtp.COMMANDER, 0, struct.pack("<3fH", 1.0, 2.0, 3.0, 0)),
        crtp.pack(crtp.LOG, 1, bytes([6, 1, 7, 0, 0, 7, 1, 0])),
        crtp.pack(crtp.LOG, 1, bytes([3, 1, 1])),
        crtp.pack(crtp.PARAM, 2, struct.pack("<Hf", 5, 0.1)),
        crtp.pack(crtp.HIGH_LEVEL, 0, struct.pack("<BBff?f", 8, 0, 0.1, 0.0, True, 1.0)),
        crtp.pack(crtp.LOCALIZATION, 0, struct.pack("<3f", 0.1, 0.2, 0.3)),
    ]
    for k in range(100_000):
        frame = bytearray(good[k % len(good)])
        if k % 3 == 0:
            frame = bytearray(draw.randbytes(draw.randrange(40)))
        elif k % 3 == 1:
            frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
            frame = frame[: draw.randrange(len(frame) + 1)]
        answered += bench.server.hear(bytes(frame)) is not None
        if k % 500 == 0:
            bench.run(STEP)
            assert all(len(each) <= crtp.MOST + 1 for each in bench.server.tell(1e6 + k))
    assert answered > 1000 and bench.server.dropped > 1000
