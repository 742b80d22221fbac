"""RTDE codec: packets of Universal Robots' real-time data exchange, protocol version 2.

    size (2, of all) | type (1) | payload          numbers are big-endian

There is no checksum and no synchronisation mark: TCP carries the stream, and an impossible packet
ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

VERSION = ord("V")
CONTROLLER = ord("v")
TEXT = ord("M")
OUTPUTS = ord("O")
INPUTS = ord("I")
START = ord("S")
PAUSE = ord("P")
DATA = ord("U")
KNOWN = {VERSION, CONTROLLER, TEXT, OUTPUTS, INPUTS, START, PAUSE, DATA}
LONGEST = 4096  # bytes of one packet
HEAD = struct.Struct(">HB")

FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT32": "I",
    "UINT64": "Q",
    "INT32": "i",
    "DOUBLE": "d",
    "VECTOR3D": "3d",
    "VECTOR6D": "6d",
    "VECTOR6INT32": "6i",
    "VECTOR6UINT32": "6I",
}


class RtdeError(ValueError):
    """Bytes that are no packet, or not the one that was agreed on."""


class Packet(NamedTuple):
    """A whole packet."""

    type: int
    payload: bytes


def pack(type: int, payload: bytes = b"") -> bytes:
    """The bytes of a packet. RtdeError for one that is too long."""
    size = HEAD.size + len(payload)
    if size > LONGEST:
        raise RtdeError(f"a packet of {size} bytes is longer than {LONGEST}")
    return HEAD.pack(size, type) + payload


def take(buffer: bytearray) -> Packet | None:
    """The packet at the front of `buffer`, taken out of it; None while it is not whole."""
    if len(buffer) < HEAD.size:
        return None
    size, type = HEAD.unpack_from(buffer)
    if not HEAD.size <= size <= LONGEST or type not in KNOWN:
        raise RtdeError(f"a packet of type {type} and {size} bytes cannot be")
    if len(buffer) < size:
        return None
    payload = bytes(buffer[HEAD.size : size])
    del buffer[:size]
    return Packet(type, payload)


class Recipe:
    """The fields of a data packet, in their order, as both sides have agreed."""

    def __init__(self, id: int, names: Sequence[str], types: Sequence[str]) -> None:
        if len(names) != len(types):
            raise RtdeError(f"{len(names)} fields were asked for, {len(types)} answered")
        for name, type in zip(names, types, strict=True):
            if type not in FORMATS:
                raise RtdeError(f"field {name} is {type}")
        self.id = id
        self.names = tuple(names)
        formats = [FORMATS[type] for type in types]
        self._fields = [(f, struct.Struct(">" + f)) for f in formats]
        self._all = struct.Struct(">" + "".join(formats))

    def pack(self, values: Sequence[Any]) -> bytes:
        """A data packet of one value (or a sequence, for a vector) a field."""
        flat: list[Any] = []
        for (form, _), value in zip(self._fields, values, strict=True):
            flat += list(value) if form[0].isdigit() else [value]
        return pack(DATA, bytes((self.id,)) + self._all.pack(*flat))

    def unpack(self, payload: bytes) -> dict[str, Any]:
        """Field by field; vectors are tuples. RtdeError for another recipe's, or a wrong length."""
        if len(payload) != 1 + self._all.size or payload[0] != self.id:
            raise RtdeError(f"a data packet of {len(payload)} bytes is not recipe {self.id}")
        out: dict[str, Any] = {}
        at = 1
        for name, (form, one) in zip(self.names, self._fields, strict=True):
            value = one.unpack_from(payload, at)
            out[name] = value if form[0].isdigit() else value[0]
            at += one.size
        return out


def setup(payload: bytes, names: Sequence[str]) -> Recipe:
    """The recipe that the answer to a setup request describes."""
    if not payload:
        raise RtdeError("an answer without a recipe")
    types = payload[1:].decode("ascii", errors="replace").split(",")
    return Recipe(payload[0], names, types)


def text(payload: bytes) -> str:
    """A message of the controller's: length, words, length, where from, a level of warning."""
    size = payload[0] if payload else 0
    return payload[1 : 1 + size].decode(errors="replace")
