"""Settings of `--robot.type=embodied`."""

from dataclasses import dataclass, field

from lerobot.robots import RobotConfig


@RobotConfig.register_subclass("embodied")
@dataclass(kw_only=True)
class EmbodiedRobotConfig(RobotConfig):
    """See the table in README.md beside this package."""

    robot: str
    settings: list[str] = field(default_factory=list)
    python: str = ""
    config_dir: list[str] = field(default_factory=list)
    actions: str = "joints"
    units: str = "degrees"
    numbers: list[str] = field(default_factory=list)
    images: dict[str, list[int]] = field(default_factory=dict)
    fps: float = 30.0
    home: bool = True
    patience: float = 0.0
    out: str = ""
