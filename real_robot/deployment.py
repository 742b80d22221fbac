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
    """Operators of other machines may ask at TCP `port` of `address` (0.0.0.0: all of this
    machine's), those whose keys are in the folder `keys`."""

    port: int
    keys: str
    address: str = "0.0.0.0"

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"a deployment's remote.port={self.port} should be a port")


@dataclass(frozen=True)
class Onboard:
    """Policies with the actions `names` run on the robot's own computer, and not over the wire:
    `export` names a function that writes one (a run, into a folder) and returns what the driver has
    to know; `setpoints` is a script that says meanwhile where to go. `policy`: the one that runs
    there now."""

    names: tuple[str, ...]
    export: str
    setpoints: Node
    policy: str = ""


@dataclass(frozen=True)
class Deployment:
    """`driver` and `controller` are nodes with a `_target_`; `kinematics` names a function whose
    first result is the tool's place [k, 3] (m) at joint positions [k, n]; `policy` is a run or a
    checkpoint folder; `step` (s) is the policy's control period, `hertz` the control process's rate
    and `given` what the policy sees and no one measures. `records` (a folder) keeps the newest
    `keep` black boxes of `seconds` each; without it they stay beside the socket. `torque_rate` [n]
    (N m/s; None: anything) is how fast measured torques may change. `spin`: the loop is awake
    shortly before each tick (`Rate`). `metrics` is a port of this machine for Prometheus (0: any;
    None: there is none). `remote` lets operators of
    other machines ask (None: nobody).

    `robot` is the arm's name for people and datasets. Episodes begin at the joint positions `home`
    (empty: wherever the arm is) with the hand open by `home_width` m. `sensed` are the names of
    what the driver knows beyond joints. Success is what is sensed by that name, or the tool within
    `goal_within` m of the goal (`goal_x`, `goal_y`, `goal_z` given or sensed). `recording` is a
    folder for a dataset of what was done (empty: none). `dry`: all is done, but the arm is held
    where it stands, and an imaginary one follows. `emulator` is a node of something with
    `start() -> settings of the driver`, `behind() -> s that it has lost to real time` and
    `stop()`: what plays the robot where there is none; who starts the daemon starts it before.
    `onboard`: what the robot's own computer can run (None: nothing of ours). `cameras` are the
    nodes of what takes pictures (`real_robot.cameras.sources`), by the pictures' names; one that
    is older
    than `picture` s is none. What the policy sees is recorded as it sees it; `filmed` are cameras
    that are recorded whether it sees them or not (height, width), and `images` says how pictures
    are kept: "png" (exact) or "mp4" (small). `chunks`: those of a flow or diffusion policy
    are made to continue the one that is followed meanwhile
    (`policies.wrappers.real_time_chunking`; None: as they
    are).
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
            raise ConfigError("a deployment needs 1 to 2000 hertz and a step of up to 10 s")
        if self.metrics is not None and not 0 <= self.metrics < 65536:
            raise ConfigError(f"a deployment's metrics={self.metrics} should be a port")
        if not self.picture > 0:
            raise ConfigError(f"a deployment's picture={self.picture:g} s should be above 0")
        for name, size in self.filmed.items():
            if name not in self.cameras:
                raise ConfigError(f"filmed: {name} is no camera{nearest(name, self.cameras)}")
            if not all(1 <= side <= 4096 for side in size):
                raise ConfigError(f"filmed: {name} should have 1 to 4096 rows and columns")
        if not 0 < self.seconds <= 600 or self.keep < 1:
            raise ConfigError("a deployment keeps 1 or more black boxes of up to 600 seconds")
        if self.home:
            self._check_home()
        if self.torque_rate is not None and len(self.torque_rate) != len(self.limits):
            raise ConfigError("torque_rate: one number (N m/s) for every joint that has limits")

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
        """What `write` left there; ConfigError."""
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
        """For the two processes."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1))

    @property
    def joints(self) -> int:
        return len(self.limits)
