"""The Crazyflie's emulator by itself: packets by hand, its rules on a clock that the test moves,
and noise."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import pytest
from cflib.crazyflie.commander import Commander
from cflib.crazyflie.high_level_commander import HighLevelCommander
from cflib.crtp.crtpstack import CRTPPacket

from embodied.envs.hardware_sim.crazyflie import Config
from embodied.envs.hardware_sim.crazyflie_flight import STEP, Flown
from embodied.real_robot.emulators.crazyflie import crtp
from embodied.real_robot.emulators.crazyflie.crtp import (
    OFF,
    Order,
    Setpoint,
    generic,
    legacy,
    order,
)
from embodied.real_robot.emulators.crazyflie.firmware import Config as FirmwareConfig
from embodied.real_robot.emulators.crazyflie.firmware import Firmware, State
from embodied.real_robot.emulators.crazyflie.server import Server

FRAMES = 100_000
UP = Setpoint("place", "place", "angle", (0.0, 0.0, 0.5))


class Radio:
    """What cflib sends, as bytes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.platform = self

    def get_protocol_version(self) -> int:
        return 12

    def send_packet(self, packet: CRTPPacket) -> None:
        self.sent.append(bytes([packet.get_header()]) + bytes(packet.data))


class Bench:
    """A drone on the floor and a clock."""

    def __init__(self, **settings: bool) -> None:
        self.body = Flown(Config(noise=0.0))
        self.firmware = Firmware(FirmwareConfig(**settings), self.body, 0.0)
        self.server = Server(self.firmware)

    def run(self, seconds: float, say: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / STEP)):
            say()
            self.firmware.tick(self.firmware.now + STEP)

    def fly(self) -> None:
        """Half a metre up, and steady."""
        self.run(0.1)
        assert self.firmware.arm(True)
        self.run(3.0, lambda: self.firmware.follow(UP))
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
    made = generic(packet.data)
    assert made is not None and made.place == (1, 2, 3)
    assert made.yaw == pytest.approx(math.pi / 2) and made.turn == "angle"
    assert crtp.parse(b"") is None and crtp.parse(bytes(32)) is None
    for bad in (b"\x07", frame[1:-1], frame[1:] + b"\0", struct.pack("<B4f", 7, math.nan, 0, 0, 0)):
        assert generic(bad) is None
    with pytest.raises(ValueError, match="31 bytes"):
        crtp.pack(0, 0, bytes(31))


def test_what_the_client_says_is_what_is_heard() -> None:
    radio = Radio()
    commander, planner = Commander(radio), HighLevelCommander(radio)
    commander.send_position_setpoint(0.1, -0.2, 0.3, 45)
    commander.send_velocity_world_setpoint(0.1, 0.2, 0.3, 90)
    commander.send_hover_setpoint(0.1, 0.2, -90, 0.4)
    commander.send_zdistance_setpoint(10, 20, 30, 0.4)
    half = math.radians(-100) / 2
    facing = [0.0, 0.0, math.sin(half), math.cos(half)]
    commander.send_full_state_setpoint([1, -2, 0.5], [0.1, 0, 0], [0, 0, 0], facing, 0, 0, 0)
    commander.send_stop_setpoint()
    heard = [generic(frame[1:]) for frame in radio.sent]
    assert all(frame[0] == 0x7C for frame in radio.sent)
    place, velocity, hover, distance, full, stop = heard
    assert place and velocity and hover and distance and full
    assert place.place == pytest.approx((0.1, -0.2, 0.3))
    assert velocity.velocity == pytest.approx((0.1, 0.2, 0.3)) and velocity.up == "velocity"
    assert hover.body and hover.place[2] == pytest.approx(0.4)
    assert hover.yaw == pytest.approx(-math.pi / 2)
    assert hover.velocity[:2] == pytest.approx((0.1, 0.2))
    assert distance.tilt == pytest.approx((math.radians(10), math.radians(20)))
    assert full.place == (1, -2, 0.5) and full.yaw == pytest.approx(math.radians(-100), abs=0.01)
    assert full.velocity == (0.1, 0, 0) and stop == OFF
    radio.sent.clear()
    commander.send_setpoint(10, 20, 30, 35000)
    tilted = legacy(radio.sent.pop()[1:])
    assert tilted is not None and tilted.thrust == pytest.approx(24999 / 49999)
    assert tilted.tilt == pytest.approx((math.radians(10), math.radians(20)))
    planner.takeoff(0.5, 2.0, yaw=None)
    planner.land(0.0, 2.0)
    planner.go_to(1, 2, 3, 0.5, 4.0, relative=True)
    up, down, there = (order(frame[1:]) for frame in radio.sent)
    assert up == Order(2.0, (0, 0, 0.5), None, False, True, False)
    assert down == Order(2.0, (0, 0, 0), 0.0, False, True, True)
    assert there == Order(4.0, (1, 2, 3), 0.5, True)


