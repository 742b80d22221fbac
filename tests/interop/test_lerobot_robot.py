"""LeRobot's own SO-101 follower on an emulated servo bus, behind our driver and control process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.core.build import build
from embodied.real_robot.drivers.lerobot.driver import LeRobotDriver
from embodied.real_robot.emulators.servos.bus import FakeBus
from embodied.real_robot.kernel.driver import DriverError
from tests.builders import wait_until

pytest.importorskip("lerobot", reason="LeRobot is not installed here: sh scripts/interop.sh")
pytestmark = pytest.mark.usefixtures("idle_machine")

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
TICKS = (2244, 2030, 2230, 2100, 2048, 2500)
LOW, HIGH = 900, 3195  # the middle is tick 2047.5


@pytest.fixture
def calibrated(tmp_path: Path) -> Iterator[tuple[FakeBus, Path]]:
    """An emulated arm, and the calibration that its file and its servos agree on."""
    rows = {
        name: {"id": i, "drive_mode": 0, "homing_offset": 0, "range_min": LOW, "range_max": HIGH}
        for i, name in enumerate(MOTORS, 1)
    }
    (tmp_path / "arm.json").write_text(json.dumps(rows))
    with FakeBus("feetech", TICKS) as bus:
        for servo in bus.servos.values():
            servo.table[9:11] = LOW.to_bytes(2, "little")
            servo.table[11:13] = HIGH.to_bytes(2, "little")
        yield bus, tmp_path


def node(path: str, folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "_target_": "embodied.real_robot.drivers.lerobot.driver.LeRobotDriver",
        "type": "so101_follower",
        "python": sys.executable,
        "port": path,
        "silence": 2.0,
        "hertz": 20.0,
        "settings": {"id": "arm", "calibration_dir": str(folder), **settings},
        "joints": [{"key": f"{name}.pos", "unit": "degrees"} for name in MOTORS[:5]],
        "hand": {"key": "gripper.pos", "width": 0.07},
    }


def test_lerobots_own_driver_behind_ours(calibrated: tuple[FakeBus, Path]) -> None:
    bus, folder = calibrated
    driver = build(node(bus.path, folder), LeRobotDriver)
    with driver:
        q = driver.read().q
        middle = (LOW + HIGH) / 2
        np.testing.assert_allclose(q, (np.array(TICKS[:5]) - middle) * 2 * np.pi / 4095, atol=3e-3)
        assert driver.width == pytest.approx((TICKS[5] - LOW) / (HIGH - LOW) * 0.07, abs=1e-3)
        goal = q + np.radians(10)

        def there() -> bool:
            driver.write(goal, 0.06)
            return np.abs(driver.read().q - goal).max() < np.radians(0.5) and driver.width > 0.05

        wait_until(there, "the goal", tick=0.02)
        np.testing.assert_allclose(
            [bus.servos[i].at for i in range(1, 6)],
            np.array(TICKS[:5]) + 10 / 360 * 4095, atol=8,
        )  # fmt: skip
        reach = driver.reach()
        assert reach is not None and reach[1][0] == pytest.approx(
            (HIGH - LOW) / 2 * 2 * np.pi / 4095
        )
    assert all(servo.table[40] == 1 for servo in bus.servos.values()), "torque stays on"


def test_lost_packets_do_not_keep_it_from_connecting(calibrated: tuple[FakeBus, Path]) -> None:
    """LeRobot's `connect` alone fails at the first of these."""
    bus, folder = calibrated
    answer, asked = bus._say, 0

    def lossy(frame: bytes) -> None:
        nonlocal asked
        asked += 1
        lost = asked % 20 == 0 if asked <= 120 else asked == 300
        if not lost:  # some of each attempt's pings and registers, and one measurement
            answer(frame)

    bus._say = lossy
    with build(node(bus.path, folder), LeRobotDriver) as driver:
        assert driver.read().q.shape == (5,)
    assert asked > 300
    assert all(servo.table[40] == 1 for servo in bus.servos.values()), "torque stays on"


def test_an_arm_that_is_not_calibrated_is_refused(calibrated: tuple[FakeBus, Path]) -> None:
    bus, folder = calibrated
    bus.servos[3].table[11:13] = (3000).to_bytes(2, "little")
    with pytest.raises(DriverError, match="embodied robot calibrate"):
        build(node(bus.path, folder), LeRobotDriver).connect()


def test_an_arm_that_is_gone_is_a_fault(calibrated: tuple[FakeBus, Path]) -> None:
    bus, folder = calibrated
    driver = build(node(bus.path, folder), LeRobotDriver)
    driver.connect()
    bus.unplug()
    with pytest.raises(DriverError, match="so101_follower"):
        wait_until(lambda: not driver.read(), "a fault", tick=0.02)
    driver.close()


def test_a_robot_without_hardware(tmp_path: Path) -> None:
    """Any robot that registers itself with LeRobot: a plugin's, here without a bus."""
    (tmp_path / "bench_arm.py").write_text(BENCH_ARM)
    about = node("", tmp_path) | {"type": "bench_arm", "port": "", "modules": ["bench_arm"]}
    about["settings"] = {"id": "arm", "calibration_dir": str(tmp_path)}
    about["joints"], about["hand"] = [{"key": "hip.pos", "unit": "radians"}], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
        with build(about, LeRobotDriver) as driver:

            def there() -> bool:
                driver.write(np.array([0.5]), 0.0)
                return abs(driver.read().q[0] - 0.5) < 0.01

            wait_until(there, "the goal", tick=0.02)


BENCH_ARM = """
from dataclasses import dataclass
from lerobot.robots import Robot, RobotConfig

@RobotConfig.register_subclass("bench_arm")
@dataclass
class BenchArmConfig(RobotConfig):
    pass

class BenchArm(Robot):
    config_class, name = BenchArmConfig, "bench_arm"
    is_connected = is_calibrated = False
    hip = 0.0
    observation_features = action_features = {"hip.pos": float}

    def __init__(self, config):
        super().__init__(config)
        self.config = config

    def connect(self, calibrate=True):
        self.is_connected = self.is_calibrated = True

    def calibrate(self): pass
    def configure(self): pass
    def disconnect(self): self.is_connected = False

    def get_observation(self):
        return {"hip.pos": self.hip}

    def send_action(self, action):
        self.hip += 0.3 * (action["hip.pos"] - self.hip)
        return action
"""
