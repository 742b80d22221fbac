"""The settings of one deployment, written as one JSON file.

The daemon writes the file into its private folder; the control, policy, recorder and camera
processes read it there. `embodied.real_robot.assemble` builds their objects from it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from embodied.core.build import (
    ConfigError,
    Node,
    allow,
    asked_packages,
    nearest,
    parse,
    printable,
    shown,
)
from embodied.embodiments.named_controllers import arm_of_kinematics, controller_node
from embodied.real_robot.control.arm_state import Limits
from embodied.real_robot.safety.checks import FreshConfig, Heartbeat
from embodied.real_robot.safety.energy_stage import Config as EnergyConfig
from embodied.real_robot.safety.geometry import Config as GeometryConfig
from embodied.real_robot.safety.learned_reflex import Config as ReflexConfig
from embodied.real_robot.safety.workspace import Config as WorkspaceConfig

FILE = "deployment.json"
MOST_NUMBER = 1e12
MOST_STEPS = 1000


TARGET = "embodied.real_robot.deployment.Deployment"
"""The `_target_` that a robot's YAML begins with."""


def controller_settings(robot: Mapping[str, Any]) -> dict[str, Any]:
    """A robot's settings, with a node for the controller where they hold its name
    (`robot.controller=joint_position`)."""
    settings = dict(robot)
    said, kinematics = settings.get("controller"), settings.get("kinematics")
    if isinstance(said, str) and isinstance(kinematics, str):
        step = settings.get("step", 0.05)
        settings["controller"] = controller_node(said, arm_of_kinematics(kinematics), step)
    return settings