def test_it_levels_after_half_a_second_and_falls_after_two() -> None:
    bench = Bench()
    bench.fly()
    bench.run(0.48)
    assert bench.firmware.state == State.FLYING
    bench.run(0.05)
    assert bench.firmware.state == State.LEVEL and bench.height > 0.45
    bench.run(0.1, lambda: bench.firmware.follow(UP))
    assert bench.firmware.state == State.FLYING, "it was heard of again"
    bench.run(1.98)
    assert bench.firmware.state == State.LEVEL and bench.height > 0.4, "the height is kept"
    bench.run(0.05)
    assert bench.firmware.state == State.LOCKED and not bench.firmware.can_fly
    bench.run(2.0, lambda: bench.firmware.follow(UP))
    assert bench.height == 0 and bench.firmware.state == State.LOCKED, "for good"
    assert not bench.firmware.arm(True)
    assert bench.firmware.info & 1 << 6


def test_its_planner_lands_it_without_anyone() -> None:
    bench = Bench()
    bench.fly()
    bench.firmware.obey(Order(1.0, (0, 0, 0), None, False, True, True))
    bench.run(0.3)
    assert bench.height > 0.45, "who streams set-points comes first, until it lets go"
    bench.run(0.1, lambda: bench.firmware.follow(UP))
    bench.firmware.relax()
    bench.firmware.obey(Order(2.0, (0, 0, 0), None, False, True, True))
    bench.run(1.0)
    assert 0.15 < bench.height < 0.4 and bench.firmware.planning
    bench.run(2.0)
    assert bench.height < 0.02 and not bench.firmware.planning
    assert bench.firmware.flying, "it waits two seconds before it believes that"
    bench.run(2.5)
    assert bench.firmware.state == State.READY and not bench.firmware.armed


def test_the_emergency_stop_and_its_watchdog() -> None:
    bench = Bench()
    bench.fly()
    assert bench.server.hear(crtp.pack(crtp.SUPERVISOR, 1, b"\x03")) is None
    bench.run(0.02, lambda: bench.firmware.follow(UP))
    assert bench.firmware.state == State.LOCKED
    other = Bench()
    other.fly()
    other.server.hear(crtp.pack(crtp.SUPERVISOR, 1, b"\x04"))
    other.run(0.95, lambda: other.firmware.follow(UP))
    assert other.firmware.state == State.FLYING
    other.run(0.1, lambda: other.firmware.follow(UP))
    assert other.firmware.state == State.LOCKED, "fed once, it wants to be fed every second"


def test_arming_is_asked_for_and_brushed_motors_do_it_themselves() -> None:
    bench = Bench()
    bench.run(0.1)
    bench.run(1.0, lambda: bench.firmware.follow(UP))
    assert bench.height == 0 and bench.firmware.state == State.READY, "nobody armed it"
    bench.firmware.follow(OFF)  # or it would start at once
    answer = bench.server.hear(crtp.pack(crtp.SUPERVISOR, 1, b"\x01\x01"))
    assert answer == crtp.pack(crtp.SUPERVISOR, 1, b"\x81\x01\x01")
    bench.run(0.1)
    assert bench.firmware.state == State.ARMED
    brushed = Bench(arms_itself=True)
    brushed.run(0.1)
    assert brushed.firmware.state == State.ARMED


def test_a_place_that_is_told_is_believed() -> None:
    body = Flown(Config(place=(0.3, 0.2, 0.0), external=True, noise=0.0))
    assert body.measure().place == pytest.approx((0, 0, 0), abs=1e-6)
    assert body.measure().variance > 1
    server = Server(Firmware(FirmwareConfig(), body, 0.0))
    server.hear(crtp.pack(crtp.LOCALIZATION, 0, struct.pack("<3f", 1.3, 0.2, 0.0)))
    assert body.measure().place == pytest.approx((1.3, 0.2, 0.0), abs=1e-6)
    assert body.measure().variance < 0.01


def noise(count: int) -> tuple[int, int]:
    """Random, flipped and cut frames: how many were answered and how many dropped."""
    draw, bench, answered = random.Random(0), Bench(), 0
    good = [
        crtp.pack(crtp.GENERIC, 0, struct.pack("<B4f", 7, 0.1, 0.2, 0.3, 4.0)),
        crtp.pack(crtp.COMMANDER, 0, struct.pack("<3fH", 1.0, 2.0, 3.0, 30000)),
        crtp.pack(crtp.LOG, 1, bytes([6, 1, 7, 0, 0, 7, 1, 0])),
        crtp.pack(crtp.LOG, 1, bytes([3, 1, 1])),
        crtp.pack(crtp.PARAM, 2, struct.pack("<Hf", 5, 0.1)),
        crtp.pack(crtp.HIGH_LEVEL, 0, struct.pack("<BBBBfffff", 12, 0, 0, 0, 0, 0, 1, 0, 1)),
        crtp.pack(crtp.LOCALIZATION, 0, struct.pack("<3f", 0.1, 0.2, 0.3)),
    ]
    for k in range(count):
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
    return answered, bench.server.dropped


def test_noise_is_survived() -> None:
    answered, dropped = noise(FRAMES)
    assert answered > 1000 and dropped > 1000
