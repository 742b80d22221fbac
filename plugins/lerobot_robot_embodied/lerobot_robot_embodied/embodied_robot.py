"""EmbodiedRobot: LeRobot's interface of a robot, lent by a process of embodied."""

from functools import cached_property
from typing import Any

from lerobot.robots import Robot

from .config_embodied import EmbodiedRobotConfig
from .lender import Lender


class EmbodiedRobot(Robot):
    """Nothing here limits or stops the arm: the process behind it does, and keeps doing so when
    LeRobot hangs or dies."""

    config_class = EmbodiedRobotConfig
    name = "embodied"

    def __init__(self, config: EmbodiedRobotConfig) -> None:
        super().__init__(config)
        self.config = config
        self.cameras: dict[str, Any] = dict(config.images)  # LeRobot counts them
        self._connected = False

    @cached_property
    def _lender(self) -> Lender:
        config = self.config
        filmed = [
            f"robot.filmed.{name}={size}".replace(" ", "") for name, size in config.images.items()
        ]
        return Lender(
            config.python,
            {
                "words": [f"robot={config.robot}", *config.settings, *filmed],
                "config_dir": config.config_dir,
                "actions": config.actions,
                "units": config.units,
                "numbers": config.numbers,
                "fps": config.fps,
                "home": config.home,
                "patience": config.patience,
                "out": config.out,
            },
            config.patience,
        )

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        about = self._lender.about
        numbers = dict.fromkeys(about["observations"], float)
        return {**numbers, **{name: (*size, 3) for name, size in about["images"].items()}}

    @cached_property
    def action_features(self) -> dict[str, type]:
        return dict.fromkeys(self._lender.about["actions"], float)

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self._lender.ask("connect")
        self._connected = True

    def calibrate(self) -> None:
        """The driver of the robot is calibrated in its own YAML."""

    def configure(self) -> None:
        """Nothing: settings are the robot's YAML and `settings`."""

    def get_observation(self) -> dict[str, Any]:
        return self._lender.observe()

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        wanted = {key: float(value) for key, value in action.items()}
        return self._lender.ask("act", action=wanted)["sent"]

    def disconnect(self) -> None:
        self._connected = False
        if "_lender" in self.__dict__:
            self._lender.close()
            del self.__dict__["_lender"]
