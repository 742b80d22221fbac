"""The fake servo bus before the makers' own software as a client that knows nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from embodied.real_robot.emulators.servos.bus import FakeBus

SLOW = 100.0  # ms a byte: what the SDKs base their time-outs on, so that a busy machine is no fault


@pytest.fixture
def dynamixel() -> Iterator[tuple[FakeBus, Any, Any, Any]]:
    sdk = pytest.importorskip("dynamixel_sdk", reason="dynamixel-sdk is not installed")
    with FakeBus("dynamixel", [1000, 2000, 3000]) as bus:
        port = sdk.PortHandler(bus.path)
        assert port.openPort() and port.setBaudRate(1_000_000)
        port.tx_time_per_byte = SLOW
        yield bus, sdk, port, sdk.PacketHandler(2.0)
        port.closePort()


@pytest.fixture
def feetech() -> Iterator[tuple[FakeBus, Any, Any, Any]]:
    sdk = pytest.importorskip("scservo_sdk", reason="feetech-servo-sdk is not installed")
    with FakeBus("feetech", [1000, 2000, 3000]) as bus:
        port = sdk.PortHandler(bus.path)
        assert port.openPort() and port.setBaudRate(1_000_000)
        port.tx_time_per_byte = SLOW
        yield bus, sdk, port, sdk.PacketHandler(0)
        port.closePort()


def test_dynamixel_sdk_one_by_one(dynamixel: tuple[FakeBus, Any, Any, Any]) -> None:
    bus, sdk, port, packet = dynamixel
    model, result, error = packet.ping(port, 2)
    assert (model, result, error) == (1020, sdk.COMM_SUCCESS, 0)
    position, result, error = packet.read4ByteTxRx(port, 3, 132)
    assert (position, result, error) == (3000, sdk.COMM_SUCCESS, 0)
    assert packet.write1ByteTxRx(port, 1, 64, 1) == (sdk.COMM_SUCCESS, 0)
    assert packet.write1ByteTxRx(port, 1, 11, 4) == (sdk.COMM_SUCCESS, 7), "EEPROM, torque is on"
    assert packet.write1ByteTxRx(port, 2, 11, 4) == (sdk.COMM_SUCCESS, 0)
    assert bus.servos[1].table[11] == 3 and bus.servos[2].table[11] == 4
    assert packet.write4ByteTxRx(port, 2, 116, 0xFDFFFF) == (sdk.COMM_SUCCESS, 0), "stuffed"
    assert packet.read4ByteTxRx(port, 2, 116)[0] == 0xFDFFFF
    bus.servos[1].alert = 0x20
    assert packet.read1ByteTxRx(port, 1, 70)[::2] == (0x20, 0x80)


def test_dynamixel_sdk_in_groups(dynamixel: tuple[FakeBus, Any, Any, Any]) -> None:
    bus, sdk, port, packet = dynamixel
    group = sdk.GroupSyncRead(port, packet, 126, 10)
    for id in bus.servos:
        assert group.addParam(id)
    assert group.txRxPacket() == sdk.COMM_SUCCESS
    assert [group.getData(id, 132, 4) for id in bus.servos] == [1000, 2000, 3000]
    goals = sdk.GroupSyncWrite(port, packet, 116, 4)
    for id in bus.servos:
        assert goals.addParam(id, list((1500 + id).to_bytes(4, "little")))
    assert goals.txPacket() == sdk.COMM_SUCCESS
    assert [packet.read4ByteTxRx(port, id, 116)[0] for id in bus.servos] == [1501, 1502, 1503]


def test_feetech_sdk(feetech: tuple[FakeBus, Any, Any, Any]) -> None:
    bus, sdk, port, packet = feetech
    assert packet.ping(port, 2) == (777, sdk.COMM_SUCCESS, 0)
    assert packet.read2ByteTxRx(port, 3, 56) == (3000, sdk.COMM_SUCCESS, 0)
    assert packet.write1ByteTxRx(port, 1, 33, 1) == (sdk.COMM_SUCCESS, 0)
    assert bus.servos[1].table[33] == 0, "EEPROM, locked"
    assert packet.write1ByteTxRx(port, 1, 55, 0) == (sdk.COMM_SUCCESS, 0)
    assert packet.write1ByteTxRx(port, 1, 33, 1) == (sdk.COMM_SUCCESS, 0)
    assert bus.servos[1].table[33] == 1
    group = sdk.GroupSyncRead(port, packet, 56, 4)
    for id in bus.servos:
        assert group.addParam(id)
    assert group.txRxPacket() == sdk.COMM_SUCCESS
    assert [group.getData(id, 56, 2) for id in bus.servos] == [1000, 2000, 3000]
    goals = sdk.GroupSyncWrite(port, packet, 42, 2)
    for id in bus.servos:
        assert goals.addParam(id, list((1500 + id).to_bytes(2, "little")))
    assert goals.txPacket() == sdk.COMM_SUCCESS
    assert [packet.read2ByteTxRx(port, id, 42)[0] for id in bus.servos] == [1501, 1502, 1503]
