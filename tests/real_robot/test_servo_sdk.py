"""The fake servo bus before the makers' own software as a client that knows nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from embodied.real_robot.emulators.servos.bus import FakeBus

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
