"""Packets and replies, as both servo protocols carry them."""

from __future__ import annotations

from typing import NamedTuple

BROADCAST = 0xFE
HIGHEST_ID = 0xFC


class Packet(NamedTuple):
    """A frame whose checksum was right: who, the byte that says what, and what came with it."""

    id: int
    code: int
    data: bytes


class Reply(NamedTuple):
    """The answer of a servo; `error` is its error byte, 0 without an error."""

    id: int
    error: int
    data: bytes
