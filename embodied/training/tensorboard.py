"""EventFile: metrics as a file that TensorBoard reads; nothing has to be installed to write it.

The file is a sequence of records (TFRecord): the length of the data (uint64) and its checksum, the
data and its checksum (CRC-32C, rotated by 15 bits, plus a constant; each uint32, little-endian).
The data are protocol buffers `Event` (tensorflow/core/util/event.proto): wall_time = 1, step = 2,
file_version = 3, summary = 5, session_log = 7.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path


def _crc_table() -> tuple[int, ...]:
    table: list[int] = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 * (byte & 1))
        table.append(byte)
    return tuple(table)


CRC = _crc_table()
LARGEST = 3.4e38  # of a float32
VERSION = b"brain.Event:2"
START = b"\x08\x01"  # SessionLog: TensorBoard drops what it has from this step on


class EventFile:
    """Appends to a new file in `folder`; it replaces what earlier files have after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.embodied.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._add(0, _field(3, VERSION))
        if step:
            self._add(step + 1, _field(7, START))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append the `values` of `step`, by name."""
        each = (
            _field(1, _field(1, name.encode()) + _float(value)) for name, value in values.items()
        )
        self._add(step, _field(5, b"".join(each)))

    def finish(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, step: int, content: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + content
        size = struct.pack("<Q", len(event))
        self._file.write(size + _checksum(size) + event + _checksum(event))
        self._file.flush()


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _float(value: float) -> bytes:
    """The field simple_value = 2, a float32."""
    return b"\x15" + struct.pack("<f", max(min(value, LARGEST), -LARGEST))


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
