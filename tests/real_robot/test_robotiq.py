"""A Robotiq gripper beside a simulated arm, over both of its wires."""

from __future__ import annotations

from typing import Any

import pytest

from embodied.core.build import ConfigError, build
from embodied.embodiments import fr3
from embodied.real_robot.drivers.robotiq.driver import Config, Modbus, WithRobotiq, crc
from embodied.real_robot.kernel.driver import DriverError
from tests.builders import wait_until
from tests.fakes.robotiq import SerialGripper, SocketGripper

ARM = {"_target_": "embodied.real_robot.drivers.sim.Sim"}
TARGET = "embodied.real_robot.drivers.robotiq.driver.WithRobotiq"


def driver(gripper: SerialGripper | SocketGripper, **more: object) -> WithRobotiq:
    node = {"_target_": TARGET, "arm": ARM, "silence": 10.0, **more}
    if isinstance(gripper, SerialGripper):
        node |= {"wire": "serial", "port": gripper.path}
    else:
        node |= {"wire": "ur", "host": "127.0.0.1", "socket": gripper.port}
    return build(node, WithRobotiq)


def test_frames_are_the_manuals() -> None:
    """The examples of the maker's manual: activation, and a read of the status."""
    request = bytes.fromhex("091003E8000306000000000000")
    assert crc(request) == bytes.fromhex("7330")
    assert crc(bytes.fromhex("090307D00003")) == bytes.fromhex("040E")


@pytest.mark.parametrize("wire", [SerialGripper, SocketGripper])
def test_it_opens_closes_and_stops_at_what_is_between_its_fingers(wire: type[Any]) -> None:
    """Over Modbus, and over the socket of a UR."""
    with wire() as gripper, driver(gripper) as arm:
        for width in (0.0, 0.085, 0.04):
            arm.write(fr3.HOME, width)
            wait_until(lambda width=width: abs(arm.width - width) < 1e-3)
        gripper.gripper.object = 200
        arm.write(fr3.HOME, 0.0)
        wait_until(lambda: abs(arm.width - 0.085 * 55 / 255) < 1e-3)
        assert arm.read().q == pytest.approx(fr3.HOME, abs=0.05)
        gripper.gripper.fault = 0x0E
        wait_until(lambda: bool(arm._problem))
        with pytest.raises(DriverError, match="fault 0xe") as caught:
            arm.read()
        assert caught.value.measured is not None


def test_a_gripper_that_falls_silent_is_a_fault_and_comes_back_after_a_reset() -> None:
    with SerialGripper() as gripper:
        with driver(gripper) as arm:
            gripper.deaf = True
            wait_until(lambda: bool(arm._problem))
            with pytest.raises(DriverError, match="does not answer: look at its 24 V"):
                arm.read()
            gripper.deaf = False
            arm.recover()
            arm.read()
        gripper.deaf = True
        with pytest.raises(DriverError, match="does not answer"):
            driver(gripper, silence=1.0).connect()


def test_a_wire_that_is_not_there() -> None:
    node = {"_target_": TARGET, "arm": ARM, "wire": "ur", "host": "127.0.0.1", "socket": 1}
    with pytest.raises(DriverError, match="URCap"):
        build(node, WithRobotiq).connect()
    with pytest.raises(DriverError, match="no serial port"):
        Modbus("/dev/nowhere").open()
    with pytest.raises(ConfigError, match="needs driver"):
        Config(ARM, "serial")


def test_the_hand_is_told_how_fast_and_how_hard() -> None:
    with SerialGripper() as gripper, driver(gripper, speed=1.0, force=1.0) as arm:
        assert arm.grip == 20.0
        for force, said in ((127.5, 128), (10.0, 0), (500.0, 255)):
            arm.limit_hand(0.085, force)
            wait_until(lambda said=said: gripper.gripper.force == said)
        assert gripper.gripper.speed == 128
