"""CRTP, the Crazyflie's packets: a header of port and channel, then up to 30 bytes.

    header = port << 4 | 0b11 << 2 | channel

There is no checksum: the radio has one of its own, and so has UDP.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

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
