"""Dynamixel codec: the frames of protocol 2.0 (Robotis e-manual, protocol 2.0).

    FF FF FD 00 | id | length (2) | instruction | data ... | CRC (2)

`length` counts what follows it. Inside, FF FF FD is sent as FF FF FD FD, so that a header never
occurs in data. The CRC (x^16 + x^15 + x^2 + 1, from 0, high bit first) covers all bytes before it.
Numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embodied.real_robot.drivers.servos.packet import BROADCAST, HIGHEST_ID, Packet, Reply

HEADER = b"\xff\xff\xfd\x00"
PING = 0x01
READ = 0x02
WRITE = 0x03
STATUS = 0x55
SYNC_READ = 0x82
SYNC_WRITE = 0x83
LONGEST = 1024  # bytes of one frame: anything that claims more is noise


def _table() -> tuple[int, ...]:
    out: list[int] = []
    for byte in range(256):
        crc = byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ (0x8005 if crc & 0x8000 else 0)
        out.append(crc & 0xFFFF)
    return tuple(out)


TABLE = _table()


def crc16(data: bytes | bytearray) -> int:
    """The checksum of `data`."""
    crc = 0
    for byte in data:
        crc = ((crc << 8) & 0xFFFF) ^ TABLE[(crc >> 8) ^ byte]
    return crc


def frame(id: int, code: int, data: bytes = b"") -> bytes:
    """The bytes of one packet. ValueError for one that is too long."""
    body = (bytes((code,)) + data).replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
    if len(body) + 9 > LONGEST:
        raise ValueError(f"a frame of {len(body) + 9} bytes is longer than {LONGEST}")
    out = HEADER + bytes((id,)) + (len(body) + 2).to_bytes(2, "little") + body
    return out + crc16(out).to_bytes(2, "little")


def take(buffer: bytearray) -> Packet | None:
    """The next packet at the front of `buffer`, taken out of it together with the noise before it;
    None while there is no whole one. A frame with a wrong checksum is noise."""
    while True:
        at = buffer.find(HEADER)
        if at < 0:
            del buffer[: max(0, len(buffer) - len(HEADER) + 1)]
            return None
        del buffer[:at]
        if len(buffer) < 7:
            return None
        size = 7 + int.from_bytes(buffer[5:7], "little")
        if 10 <= size <= LONGEST and (buffer[4] <= HIGHEST_ID or buffer[4] == BROADCAST):
            if len(buffer) < size:
                return None
            if crc16(buffer[: size - 2]) == int.from_bytes(buffer[size - 2 : size], "little"):
                body = bytes(buffer[7 : size - 2]).replace(b"\xff\xff\xfd\xfd", b"\xff\xff\xfd")
                packet = Packet(buffer[4], body[0], body[1:])
                del buffer[:size]
                return packet
        del buffer[:1]


def reply(packet: Packet) -> Reply | None:
    """The reply of a servo; None for an instruction (our own, echoed)."""
    if packet.code != STATUS or not packet.data:
        return None
    return Reply(packet.id, packet.data[0], packet.data[1:])


def answer(id: int, error: int, data: bytes = b"") -> bytes:
    """The frame of a servo's reply."""
    return frame(id, STATUS, bytes((error,)) + data)


def ping(id: int) -> bytes:
    return frame(id, PING)


def read(id: int, address: int, size: int) -> bytes:
    return frame(id, READ, _two(address) + _two(size))


def write(id: int, address: int, data: bytes) -> bytes:
    return frame(id, WRITE, _two(address) + data)


def sync_read(address: int, size: int, ids: Sequence[int]) -> bytes:
    """A frame to which every servo of `ids` replies in turn."""
    return frame(BROADCAST, SYNC_READ, _two(address) + _two(size) + bytes(ids))


def sync_write(address: int, data: Mapping[int, bytes]) -> bytes:
    """A frame with as many bytes for every id, without replies."""
    size = len(next(iter(data.values())))
    entries = b"".join(bytes((id,)) + value for id, value in data.items())
    return frame(BROADCAST, SYNC_WRITE, _two(address) + _two(size) + entries)


def _two(number: int) -> bytes:
    return number.to_bytes(2, "little")
