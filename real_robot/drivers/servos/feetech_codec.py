"""Feetech codec: the frames of STS and SMS servos (Feetech's communication protocol manual).

    FF FF | id | length | instruction, or error in a reply | data ... | checksum

`length` counts what follows it; the checksum is the complement of the sum of all after FF FF.
Addresses are one byte, numbers little-endian, and signed ones sign and magnitude. Nothing but that
sum tells a reply from noise, and it misses one corruption of two bytes in some 256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embodied.real_robot.drivers.servos.packet import BROADCAST, HIGHEST_ID, Packet, Reply

HEADER = b"\xff\xff"
PING = 0x01
READ = 0x02
WRITE = 0x03
SYNC_READ = 0x82
SYNC_WRITE = 0x83
MOST = 253  # bytes of data that one frame can carry


def checksum(data: bytes | bytearray) -> int:
    """Checksum of everything between header and checksum."""
    return ~sum(data) & 0xFF


def signed(raw: int, bit: int) -> int:
    """The number that `raw` means, whose sign is bit number `bit`."""
    magnitude = raw & ((1 << bit) - 1)
    return -magnitude if raw >> bit & 1 else magnitude


def unsigned(value: int, bit: int) -> int:
    """The register's content for `value`. ValueError where it does not fit."""
    if abs(value) >= 1 << bit:
        raise ValueError(f"{value} does not fit into {bit} bits and a sign")
    return (1 << bit) - value if value < 0 else value


def frame(id: int, code: int, data: bytes = b"") -> bytes:
    """The bytes of one packet. ValueError for one that is too long."""
    if len(data) > MOST:
        raise ValueError(f"{len(data)} bytes of data are more than a frame's {MOST}")
    body = bytes((id, len(data) + 2, code)) + data
    return HEADER + body + bytes((checksum(body),))


def take(buffer: bytearray) -> Packet | None:
    """The next packet at the front of `buffer`, taken out of it together with the noise before it;
    None while there is no whole one. A frame with a wrong checksum is noise."""
    while True:
        at = buffer.find(HEADER)
        if at < 0:
            del buffer[: max(0, len(buffer) - 1)]
            return None
        del buffer[:at]
        if len(buffer) < 4:
            return None
        size = 4 + buffer[3]
        if buffer[3] >= 2 and (buffer[2] <= HIGHEST_ID or buffer[2] == BROADCAST):
            if len(buffer) < size:
                return None
            if checksum(buffer[2 : size - 1]) == buffer[size - 1]:
                packet = Packet(buffer[2], buffer[4], bytes(buffer[5 : size - 1]))
                del buffer[:size]
                return packet
        del buffer[:1]


def reply(packet: Packet) -> Reply | None:
    """The reply of a servo. An echo of an instruction looks the same: the port has to remove it."""
    return None if packet.id == BROADCAST else Reply(*packet)


def answer(id: int, error: int, data: bytes = b"") -> bytes:
    """The frame of a servo's reply."""
    return frame(id, error, data)


def ping(id: int) -> bytes:
    return frame(id, PING)


def read(id: int, address: int, size: int) -> bytes:
    return frame(id, READ, bytes((address, size)))


def write(id: int, address: int, data: bytes) -> bytes:
    return frame(id, WRITE, bytes((address,)) + data)


def sync_read(address: int, size: int, ids: Sequence[int]) -> bytes:
    """A frame to which every servo of `ids` replies in turn."""
    return frame(BROADCAST, SYNC_READ, bytes((address, size)) + bytes(ids))


def sync_write(address: int, data: Mapping[int, bytes]) -> bytes:
    """A frame with as many bytes for every id, without replies."""
    size = len(next(iter(data.values())))
    entries = b"".join(bytes((id,)) + value for id, value in data.items())
    return frame(BROADCAST, SYNC_WRITE, bytes((address, size)) + entries)
