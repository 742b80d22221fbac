"""Codecs: the frames of both servo protocols.

Dynamixel, protocol 2.0 (Robotis e-manual, protocol 2.0):

    FF FF FD 00 | id | length (2) | instruction | data ... | CRC (2)

`length` counts what follows it. Inside, FF FF FD is sent as FF FF FD FD, so that a header never
occurs in data. The CRC (x^16 + x^15 + x^2 + 1, from 0, high bit first) covers all bytes before it.
Numbers are little-endian.

Feetech, STS and SMS servos (Feetech's communication protocol manual):

    FF FF | id | length | instruction, or error in a reply | data ... | checksum

`length` counts what follows it; the checksum is the complement of the sum of all after FF FF.
Addresses are one byte, numbers little-endian, and signed ones sign and magnitude. Nothing but that
sum tells a reply from noise, and it misses one corruption of two bytes in some 256.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

BROADCAST = 0xFE
HIGHEST_ID = 0xFC
PING = 0x01
READ = 0x02
WRITE = 0x03
STATUS = 0x55  # of a Dynamixel
SYNC_READ = 0x82
SYNC_WRITE = 0x83
LONGEST = 1024  # bytes of one frame: anything that claims more is noise
MOST = 253  # bytes of data that one frame of Feetech's can carry


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


class Codec(ABC):
    """Frames of one protocol."""

    header: ClassVar[bytes]
    width: ClassVar[int]  # bytes of an address, a size and the length
    shortest: ClassVar[int]  # bytes of a frame

    @abstractmethod
    def frame(self, id: int, code: int, data: bytes = b"") -> bytes:
        """The bytes of one packet. ValueError for one that is too long."""

    @abstractmethod
    def opened(self, frame: bytes) -> Packet | None:
        """The packet of a whole frame; None where its checksum is wrong."""

    @abstractmethod
    def reply(self, packet: Packet) -> Reply | None:
        """The reply of a servo; None for what is none."""

    @abstractmethod
    def answer(self, id: int, error: int, data: bytes = b"") -> bytes:
        """The frame of a servo's reply."""

    def take(self, buffer: bytearray) -> Packet | None:
        """The next packet at the front of `buffer`, taken out of it together with the noise before
        it; None while there is no whole one. A frame with a wrong checksum is noise."""
        start = len(self.header)
        body = start + 1 + self.width
        while True:
            at = buffer.find(self.header)
            if at < 0:
                del buffer[: max(0, len(buffer) - start + 1)]
                return None
            del buffer[:at]
            if len(buffer) < body:
                return None
            size = body + int.from_bytes(buffer[start + 1 : body], "little")
            known = buffer[start] <= HIGHEST_ID or buffer[start] == BROADCAST
            if known and self.shortest <= size <= LONGEST:
                if len(buffer) < size:
                    return None
                if (packet := self.opened(bytes(buffer[:size]))) is not None:
                    del buffer[:size]
                    return packet
            del buffer[:1]

    def begins(self, data: bytes | bytearray) -> bool:
        """Whether `data` begins as a frame does; also where there are no data."""
        return self.header.startswith(bytes(data[: len(self.header)]))

    def ping(self, id: int) -> bytes:
        return self.frame(id, PING)

    def read(self, id: int, address: int, size: int) -> bytes:
        return self.frame(id, READ, self._number(address) + self._number(size))

    def write(self, id: int, address: int, data: bytes) -> bytes:
        return self.frame(id, WRITE, self._number(address) + data)

    def sync_read(self, address: int, size: int, ids: Sequence[int]) -> bytes:
        """A frame to which every servo of `ids` replies in turn."""
        block = self._number(address) + self._number(size)
        return self.frame(BROADCAST, SYNC_READ, block + bytes(ids))

    def sync_write(self, address: int, data: Mapping[int, bytes]) -> bytes:
        """A frame with as many bytes for every id, without replies."""
        block = self._number(address) + self._number(len(next(iter(data.values()))))
        entries = b"".join(bytes((id,)) + value for id, value in data.items())
        return self.frame(BROADCAST, SYNC_WRITE, block + entries)

    def _number(self, number: int) -> bytes:
        return number.to_bytes(self.width, "little")


class Dynamixel(Codec):
    """Protocol 2.0."""

    header = b"\xff\xff\xfd\x00"
    width = 2
    shortest = 10

    def frame(self, id: int, code: int, data: bytes = b"") -> bytes:
        body = (bytes((code,)) + data).replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
        if len(body) + 9 > LONGEST:
            raise ValueError(f"a frame of {len(body) + 9} bytes is longer than {LONGEST}")
        out = self.header + bytes((id,)) + self._number(len(body) + 2) + body
        return out + self._number(crc16(out))

    def opened(self, frame: bytes) -> Packet | None:
        if self._number(crc16(frame[:-2])) != frame[-2:]:
            return None
        body = frame[7:-2].replace(b"\xff\xff\xfd\xfd", b"\xff\xff\xfd")
        return Packet(frame[4], body[0], body[1:])

    def reply(self, packet: Packet) -> Reply | None:
        if packet.code != STATUS or not packet.data:  # an instruction: our own, echoed
            return None
        return Reply(packet.id, packet.data[0], packet.data[1:])

    def answer(self, id: int, error: int, data: bytes = b"") -> bytes:
        return self.frame(id, STATUS, bytes((error,)) + data)


class Feetech(Codec):
    """STS and SMS servos. An echo of an instruction looks like a reply: the port has to remove
    it."""

    header = b"\xff\xff"
    width = 1
    shortest = 6

    def frame(self, id: int, code: int, data: bytes = b"") -> bytes:
        if len(data) > MOST:
            raise ValueError(f"{len(data)} bytes of data are more than a frame's {MOST}")
        body = bytes((id, len(data) + 2, code)) + data
        return self.header + body + bytes((~sum(body) & 0xFF,))

    def opened(self, frame: bytes) -> Packet | None:
        if ~sum(frame[2:-1]) & 0xFF != frame[-1]:
            return None
        return Packet(frame[2], frame[4], frame[5:-1])

    def reply(self, packet: Packet) -> Reply | None:
        return None if packet.id == BROADCAST else Reply(*packet)

    def answer(self, id: int, error: int, data: bytes = b"") -> bytes:
        return self.frame(id, error, data)


DYNAMIXEL = Dynamixel()
FEETECH = Feetech()


def _table() -> tuple[int, ...]:
    out: list[int] = []
    for byte in range(256):
        crc = byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ (0x8005 if crc & 0x8000 else 0)
        out.append(crc & 0xFFFF)
    return tuple(out)


TABLE = _table()


def crc16(data: bytes) -> int:
    """The checksum of a Dynamixel's `data`."""
    crc = 0
    for byte in data:
        crc = ((crc << 8) & 0xFFFF) ^ TABLE[(crc >> 8) ^ byte]
    return crc


def signed(raw: int, bit: int) -> int:
    """The number that `raw` means, whose sign is bit number `bit` (Feetech)."""
    magnitude = raw & ((1 << bit) - 1)
    return -magnitude if raw >> bit & 1 else magnitude


def unsigned(value: int, bit: int) -> int:
    """The register's content for `value` (Feetech). ValueError where it does not fit."""
    if abs(value) >= 1 << bit:
        raise ValueError(f"{value} does not fit into {bit} bits and a sign")
    return (1 << bit) - value if value < 0 else value
