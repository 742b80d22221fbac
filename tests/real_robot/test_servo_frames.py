"""Frames of servo buses in both protocols: known bytes, stuffing, signs and noise; and the makers'
own software as a client of the emulated bus."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from embodied.real_robot.drivers.servos.bus import (
    DYNAMIXEL,
    FEETECH,
    MAKES,
    PING,
    WRITE,
    Codec,
    Packet,
    Reply,
    signed,
    unsigned,
)
from embodied.real_robot.emulators.servos.bus import FakeBus


@pytest.mark.parametrize(
    ("made", "known"),
    [
        (DYNAMIXEL.frame(1, PING), "ff ff fd 00 01 03 00 01 19 4e"),
        (DYNAMIXEL.read(1, 132, 4), "ff ff fd 00 01 07 00 02 84 00 04 00 1d 15"),
        (
            DYNAMIXEL.frame(1, WRITE, b"\x74\x00\x00\x02\x00\x00"),
            "ff ff fd 00 01 09 00 03 74 00 00 02 00 00 ca 89",
        ),
        (DYNAMIXEL.sync_read(132, 4, (1, 2)), "ff ff fd 00 fe 09 00 82 84 00 04 00 01 02 ce fa"),
        (
            DYNAMIXEL.sync_write(116, {1: b"\x00\x02\x00\x00", 2: b"\x01\x02\x00\x00"})[:-2],
            "ff ff fd 00 fe 11 00 83 74 00 04 00 01 00 02 00 00 02 01 02 00 00",
        ),
        (FEETECH.frame(1, PING), "ff ff 01 02 01 fb"),
        (FEETECH.read(1, 56, 2), "ff ff 01 04 02 38 02 be"),
        (FEETECH.frame(1, WRITE, b"\x2a\x00\x08"), "ff ff 01 05 03 2a 00 08 c4"),
        (FEETECH.sync_read(56, 2, (1, 2)), "ff ff fe 06 82 38 02 01 02 3c"),
        (
            FEETECH.sync_write(42, {1: b"\x00\x08", 2: b"\x01\x08"}),
            "ff ff fe 0a 83 2a 02 01 00 08 02 01 08 34",
        ),
    ],
)
def test_known_frames(made: bytes, known: str) -> None:
    assert made.hex(" ") == known


def test_a_header_in_the_data_is_stuffed_and_counted() -> None:
    made = DYNAMIXEL.frame(1, WRITE, b"\x10\x00\xff\xff\xfd\x07")
    assert made[5:7] == b"\x0a\x00" and made[10:15] == b"\xff\xff\xfd\xfd\x07"
    assert made.count(b"\xff\xff\xfd\x00") == 1
    assert DYNAMIXEL.take(bytearray(made)) == Packet(1, WRITE, b"\x10\x00\xff\xff\xfd\x07")
    twice = b"\x10\x00\xff\xff\xfd\xfd\xff\xff\xfd\x00"
    assert DYNAMIXEL.take(bytearray(DYNAMIXEL.frame(1, WRITE, twice))) == Packet(1, WRITE, twice)


def test_sign_and_magnitude() -> None:
    assert [signed(raw, 15) for raw in (0, 5, 0x8005, 0x7FFF)] == [0, 5, -5, 32767]
    assert unsigned(-3, 11) == 0x0803 and signed(unsigned(-2047, 11), 11) == -2047
    with pytest.raises(ValueError, match="2048 does not fit"):
        unsigned(2048, 11)


@pytest.mark.parametrize(
    ("make", "block", "speed", "current"),
    [
        ("dynamixel", struct.pack("<hii", -100, 200, 3000), 4.7962, -100),
        ("feetech", struct.pack("<HH9xH", 3000, 0x8000 | 2048, 100), -3.14159, 100),
    ],
)
def test_what_a_servo_measures_in_si_units(
    make: str, block: bytes, speed: float, current: int
) -> None:
    assert MAKES[make].motion(block) == (3000, pytest.approx(speed, abs=1e-4), current)


def test_an_echoed_instruction_is_no_reply() -> None:
    packet = DYNAMIXEL.take(bytearray(DYNAMIXEL.frame(3, PING)))
    assert packet is not None and DYNAMIXEL.reply(packet) is None


@pytest.mark.parametrize("codec", [DYNAMIXEL, FEETECH])
def test_one_byte_at_a_time_and_after_noise(codec: Codec) -> None:
    replies = [Reply(i, 0x80, bytes(range(i))) for i in range(1, 9)]
    buffer, found = bytearray(), []
    for byte in b"\x00\xff\xfe\xff".join(codec.answer(*reply) for reply in replies):
        buffer.append(byte)
        while (packet := codec.take(buffer)) is not None:
            found.append(codec.reply(packet))
    assert found == replies


@pytest.mark.parametrize(("codec", "share"), [(DYNAMIXEL, 0.999), (FEETECH, 0.97)])
def test_a_hundred_thousand_random_frames(codec: Codec, share: float) -> None:
    """Good frames, broken ones and noise in one stream: nothing that was not sent with a right
    checksum comes out, the good ones do, and nothing is left hanging. Noise with a right sum (of
    Feetech's 1 in 256) takes a good frame with it now and then."""
    draw = random.Random(7)
    good = found = 0
    for _ in range(1000):
        stream, sent = bytearray(), []
        for _ in range(100):
            data = draw.randbytes(draw.randrange(12))
            frame = bytearray(codec.frame(draw.randrange(0xFD), draw.randrange(256), data))
            kind = draw.randrange(4)
            if kind == 1:
                frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
            elif kind == 2:
                frame = bytearray(codec.header + draw.randbytes(draw.randrange(12)))
            elif kind == 3:
                del frame[draw.randrange(len(frame)) :]
            else:
                sent.append(bytes(frame))
            stream += frame
        good += len(sent)
        stream += bytes(1100)
        whole, buffer = bytes(stream), stream
        while (packet := codec.take(buffer)) is not None:
            again = codec.frame(*packet)
            found += again in sent
            assert again in whole, "made anew, checksum and all, it is in the stream"
        assert len(buffer) < 4
    assert good > 20_000 and found > share * good


@contextmanager
def client(protocol: str) -> Iterator[tuple[FakeBus, Any, Any, Any]]:
    """A bus, the maker's software, its port and its packets."""
    module, version = {"dynamixel": ("dynamixel_sdk", 2.0), "feetech": ("scservo_sdk", 0)}[protocol]
    sdk = pytest.importorskip(module)
    with FakeBus(protocol, [1000, 2000, 3000]) as bus:
        port = sdk.PortHandler(bus.path)
        assert port.openPort() and port.setBaudRate(1_000_000)
        port.tx_time_per_byte = 100.0  # ms: its time-outs, so that a busy machine is no fault
        yield bus, sdk, port, sdk.PacketHandler(version)
        port.closePort()


def test_dynamixel_sdk_one_by_one() -> None:
    with client("dynamixel") as (bus, sdk, port, packet):
        assert packet.ping(port, 2) == (1020, sdk.COMM_SUCCESS, 0)
        assert packet.read4ByteTxRx(port, 3, 132) == (3000, sdk.COMM_SUCCESS, 0)
        assert packet.write1ByteTxRx(port, 1, 64, 1) == (sdk.COMM_SUCCESS, 0)
        assert packet.write1ByteTxRx(port, 1, 11, 4) == (sdk.COMM_SUCCESS, 7), "torque is on"
        assert packet.write1ByteTxRx(port, 2, 11, 4) == (sdk.COMM_SUCCESS, 0)
        assert bus.servos[1].table[11] == 3 and bus.servos[2].table[11] == 4
        assert packet.write4ByteTxRx(port, 2, 116, 0xFDFFFF) == (sdk.COMM_SUCCESS, 0), "stuffed"
        assert packet.read4ByteTxRx(port, 2, 116)[0] == 0xFDFFFF
        bus.servos[1].alert = 0x20
        assert packet.read1ByteTxRx(port, 1, 70)[::2] == (0x20, 0x80)


def test_feetech_sdk_one_by_one() -> None:
    with client("feetech") as (bus, sdk, port, packet):
        assert packet.ping(port, 2) == (777, sdk.COMM_SUCCESS, 0)
        assert packet.read2ByteTxRx(port, 3, 56) == (3000, sdk.COMM_SUCCESS, 0)
        assert packet.write1ByteTxRx(port, 1, 33, 1) == (sdk.COMM_SUCCESS, 0)
        assert bus.servos[1].table[33] == 0, "EEPROM, locked"
        assert packet.write1ByteTxRx(port, 1, 55, 0) == (sdk.COMM_SUCCESS, 0)
        assert packet.write1ByteTxRx(port, 1, 33, 1) == (sdk.COMM_SUCCESS, 0)
        assert bus.servos[1].table[33] == 1


@pytest.mark.parametrize(
    ("protocol", "block", "position", "goal", "size"),
    [("dynamixel", (126, 10), 132, 116, 4), ("feetech", (56, 4), 56, 42, 2)],
)
def test_sdks_in_groups(
    protocol: str, block: tuple[int, int], position: int, goal: int, size: int
) -> None:
    with client(protocol) as (bus, sdk, port, packet):
        group = sdk.GroupSyncRead(port, packet, *block)
        goals = sdk.GroupSyncWrite(port, packet, goal, size)
        for id in bus.servos:
            assert group.addParam(id)
            assert goals.addParam(id, list((1500 + id).to_bytes(size, "little")))
        assert group.txRxPacket() == sdk.COMM_SUCCESS
        assert [group.getData(id, position, size) for id in bus.servos] == [1000, 2000, 3000]
        assert goals.txPacket() == sdk.COMM_SUCCESS
        read = getattr(packet, f"read{size}ByteTxRx")
        assert [read(port, id, goal)[0] for id in bus.servos] == [1501, 1502, 1503]
