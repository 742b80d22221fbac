"""The settings of one deployment, written as one JSON file.

The daemon writes the file into its private folder; the control, policy, recorder and camera
processes read it there. `real_robot.assemble` builds their objects from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from embodied import moved
from embodied.core.build import ConfigError, Node, nearest, parse
from real_robot.control.arm_state import Limits
from real_robot.safety.checks import FreshConfig
from real_robot.safety.energy_tank import Config as EnergyConfig
from real_robot.safety.learned_reflex import Config as ReflexConfig
from real_robot.safety.workspace import Config as WorkspaceConfig

FILE = "deployment.json"


TARGET = "real_robot.deployment.Deployment"
"""The `_target_` that a robot's YAML begins with."""


def renamed_settings(robot: Mapping[str, Any]) -> dict[str, Any]:
    """A robot's settings by their names of today (`embodied/moved.yaml`)."""
    return moved.settings(TARGET, robot)


@dataclass(frozen=True)
class Remote:
    """Operators on other machines may connect to TCP `port` of `address` (0.0.0.0: all addresses of
    this machine) if their keys are in the folder `keys`."""

    port: int
    keys: str
    address: str = "0.0.0.0"

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"remote.port={self.port} should be from 0 to 65535")


@dataclass(frozen=True)
class Onboard:
    """Policies with the actions `names` run on the robot's own computer instead of here.

    `export` names a function (run, folder) that writes such a policy and returns settings for the
    driver. `setpoints` is the node of a script that sends set-points meanwhile. `policy`: the one
    that runs there now."""

    names: tuple[str, ...]
    export: str
    setpoints: Node
    policy: str = ""


@dataclass(frozen=True)
class Deployment:
    """All settings of a deployed robot.

    Robot and policy:
    - `robot`: the robot's name, for people and datasets; `driver`: its node.
    - `controller`: the node of what turns actions into joint targets; `kinematics`: the name of a
      function whose first result is the tool's position [k, 3] (m) at joint positions [k, n].
    - `policy`: a run or a checkpoint folder; `step` (s): its control period. `given`: observation
      values that are not measured; `sensed`: names of what the driver knows beyond the joints.
    - `home`: joint positions where episodes begin (empty: wherever the arm is), with the hand open
      by `home_width` m. Success is the sensed value of that name, or the tool within `goal_within`
      m of the goal (`goal_x`, `goal_y`, `goal_z`, given or sensed).
    - `chunks`: real-time chunking for a flow or diffusion policy (None: none).

    Control and safety:
    - `hertz`: rate of the control loop; `spin`: busy-wait shortly before each tick (`Rate`);
      `blend`, `grace`: steps in which chunks are blended, and are continued (`ChunkFollower`).
    - `limits`, `fresh`, `workspace`, `reflex`, `energy`: the safety stages' settings; `torque_rate`
      [n] (N m/s; None: no limit): the largest change of measured torques.
    - `dry`: run everything, but hold the arm where it stands and simulate one that follows.

    Cameras and records:
    - `cameras`: nodes of image sources (`real_robot.cameras.sources`), by the names of the images;
      an image older than `picture` s is not used. Observations are recorded as the policy sees
      them; `filmed`: further cameras to record (height, width); `images`: "png" (lossless) or
      "mp4" (small).
    - `recording`: the folder of a dataset (empty: none). `records`: the folder of the newest `keep`
      flight records of `seconds` each (empty: beside the socket).

    Operation:
    - `metrics`: a port of this machine for Prometheus (0: any; None: none). `remote`: access for
      operators on other machines (None: none).
    - `emulator`: the node of a simulated robot or protocol emulator, with `start() -> settings of
      the driver`, `behind() -> s that it has lost to real time` and `stop()`. Whoever starts the
      daemon starts it first. `onboard`: what the robot's own computer can run (None: nothing).
    """

    driver: Node
    controller: Node
    kinematics: str
    policy: str
    hertz: float
    step: float
    limits: Limits
    fresh: FreshConfig
    workspace: WorkspaceConfig | None = None
    reflex: ReflexConfig | None = None
    energy: EnergyConfig | None = None
    torque_rate: tuple[float, ...] | None = None
    given: dict[str, float] = field(default_factory=dict[str, float])
    blend: int = 2
    grace: int = 1
    spin: bool = True
    seconds: float = 10.0
    keep: int = 20
    records: str = ""
    metrics: int | None = None
    remote: Remote | None = None
    robot: str = "arm"
    home: tuple[float, ...] = ()
    home_width: float | None = None
    sensed: tuple[str, ...] = ()
    goal_within: float | None = None
    recording: str = ""
    dry: bool = False
    emulator: Node | None = None
    onboard: Onboard | None = None
    chunks: Literal["guided", "hard"] | None = None
    cameras: dict[str, Node] = field(default_factory=dict[str, Node])
    picture: float = 0.5
    filmed: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    images: Literal["png", "mp4"] = "png"

    def __post_init__(self) -> None:
        if not 1 <= self.hertz <= 2000 or not 0 < self.step <= 10:
            raise ConfigError("hertz should be from 1 to 2000 and step above 0, up to 10 s")
        if self.metrics is not None and not 0 <= self.metrics < 65536:
            raise ConfigError(f"metrics={self.metrics} should be from 0 to 65535")
        if not self.picture > 0:
            raise ConfigError(f"picture={self.picture:g} s should be above 0")
        for name, size in self.filmed.items():
            if name not in self.cameras:
                raise ConfigError(f"filmed: there is no camera {name}{nearest(name, self.cameras)}")
            if not all(1 <= side <= 4096 for side in size):
                raise ConfigError(f"filmed: {name} should have 1 to 4096 rows and columns")
        if not 0 < self.seconds <= 600 or self.keep < 1:
            raise ConfigError("keep should be 1 or more, and seconds above 0, up to 600")
        if self.home:
            self._check_home()
        if self.torque_rate is not None and len(self.torque_rate) != len(self.limits):
            raise ConfigError("torque_rate needs one number (N m/s) for every joint")

    def _check_home(self) -> None:
        low = np.add(self.limits.low, self.limits.margin)
        high = np.subtract(self.limits.high, self.limits.margin)
        if len(self.home) != len(low):
            raise ConfigError(f"home has {len(self.home)} joints, the limits have {len(low)}")
        home = np.asarray(self.home)
        if not ((low <= home) & (home <= high)).all():
            joint = int(np.argmax(np.maximum(low - home, home - high)))
            raise ConfigError(
                f"home: joint {joint + 1} at {home[joint]:.3f} is outside of its limits "
                f"{low[joint]:.3f} to {high[joint]:.3f} (margin taken off)"
            )

    @classmethod
    def read(cls, folder: Path) -> Deployment:
        """The deployment that `write` stored in `folder`; ConfigError."""
        try:
            settings: Any = json.loads((folder / FILE).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / FILE} cannot be read: {error}") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{folder / FILE} should hold one object")
        return cls.parse(cast(dict[str, Any], settings))

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Deployment:
        """From plain settings; ConfigError names the nearest known key."""
        return parse(cls, renamed_settings(settings), "deployment")

    def write(self, folder: Path) -> None:
        """Store it in `folder`, for the robot's processes."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1))

    @property
    def joints(self) -> int:
        return len(self.limits)
