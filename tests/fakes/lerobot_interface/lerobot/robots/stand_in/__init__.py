"""A robot without hardware: joints approach their goals with a time constant of 50 ms."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lerobot.robots import RobotConfig

KEYS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")


@RobotConfig.register_subclass("stand_in")
@dataclass
class StandInConfig(RobotConfig):
    """`read`: s of a measurement; `lost`: share of measurements that raise; `hangs`: s from
    connecting on after which calls do not return; `damaged`: attempts to connect that the motors'
    SDK ends with an IndexError; `log`: a file for what was done."""

    read: float = 0.0
    lost: float = 0.0
    hangs: float = math.inf
    damaged: int = 0
    calibrated: bool = True
    log: str = ""
    disable_torque_on_disconnect: bool = True

    def made(self) -> Any:
        return StandIn(self)


class StandIn:
    """`get_observation` and `send_action` as LeRobot's robots have them, in degrees and percent."""

    def __init__(self, config: StandInConfig) -> None:
        self.config, self.then = config, time.monotonic()
        self.at = dict.fromkeys(KEYS, 0.0) | {"gripper": 50.0}
        self.goal = dict(self.at)
        self.random = random.Random(0)
        self.calibration = {key: SimpleNamespace(range_min=900, range_max=3200) for key in KEYS}
        self.is_calibrated = config.calibrated

    def connect(self, calibrate: bool = True) -> None:
        assert not calibrate
        self.config.damaged -= 1
        if self.config.damaged >= 0:
            raise IndexError("list index out of range")
        self.began = time.monotonic()

    def disconnect(self) -> None:
        self._log("disconnect", self.config.disable_torque_on_disconnect)

    def get_observation(self) -> dict[str, float]:
        time.sleep(self.config.read)
        self._move()
        if self.random.random() < self.config.lost:
            raise ConnectionError("no status packet")
        return {f"{key}.pos": value for key, value in self.at.items()}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self._move()
        self.goal |= {key.removesuffix(".pos"): value for key, value in action.items()}
        self._log("goal", self.goal)
        return action

    def _move(self) -> None:
        now = time.monotonic()
        share, self.then = 1 - math.exp((self.then - now) / 0.05), now
        for key, goal in self.goal.items():
            self.at[key] += share * (goal - self.at[key])
        while now - self.began > self.config.hangs:
            time.sleep(1.0)

    def _log(self, what: str, value: Any) -> None:
        if self.config.log:
            with Path(self.config.log).open("a") as file:
                file.write(json.dumps([what, value]) + "\n")
