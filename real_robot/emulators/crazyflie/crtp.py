"""CRTP, the Crazyflie's packets: a header of port and channel, then up to 30 bytes.

    header = port << 4 | 0b11 << 2 | channel

There is no checksum: the radio has one of its own, and so has UDP.

Set-points and planner orders: port 7 channel 0 (generic) begins with a type; port 3 is the oldest:
roll, pitch, yaw rate, thrust. Angles are degrees in packets and radians here.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple

CONSOLE, PARAM, COMMANDER, MEMORY, LOG, LOCALIZATION = 0, 2, 3, 4, 5, 6
GENERIC, HIGH_LEVEL, SUPERVISOR, PLATFORM, LINK = 7, 8, 9, 13, 15
MOST = 30
"""Bytes of a payload."""


class Packet(NamedTuple):
    """A frame's parts."""

    port: int
    channel: int
    data: bytes


def pack(port: int, channel: int, data: bytes = b"") -> bytes:
    """A frame; ValueError where the parts do not fit one."""
    if not (0 <= port <= 15 and 0 <= channel <= 3 and len(data) <= MOST):
        raise ValueError(f"no CRTP packet: port {port}, channel {channel}, {len(data)} bytes")
    return bytes([port << 4 | 0b11 << 2 | channel]) + data


def parse(frame: bytes) -> Packet | None:
    """The parts of a frame, None where it is none. The two bits in the middle are not looked at:
    radios use them."""
    if not 1 <= len(frame) <= MOST + 1:
        return None
    return Packet(frame[0] >> 4, frame[0] & 3, frame[1:])


def unpack(layout: str, data: bytes) -> tuple[float, ...] | None:
    """The numbers of `data`, None where its size is another one or one of them is not finite."""
    if struct.calcsize(layout) != len(data):
        return None
    numbers = struct.unpack(layout, data)
    return numbers if all(abs(each) < 1e10 for each in numbers) else None


Vector = tuple[float, float, float]
ZERO: Vector = (0.0, 0.0, 0.0)
DEGREE = math.pi / 180
LEAST, FULL = 10_001, 60_000  # of the thrust numbers of the oldest packet


@dataclass(frozen=True, slots=True)
class Setpoint:
    """`across`: what is followed in the plane, `up`: in the vertical, `turn`: about it.

    `place` (m) and `velocity` (m/s; beside a place it is added to; along the drone's own axes where
    `body`), `tilt` (roll, pitch; rad), `yaw` (rad, or rad/s), `thrust` in [0, 1].
    """

    across: Literal["off", "place", "velocity", "tilt"] = "off"
    up: Literal["off", "place", "velocity", "thrust"] = "off"
    turn: Literal["angle", "rate"] = "rate"
    place: Vector = ZERO
    velocity: Vector = ZERO
    body: bool = False
    tilt: tuple[float, float] = (0.0, 0.0)
    yaw: float = 0.0
    thrust: float = 0.0


OFF = Setpoint()
"""The motors stand still."""


def generic(data: bytes) -> Setpoint | None:
    """Of port 7, channel 0; None where it is none."""
    kind, body = (data[0], data[1:]) if data else (-1, b"")
    if kind == 0:
        return OFF
    if kind in (7, 8, 9, 10) and (numbers := unpack("<4f", body)) is not None:
        return _four(kind, numbers)
    if kind == 6 and (numbers := unpack("<9hI3h", body)) is not None:
        place, velocity = (tuple(n / 1000 for n in numbers[i : i + 3]) for i in (0, 3))
        yaw = heading(int(numbers[9]))
        return Setpoint("place", "place", "angle", _three(place), _three(velocity), yaw=yaw)
    if kind == 11 and (numbers := unpack("<3fHB", body)) is not None and not numbers[4]:
        return tilted((*numbers[:3], numbers[3]))
    return None


def legacy(data: bytes) -> Setpoint | None:
    """Of port 3; a thrust of zero switches the motors off."""
    numbers = unpack("<3fH", data)
    return None if numbers is None else tilted(numbers)


def tilted(numbers: tuple[float, ...]) -> Setpoint:
    """Roll, minus pitch (degrees), yaw rate (degrees/s), thrust (10,001 to 60,000)."""
    roll, pitch, rate, thrust = numbers
    share = min(1.0, (thrust - LEAST) / (FULL - LEAST))
    if share <= 0:
        return OFF
    tilt = (roll * DEGREE, -pitch * DEGREE)
    return Setpoint("tilt", "thrust", tilt=tilt, yaw=rate * DEGREE, thrust=share)


def _four(kind: int, numbers: tuple[float, ...]) -> Setpoint:
    a, b, c, d = numbers
    if kind == 7:
        return Setpoint("place", "place", "angle", (a, b, c), yaw=d * DEGREE)
    if kind == 8:
        return Setpoint("velocity", "velocity", velocity=(a, b, c), yaw=d * DEGREE)
    if kind == 9:  # roll, pitch, yaw rate, height
        tilt = (a * DEGREE, b * DEGREE)
        return Setpoint("tilt", "place", place=(0.0, 0.0, d), tilt=tilt, yaw=c * DEGREE)
    velocity, place = (a, b, 0.0), (0.0, 0.0, d)
    return Setpoint("velocity", "place", "rate", place, velocity, True, yaw=c * DEGREE)


def heading(packed: int) -> float:
    """The yaw (rad) of a quaternion in 32 bits: the index of its largest part, then for each of the
    others (x, y, z, w order) a sign and 9 bits of its size, up to 1 / sqrt 2."""
    largest, parts, rest = packed >> 30 & 3, [0.0] * 4, packed
    for i in range(3, -1, -1):
        if i != largest:
            size = (rest & 511) / 511 / math.sqrt(2)
            parts[i] = -size if rest >> 9 & 1 else size
            rest >>= 10
    parts[largest] = math.sqrt(max(0.0, 1 - sum(part * part for part in parts)))
    x, y, z, w = parts
    return math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


def _three(numbers: tuple[float, ...]) -> Vector:
    return (numbers[0], numbers[1], numbers[2])


@dataclass(frozen=True, slots=True)
class Order:
    """To the planner on board: go to `height` or `place` in `seconds`; `lands`: stop there."""

    seconds: float
    place: Vector = ZERO
    yaw: float | None = None
    relative: bool = False
    vertical: bool = False
    lands: bool = False


STOP = Order(0.0)


def order(data: bytes) -> Order | None:
    """Of port 8: stop (3), take off (7), land (8), go to (4, 12); None for what is none."""
    kind, body = (data[0], data[1:]) if data else (-1, b"")
    if kind == 3:
        return STOP
    if kind in (7, 8) and (numbers := unpack("<Bff?f", body)) is not None:
        _, height, yaw, current, seconds = numbers
        turned = None if current else yaw
        return Order(_long(seconds), (0.0, 0.0, height), turned, False, True, kind == 8)
    layout = {4: "<BBfffff", 12: "<BBBfffff"}.get(kind)
    if layout is not None and (numbers := unpack(layout, body)) is not None:
        x, y, z, yaw, seconds = numbers[-5:]
        return Order(_long(seconds), (x, y, z), yaw, bool(numbers[1]))
    return None


def _long(seconds: float) -> float:
    return min(max(seconds, 0.1), 60.0)
