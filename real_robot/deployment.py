"""The settings of one deployment, written as one JSON file.

The daemon writes the file into its private folder; the control, policy, recorder and camera
processes read it there. `embodied.real_robot.assemble` builds their objects from it.

Safety parameters are everything that a deployment sets, unless it is in `OTHERS`: a setting that is
added later is one until it is listed there. Files that settings name (an arm's kinematics or
capsules) count with their content; addresses of robots do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np

from embodied.core.atomic_write import write_json
from embodied.core.bounds import Bound, Count, Number, OrName, Positive
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
from embodied.real_robot.cameras.sources import Side
from embodied.real_robot.drivers.driver import Outside
from embodied.real_robot.kernel.arm_state import Limits
from embodied.real_robot.kernel.checks import FreshConfig, Heartbeat
from embodied.real_robot.kernel.hand import Config as HandConfig
from embodied.real_robot.safety.energy import Config as EnergyConfig
from embodied.real_robot.safety.geometry import Config as GeometryConfig
from embodied.real_robot.safety.learned_reflex import Config as ReflexConfig
from embodied.real_robot.safety.workspace import Config as WorkspaceConfig
from embodied.real_robot.watchdog.client import Config as WatchdogConfig

FILE = "deployment.json"
MOST_NUMBER = 1e12
MOST_STEPS = 1000
Port = Annotated[int, Bound(0, 65535)]
Steps = Annotated[int, Bound(0, MOST_STEPS)]
Size = tuple[Side, Side]
"""Height and width, pixels."""


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
    """Operators with a key may connect to this robot's daemon over TCP."""

    port: Port  # TCP port; 0: any free one
    keys: str  # folder of the operators' public keys
    address: str = "127.0.0.1"  # address to listen at; 0.0.0.0: all of this machine's


@dataclass(frozen=True)
class Onboard:
    """Policies with certain actions run on the robot's own computer instead of here."""

    names: tuple[str, ...]  # action names of the policies that run there
    export: str  # function (run, folder) that writes the policy; returns driver settings
    setpoints: Node  # node of a script that sends set-points meanwhile
    policy: str = ""  # the policy that runs there now; empty: none


@dataclass(frozen=True)
class Deployment:
    """All settings of a deployed robot.

    `kinematics` is an arm file (`embodied robot describe`), or the name of a function whose first
    result is the tool's position [k, 3] (m) at joint positions [k, n]. `retreat` is used where the
    straight way home is not free of workspace and geometry: each pose is tried as a stop on the
    way, then others are looked for. Success is the sensed value of that name, or the tool within
    `goal_within` of the goal (`goal_x`, `goal_y`, `goal_z`, given or sensed). A policy that is
    `served` asks a policy server that an operator named (docs/remote.md). `allow` comes from the
    command line (`allow=[my_lab]`): a robot's YAML may not say it. An `emulator` is a node with
    `start() -> settings of the driver`, `behind() -> s that it has lost to real time` and `stop()`;
    the starter of the daemon starts it first. `force` is the external force from which the arm
    stops and lets go, or `unmeasured` where the driver cannot tell it.
    """

    driver: Node  # node of the robot's driver
    controller: Annotated[Node, OrName()]  # what turns actions into joint targets, or its name
    kinematics: str  # arm file, or the name of a function for the tool's position
    policy: str  # run or checkpoint folder
    hertz: Annotated[float, Bound(1.0, 2000.0)]  # rate of the control loop, Hz
    step: Annotated[float, Bound(above=0.0, high=10.0)]  # control period of the policy, s
    limits: Limits  # what a command may ask of the joints
    fresh: FreshConfig  # ages (s) from which observations and measurements are too old
    force: Annotated[float, Bound(above=0.0, high=1e3)] | Literal["unmeasured"]  # on the tool, N
    hand: HandConfig | None = None  # what a command may ask of the hand; null: there is none
    tool_speed: Annotated[float, Bound(above=0.0, high=10.0)] = 1.0  # largest, m/s
    first_run: bool = False  # whether the policy has yet to end an episode here: 0.25 m/s
    workspace: WorkspaceConfig | None = None  # region of the tool; null: none
    geometry: GeometryConfig | None = None  # obstacles of the whole arm; null: none
    reflex: ReflexConfig | None = None  # learned reflex; null: none
    energy: EnergyConfig | None = None  # energy tank; null: none
    torque_rate: tuple[Positive, ...] | None = None  # largest torque change [n], N m/s; null: any
    given: dict[str, Number] = field(default_factory=dict[str, float])  # observations not measured
    blend: Steps = 2  # steps in which a newer chunk is blended in
    grace: Steps = 1  # steps for which the last action of a chunk goes on
    spin: bool = True  # whether to busy-wait shortly before each tick
    seconds: Annotated[float, Bound(above=0.0, high=600.0)] = 10.0  # length of a flight record, s
    keep: Count = 20  # newest flight records that are kept
    heartbeat: Heartbeat = field(default_factory=Heartbeat)  # how long the daemon may be silent
    watchdog: WatchdogConfig | None = None  # board on the robot's safeguard input; null: none
    hold_to_run: bool = False  # whether the arm moves by itself only while an operator holds a key
    records: str = ""  # folder of the flight records; empty: beside the socket
    metrics: Port | None = None  # port of this machine for Prometheus; 0: any free one; null: none
    remote: Remote | None = None  # access for operators on other machines; null: none
    robot: str = "arm"  # name of the robot, for people and datasets
    home: tuple[Number, ...] = ()  # joints [n] (rad, m) where episodes begin; empty: anywhere
    home_width: Annotated[float, Bound(0.0, 1.0)] | None = None  # hand at home, m; null: as it is
    retreat: tuple[tuple[Number, ...], ...] = ()  # joints [n] to go home through, where need be
    served: bool = False  # whether the policy asks a policy server
    sensed: tuple[str, ...] = ()  # names of what the driver knows beyond the joints
    outside: Outside | None = None  # the driver's names and units outside; null: it has none
    goal_within: Annotated[float, Bound(above=0.0, high=10.0)] | None = None  # m; null: no goal
    recording: str = ""  # folder of the dataset that is recorded; empty: none
    dry: bool = False  # whether the arm holds still while a simulated one follows the commands
    emulator: Node | None = None  # node of a simulated robot to start first; null: none
    onboard: Onboard | None = None  # what the robot's own computer can run; null: nothing
    chunks: Literal["guided", "hard"] | None = None  # real-time chunking of the policy; null: none
    cameras: dict[str, Node] = field(default_factory=dict[str, Node])  # image sources, by name
    picture: Annotated[float, Bound(above=0.0, high=600.0)] = 0.5  # oldest image that is used, s
    filmed: dict[str, Size] = field(default_factory=dict[str, Size])  # further cameras to record
    images: Literal["png", "mp4"] | None = None  # null: png, and mp4 of `embodied robot record`
    allow: tuple[str, ...] = ()  # your own packages that nodes may name

    def __post_init__(self) -> None:
        _require_plain(vars(self), "deployment")
        if isinstance(self.controller, str):
            raise ConfigError(
                f"controller={self.controller}: a name needs the kinematics of an arm"
            )
        for package in self.allow:
            if not all(part.isidentifier() for part in package.split(".")):
                raise ConfigError(f"allow: {printable(package)} is no dotted name of Python")
        for name in self.filmed:
            if name not in self.cameras:
                raise ConfigError(f"filmed: there is no camera {name}{nearest(name, self.cameras)}")
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
    elif isinstance(value, str) and any(
        ord(each) < 32 or 0xD800 <= ord(each) < 0xE000 for each in value
    ):
        raise ConfigError(f"{where}={value[:40]!a} has characters that no name has")


