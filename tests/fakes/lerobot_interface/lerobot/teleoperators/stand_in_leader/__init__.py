"""A leader arm and a gamepad without hardware: what a file says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.teleoperators import TeleoperatorConfig


@TeleoperatorConfig.register_subclass("stand_in_leader")
@dataclass
class StandInLeaderConfig(TeleoperatorConfig):
    """`file`: JSON with what `get_action` returns."""

    file: str = ""

    def made(self) -> Any:
        return StandInLeader(self)


class StandInLeader:
    """`get_action` as LeRobot's teleoperators have it."""

    is_calibrated = True

    def __init__(self, config: StandInLeaderConfig) -> None:
        self.config = config

    def connect(self, calibrate: bool = True) -> None:
        assert not calibrate

    def disconnect(self) -> None:
        return

    def get_action(self) -> dict[str, float]:
        action: dict[str, float] = json.loads(Path(self.config.file).read_text())
        return action
