"""The two servo protocols' frames: known bytes, stuffing, signs, and 10^5 frames of noise each; and
the fake servo bus before the makers' own software as a client that knows nothing of ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from embodied.real_robot.drivers.servos.bus import MAKES
from embodied.real_robot.drivers.servos.codecs import DYNAMIXEL as dynamixel
from embodied.real_robot.drivers.servos.codecs import FEETECH as feetech
from embodied.real_robot.drivers.servos.codecs import Codec, Packet, Reply, signed, unsigned
from embodied.real_robot.emulators.servos.bus import FakeBus

BOTH = [dynamixel, feetech]


@pytest.mark.parametrize(
    ("made", "known"),
    [
        (dynamixel.ping(1), "ff ff fd 00 01 03 00 01 19 4e"),
        (dynamixel.read(1, 132, 4), "ff ff fd 00 01 07 00 02 84 00 04 00 1d 15"),
        (
            dynamixel.write(1, 116, (512).to_bytes(4, "little")),
            "ff ff fd 00 01 09 00 03 74 00 00 02 00 00 ca 89",
        ),
        (
            dynamixel.sync_read(132, 4, (1, 2)),
            "ff ff fd 00 fe 09 00 82 84 00 04 00 01 02 ce fa",
        ),
        (feetech.ping(1), "ff ff 01 02 01 fb"),
        (feetech.read(1, 56, 2), "ff ff 01 04 02 38 02 be"),
        (feetech.sync_read(56, 2, (1, 2)), "ff ff fe 06 82 38 02 01 02 3c"),
        (feetech.write(1, 42, (2048).to_bytes(2, "little")), "ff ff 01 05 03 2a 00 08 c4"),
    ],
)
def test_known_frames(made: bytes, known: str) -> None:
    assert made.hex(" ") == known


def test_sync_write_by_hand() -> None:
    made = feetech.sync_write(42, {1: b"\x00\x08", 2: b"\x01\x08"})
    # fe + 0a + 83 + 2a + 02 + 01 + 00 + 08 + 02 + 01 + 08 = 0x1cb; its low byte's complement: 0x34
    assert made.hex(" ") == "ff ff fe 0a 83 2a 02 01 00 08 02 01 08 34"
    made = dynamixel.sync_write(116, {1: b"\x00\x02\x00\x00", 2: b"\x01\x02\x00\x00"})
    assert made[:-2].hex(" ") == "ff ff fd 00 fe 11 00 83 74 00 04 00 01 00 02 00 00 02 01 02 00 00"


def test_a_header_in_the_data_is_stuffed_and_counted() -> None:
    made = dynamixel.write(1, 0x10, b"\xff\xff\xfd\x07")
    assert made[5:7] == b"\x0a\x00" and made[10:15] == b"\xff\xff\xfd\xfd\x07"
    assert made.count(b"\xff\xff\xfd\x00") == 1
    assert dynamixel.take(bytearray(made)) == Packet(1, 3, b"\x10\x00\xff\xff\xfd\x07")
    twice = dynamixel.write(1, 0x10, b"\xff\xff\xfd\xfd\xff\xff\xfd\x00")
    assert dynamixel.take(bytearray(twice)) == Packet(
        1, 3, b"\x10\x00\xff\xff\xfd\xfd\xff\xff\xfd\x00"
    )


def test_sign_and_magnitude() -> None:
    assert [signed(raw, 15) for raw in (0, 5, 0x8005, 0x7FFF)] == [0, 5, -5, 32767]
    assert signed(0x0403, 10) == -3 and unsigned(-3, 11) == 0x0803
    for value in (-2047, -1, 0, 1, 2047):
        assert signed(unsigned(value, 11), 11) == value
    with pytest.raises(ValueError, match="2048 does not fit"):
        unsigned(2048, 11)


def test_what_a_servo_measures_in_si_units() -> None:
    block = (-100).to_bytes(2, "little", signed=True) + (200).to_bytes(4, "little")
    motion = MAKES["dynamixel"].motion(block + (3000).to_bytes(4, "little"))
    assert motion == (3000, pytest.approx(4.7962, abs=1e-4), -100)
    block = bytearray(15)
    block[0:2], block[2:4] = (3000).to_bytes(2, "little"), (0x8000 | 2048).to_bytes(2, "little")
    block[13:15] = (100).to_bytes(2, "little")
    motion = MAKES["feetech"].motion(bytes(block))
    assert motion == (3000, pytest.approx(-3.14159, abs=1e-4), 100)


def test_an_echoed_instruction_is_no_reply() -> None:
    packet = dynamixel.take(bytearray(dynamixel.ping(3)))
    assert packet is not None and dynamixel.reply(packet) is None
    packet = dynamixel.take(bytearray(dynamixel.answer(3, 0x80, b"ab")))
    assert packet is not None and dynamixel.reply(packet) == Reply(3, 0x80, b"ab")


@pytest.mark.parametrize("codec", BOTH)
def test_one_byte_at_a_time_and_after_noise(codec: Codec) -> None:
    frames = [codec.answer(i, 0, bytes(range(i))) for i in range(1, 9)]
    buffer, found = bytearray(), []
    for byte in b"\x00\xff\xfe\xff".join(frames):
        buffer.append(byte)
        while (packet := codec.take(buffer)) is not None:
            found.append(codec.reply(packet))
    assert found == [Reply(i, 0, bytes(range(i))) for i in range(1, 9)]


@pytest.mark.parametrize("codec", BOTH)
def test_every_flipped_bit_is_noticed(codec: Codec) -> None:
    frame = codec.answer(5, 0, b"\x10\x20\xff\xff\xfd\x30")
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        assert codec.take(bytearray(bad)) is None, f"bit {bit}"


@pytest.mark.parametrize("codec", BOTH)
def test_a_hundred_thousand_random_frames(codec: Codec) -> None:
    """Good frames, broken ones and noise in one stream: nothing that was not sent with a right
    checksum comes out, the good ones do, and nothing is left hanging."""
    draw = random.Random(7)
    frames = good = found = 0
    while frames < 100_000:
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
        frames, good = frames + 100, good + len(sent)
        stream += bytes(1100)
        whole, buffer = bytes(stream), stream
        while (packet := codec.take(buffer)) is not None:
            again = codec.frame(*packet)
            found += again in sent
            assert again in whole, "made anew, checksum and all, it is in the stream"
        assert len(buffer) < 4
    # Noise with a right sum (1 in 256) takes a good frame with it now and then.
    assert good > 20_000 and found > (0.999 if codec is dynamixel else 0.97) * good


SLOW = 100.0  # ms a byte: what the SDKs base their time-outs on, so that a busy machine is no fault


@contextmanager
def client(protocol: str) -> Iterator[tuple[FakeBus, Any, Any, Any]]:
    """A bus, the maker's software, its port and its packets."""
    module, version = {"dynamixel": ("dynamixel_sdk", 2.0), "feetech": ("scservo_sdk", 0)}[protocol]
    sdk = pytest.importorskip(module)
    with FakeBus(protocol, [1000, 2000, 3000]) as bus:
        port = sdk.PortHandler(bus.path)
        assert port.openPort() and port.setBaudRate(1_000_000)
        port.tx_time_per_byte = SLOW
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