@dataclass(frozen=True)
class Remote:
    """Operators with a key in the folder `keys` may connect to TCP `port` of `address`: from this
    machine only, unless another of its addresses is named (0.0.0.0: all of them)."""

    port: int
    keys: str
    address: str = "127.0.0.1"

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
    - `controller`: the node of what turns actions into joint targets, or in a robot's YAML the name
      of one (cartesian_delta, cartesian_pose, joint_position); `kinematics`: an arm file
      (`embodied robot describe`), or the name of a function whose first result is the tool's
      position [k, 3] (m) at joint positions [k, n].
    - `policy`: a run or a checkpoint folder; `step` (s): its control period. `given`: observation
      values that are not measured; `sensed`: names of what the driver knows beyond the joints.
    - `served`: the policy asks a policy server that an operator named (docs/remote.md).
    - `retreat`: joint positions, each tried as a stop on the way home where the straight way is not
      free of workspace and geometry; without any that is, others are looked for.
    - `home`: joint positions where episodes begin (empty: wherever the arm is), with the hand open
      by `home_width` m. Success is the sensed value of that name, or the tool within `goal_within`
      m of the goal (`goal_x`, `goal_y`, `goal_z`, given or sensed).
    - `chunks`: real-time chunking for a flow or diffusion policy (None: none).

    Control and safety:
    - `hertz`: rate of the control loop; `spin`: busy-wait shortly before each tick (`Rate`);
      `blend`, `grace`: steps in which chunks are blended, and are continued (`ChunkFollower`).
    - `limits`, `fresh`, `workspace` (of the tool), `geometry` (of the whole arm), `reflex`,
      `energy`: the safety stages' settings; `torque_rate`
      [n] (N m/s; None: no limit): the largest change of measured torques.
    - `heartbeat`: how long the daemon may be silent while the arm moves.
    - `hold_to_run`: what moves by itself (a policy, the way home) does so only while an operator's
      terminal sends beats (`embodied.real_robot.teleop.hold_to_run`).
    - `dry`: run everything, but hold the arm where it stands and simulate one that follows.

    Cameras and records:
    - `cameras`: nodes of image sources (`embodied.real_robot.cameras.sources`), by the names of the
    images;
      an image older than `picture` s is not used. Observations are recorded as the policy sees
      them; `filmed`: further cameras to record (height, width); `images`: "png" (lossless) or
      "mp4" (small).
    - `recording`: the folder of a dataset (empty: none). `records`: the folder of the newest `keep`
      flight records of `seconds` each (empty: beside the socket).

    Operation:
    - `allow`: packages of your own that drivers, controllers and policies may come from, also out
      of the folder that the daemon was started in. The command line says which (`allow=[my_lab]`);
      a robot's YAML may not.
    - `metrics`: a port of this machine for Prometheus (0: any; None: none). `remote`: access for
      operators on other machines (None: none).
    - `emulator`: the node of a simulated robot or protocol emulator, with `start() -> settings of
      the driver`, `behind() -> s that it has lost to real time` and `stop()`. The starter of the
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
    geometry: GeometryConfig | None = None
    reflex: ReflexConfig | None = None
    energy: EnergyConfig | None = None
    torque_rate: tuple[float, ...] | None = None
    given: dict[str, float] = field(default_factory=dict[str, float])
    blend: int = 2
    grace: int = 1
    spin: bool = True
    seconds: float = 10.0
    keep: int = 20
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    hold_to_run: bool = False
    records: str = ""
    metrics: int | None = None
    remote: Remote | None = None
    robot: str = "arm"
    home: tuple[float, ...] = ()
    home_width: float | None = None
    retreat: tuple[tuple[float, ...], ...] = ()
    served: bool = False
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
    images: Literal["png", "mp4"] | None = None  # null: png, and mp4 of `embodied robot record`
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_plain(vars(self), "deployment")
        if not 1 <= self.hertz <= 2000 or not 0 < self.step <= 10:
            raise ConfigError("hertz should be from 1 to 2000 and step above 0, up to 10 s")
        if self.metrics is not None and not 0 <= self.metrics < 65536:
            raise ConfigError(f"metrics={self.metrics} should be from 0 to 65535")
        if not self.picture > 0:
            raise ConfigError(f"picture={self.picture:g} s should be above 0")
        for package in self.allow:
            if not all(part.isidentifier() for part in package.split(".")):
                raise ConfigError(f"allow: {printable(package)} is no dotted name of Python")
        for name, size in self.filmed.items():
            if name not in self.cameras:
                raise ConfigError(f"filmed: there is no camera {name}{nearest(name, self.cameras)}")
            if not all(1 <= side <= 4096 for side in size):
                raise ConfigError(f"filmed: {name} should have 1 to 4096 rows and columns")
        if not 0 < self.seconds <= 600 or self.keep < 1:
            raise ConfigError("keep should be 1 or more, and seconds above 0, up to 600")
        if not 0 <= self.blend <= MOST_STEPS or not 0 <= self.grace <= MOST_STEPS:
            raise ConfigError(f"blend and grace should be from 0 to {MOST_STEPS} steps")
        if self.goal_within is not None and not self.goal_within > 0:
            raise ConfigError(f"goal_within={self.goal_within:g} m should be above 0")
        if self.home:
            self._check_pose("home", self.home)
        for pose in self.retreat:
            self._check_pose("retreat", pose)
        if self.torque_rate is not None and len(self.torque_rate) != len(self.limits):
            raise ConfigError("torque_rate needs one number (N m/s) for every joint")

    def _check_pose(self, name: str, given: tuple[float, ...]) -> None:
        low = np.add(self.limits.low, self.limits.margin)
        high = np.subtract(self.limits.high, self.limits.margin)
        if len(given) != len(low):
            raise ConfigError(f"{name} has {len(given)} joints, the limits have {len(low)}")
        pose = np.asarray(given)
        if not ((low <= pose) & (pose <= high)).all():
            joint = int(np.argmax(np.maximum(low - pose, pose - high)))
            raise ConfigError(
                f"{name}: joint {joint + 1} at {pose[joint]:.3f} is outside of its limits "
                f"{low[joint]:.3f} to {high[joint]:.3f} (margin taken off)"
            )

    @classmethod
    def read(cls, folder: Path) -> Deployment:
        """The deployment that `write` stored in `folder`; ConfigError."""
        file = folder / FILE
        try:
            settings: Any = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"{file} cannot be read: it is nested too deeply") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{file} should hold one object")
        return cls.parse(cast(dict[str, Any], settings))

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Deployment:
        """From plain settings; ConfigError names the nearest known key."""
        try:
            return parse(cls, controller_settings(settings), "deployment")
        except RecursionError as error:
            raise ConfigError("deployment: a setting is nested too deeply") from error

    def write(self, folder: Path) -> None:
        """Store it in `folder`, for the robot's processes: whole or not at all. In the folder of a
        daemon only that daemon may do so."""
        part = folder / f".{FILE}.{os.getpid()}"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(asdict(self), indent=1))
        part.replace(folder / FILE)

    def allow_packages(self) -> Deployment:
        """Let this process, one of the robot's, build classes of the packages in `allow`."""
        for package in self.allow:
            allow(package)
        if self.allow and (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
        return self

    @property
    def joints(self) -> int:
        return len(self.limits)


def with_allowed(robot: Mapping[str, Any]) -> dict[str, Any]:
    """A robot's settings, with the packages that the command line allows; ConfigError where they
    name some themselves."""
    if own := robot.get("allow"):
        raise ConfigError(
            f"robot.allow={shown(own)}: a robot's settings may not allow packages; say it on the "
            'command line: "allow=[PACKAGE]"'
        )
    return {**robot, "allow": list(asked_packages())}


def _require_plain(value: object, where: str) -> None:
    """ConfigError for a number that is not finite or is huge, or a text that cannot be a file's
    name, however deep in `value`. Comparisons with NaN are false, and would let it pass a check
    that is written the other way round."""
    if isinstance(value, Mapping):
        for key, each in cast(Mapping[str, object], value).items():
            _require_plain(each, f"{where}.{printable(str(key))}")
    elif is_dataclass(value):
        _require_plain(vars(value), where)
    elif isinstance(value, list | tuple):
        for each in cast(list[object], value):
            _require_plain(each, where)
    elif isinstance(value, int | float) and not abs(value) <= MOST_NUMBER:
        raise ConfigError(f"{where}={shown(value)} should be a finite number of ordinary size")
    elif isinstance(value, str) and not _plain(value):
        raise ConfigError(f"{where}={value[:40]!a} has characters that no name has")


def _plain(text: str) -> bool:
    """Whether it could be a name or a path: without control characters and lone surrogates."""
    return not any(ord(each) < 32 or 0xD800 <= ord(each) < 0xE000 for each in text)