COUNTED_VERSION = 1  # of what is counted; checksums of other versions cannot be compared
SAFETY_FILE = "safety.json"
MOST_NAMES = 8
OTHERS = frozenset(
    {
        *("policy", "served", "sensed", "outside", "given", "goal_within", "robot", "chunks"),
        *("home", "home_width", "retreat", "blend", "grace", "spin", "dry", "onboard", "emulator"),
        *("records", "recording", "images", "picture", "cameras", "filmed", "seconds", "keep"),
        *("metrics", "remote", "allow"),
    }
)
"""Settings of a deployment that limit nothing."""
ADDRESSES = frozenset({"host", "port", "uri", "device", "senses", "more"})
"""Settings that differ from session to session where a robot is emulated."""


def acting(deployment: Deployment) -> dict[str, Any]:
    """The safety parameters by their dotted names, as JSON can say them."""
    settings = {k: v for k, v in asdict(deployment).items() if k not in OTHERS}
    found = dict(_leaves(json.loads(json.dumps(settings)), ""))
    for name, value in list(found.items()):
        if isinstance(value, str) and Path(value).is_file():
            found[f"{name} (content)"] = _digest(Path(value).read_bytes())
    return found


def _leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    """Dotted names and values of all numbers, texts and lists of them."""
    if not isinstance(value, Mapping):
        return [(name, value)]
    items = cast(Mapping[str, Any], value).items()
    found: list[tuple[str, Any]] = []
    for key, each in items:
        if key not in ADDRESSES:
            found += _leaves(each, f"{name}.{key}" if name else key)
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def checksum(deployment: Deployment) -> str:
    """Version and checksum of the safety parameters, as `1-0a1b2c3d4e5f6071`."""
    said = json.dumps(acting(deployment), sort_keys=True)
    return f"{COUNTED_VERSION}-{_digest(said.encode())}"


def compared(deployment: Deployment, folder: Path) -> str:
    """One line: the checksum, and what changed since the last session in `folder`, where the
    parameters of this one are stored. A file there that cannot be read counts as none."""
    now, file = acting(deployment), folder / SAFETY_FILE
    try:
        before: Any = json.loads(file.read_bytes())
        version = before["version"]
        old = dict(before["parameters"])
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError):
        version, old = 0, {}
    line = f"safety parameters {checksum(deployment)}"
    try:
        write_json(file, {"version": COUNTED_VERSION, "parameters": now})
    except OSError as error:
        line = f"{line} (not stored: {error})"
    if version != COUNTED_VERSION:
        return f"{line}: nothing to compare with in this folder"
    changed = sorted(k for k in {*now, *old} if now.get(k) != old.get(k))
    if not changed:
        return f"{line}: unchanged since the last session in this folder"
    more = f" and {len(changed) - MOST_NAMES} more" if len(changed) > MOST_NAMES else ""
    names = ", ".join(changed[:MOST_NAMES])
    return f"{line}: CHANGED since the last session in this folder: {names}{more}"
