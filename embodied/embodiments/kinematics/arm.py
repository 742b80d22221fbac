"""Arm: what a controller has to know of an arm; of this repository, or of a user's own arm file.

An arm file is YAML that `embodied robot describe` writes from an MJCF or URDF file: the table of
joints, limits, home pose, the hand, and capsules around the links. It holds numbers only. A file of
several arms places arms of this repository, or of arm files, on one base:

    format: embodied-arms-1
    arms:
      left:  {arm: so101, capsules: so101, place: [0, 0.2, 0], turn: [0, 0, 0], hand: true}
      right: {arm: so101, capsules: so101, place: [0, -0.2, 0]}

Joint vectors are concatenated in this order. An arm with a hand has one more joint at its end, the
hand's opening (m), so that limits and safety stages treat it like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from embodied.core.bounds import Bound, NonNegative, Number, Positive
from embodied.core.build import ConfigError, named_function, parse, plain
from embodied.core.files import SETTINGS, read_text
from embodied.core.saved_node import parse_yaml
from embodied.embodiments import fr3, ur5e
from embodied.embodiments.arrays import Floats, constant, namespace
from embodied.embodiments.kinematics.chain import Chain, Frame, Joint, Point

FORMAT = "embodied-arm-1"
SEVERAL = "embodied-arms-1"
KNOWN = ("fr3", "so101", "ur5e", "ur5e_2f85")
"""The arms of this repository; ur5e_2f85 has a Robotiq gripper, its tool is the flange."""
Array = NDArray[np.float64]
Forward = Callable[[Floats], tuple[Floats, Floats, Floats]]


@dataclass(frozen=True)
class Hand:
    """A gripper. In the model file its joints move from `closed` to `opened`."""

    open: Annotated[float, Bound(above=0.0, below=1.0)]  # opening, m
    speed: Annotated[float, Bound(above=0.0, below=10.0)] = 0.1  # of opening, m/s
    joints: tuple[str, ...] = ()  # names in the model file
    closed: tuple[Number, ...] = ()  # their closed positions, rad or m
    opened: tuple[Number, ...] = ()  # their open positions, rad or m

    def __post_init__(self) -> None:
        if not (0 < self.open < 1 and 0 < self.speed < 10):
            raise ConfigError("hand: open (m) and speed (m/s) should be above 0, below 1 and 10")
        if not len(self.joints) == len(self.closed) == len(self.opened):
            raise ConfigError("hand: each of its joints needs one number in closed and in opened")


@dataclass(frozen=True)
class JointLimits:
    """Limits, one number per joint."""

    low: tuple[Number, ...]  # smallest positions, rad or m
    high: tuple[Number, ...]  # largest positions, rad or m
    velocity: tuple[Positive, ...]  # largest velocities, rad/s or m/s
    effort: tuple[NonNegative, ...]  # largest efforts, N m or N (0: not known)


@dataclass(frozen=True)
class ArmFile:
    """The content of an arm file."""

    name: str  # of the arm
    source: str  # file that it was made from
    base: str  # name of the base body there
    tip: str  # name of the last body there
    joints: tuple[Joint, ...]  # from the base to the tip
    tool: Frame  # the tool's frame in that of the last joint
    limits: JointLimits  # of the joints
    home: tuple[Number, ...]  # joint positions, rad or m
    hand: Hand | None = None  # the gripper (null: none)
    bodies: list[Any] = field(default_factory=list[Any])  # capsules of the arm's shape
    pairs: list[Any] = field(default_factory=list[Any])  # bodies that never collide
    format: str = FORMAT  # of the file

    def __post_init__(self) -> None:
        n = len(self.joints)
        limits = self.limits
        if self.format != FORMAT:
            raise ConfigError(
                f"the arm file is of format {self.format}; this version reads {FORMAT}: write it "
                "again with embodied robot describe"
            )
        rows = (limits.low, limits.high, limits.velocity, limits.effort, self.home)
        if any(len(row) != n for row in rows) or not np.isfinite(rows).all():
            raise ConfigError(f"arm {self.name}: limits and home need {n} finite numbers each")
        low = np.array(limits.low)
        high = np.array(limits.high)
        home = np.array(self.home)
        if not ((low < high) & (low <= home) & (home <= high)).all():
            raise ConfigError(f"arm {self.name}: low < high and home between them, of every joint")
        if min(limits.velocity) <= 0 or min(limits.effort) < 0:
            raise ConfigError(f"arm {self.name}: velocity above 0 and effort of 0 or more")


@dataclass(frozen=True)
class Arm:
    """`forward`: the tool's position [B, 3], rotation [B, 3, 3] and Jacobian [B, 6, n] at joint
    positions [B, n]. `lower`, `upper`, `velocity`, `home` [n]; `hand` is None where it has none."""

    name: str
    joints: tuple[str, ...]
    forward: Forward
    lower: Array
    upper: Array
    velocity: Array
    home: Array
    hand: Hand | None = None

    def __len__(self) -> int:
        return len(self.joints)

    def hand_width(self, action: Floats, before: Floats, dt: float) -> Floats:
        """The hand's next opening [B] (m) for the last element (-1 closed, 1 open) of `action`
        [B, A], `dt` s after it was open by `before` [B] m."""
        if self.hand is None:
            return before
        aim = (action[:, -1] + 1) / 2 * self.hand.open
        change = self.hand.speed * dt
        return before + namespace(before).clip(aim - before, -change, change)


MODULES: dict[str, tuple[Any, Hand | None]] = {
    "fr3": (fr3, Hand(fr3.OPEN, 2 * fr3.FINGER_SPEED)),
    "ur5e": (ur5e, None),
    "ur5e_2f85": (ur5e, Hand(0.085, 0.15)),
}


@lru_cache(maxsize=16)
def load_arm(name: str) -> Arm:
    """The arm `name`: one of `KNOWN`, or the path of an arm file. ConfigError."""
    if name in MODULES:
        module, hand = MODULES[name]
        ends = (module.LOWER, module.UPPER, module.VELOCITY, module.HOME)
        return Arm(name, module.JOINTS, module.forward, *ends, hand)
    table = read_arm_file(name)
    limits = table.limits
    return Arm(
        table.name,
        tuple(joint.name for joint in table.joints),
        Chain(table.joints, table.tool),
        np.array(limits.low),
        np.array(limits.high),
        np.array(limits.velocity),
        np.array(table.home),
        table.hand,
    )


@lru_cache(maxsize=16)
def read_arm_file(name: str) -> ArmFile:
    """The arm file at path `name`, or of an arm of this repository that has one. ConfigError."""
    try:
        node = _loaded(name, files("embodied.embodiments") / f"{name}_arm.yaml")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"arm {name} cannot be read ({type(error).__name__}); known are {', '.join(KNOWN)}, or "
            "a file: embodied robot describe my_arm.urdf out=my_arm.yaml writes one"
        ) from error
    if not isinstance(node, dict) or "format" not in node:
        raise ConfigError(
            f"{name} is no arm file; embodied robot describe my_arm.urdf out=my_arm.yaml writes one"
        )
    return parse(ArmFile, cast(dict[str, Any], node), name)


def write_arm_file(table: ArmFile, path: Path) -> None:
    """Write `table` as YAML that `read_arm_file` reads, in full precision."""
    node = plain(asdict(table))
    head = f"# {path.stem}: embodied robot describe {table.source}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(node, sort_keys=False, default_flow_style=None, width=99))


def is_arm_file(name: str) -> bool:
    """Whether `name` is a path rather than an arm of this repository."""
    return name.endswith((".yaml", ".yml"))


def _loaded(name: str, shipped: Any) -> Any:
    """The YAML in a file. The quick loader is for files of this repository: deep nesting in
    a foreign one would end the process."""
    if is_arm_file(name):
        return parse_yaml(read_text(Path(name), SETTINGS), name)
    return yaml.load(shipped.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@dataclass(frozen=True)
class Placed:
    """An arm in the common base frame."""

    arm: str  # fr3, ur5e, so101, or an arm file
    place: Point = (0.0, 0.0, 0.0)  # of its base, m
    turn: Point = (0.0, 0.0, 0.0)  # rotation vector of its base, rad
    capsules: str | None = None  # its shape (null: that of `arm`)
    hand: bool = True  # its hand's opening is a joint

    @property
    def joints(self) -> int:
        """The number of this arm's elements of the joint vector."""
        return len(load_arm(self.arm)) + self.hand

    @property
    def rotation(self) -> NDArray[np.float64]:
        """[3, 3], of its base in the common one."""
        return fr3.rotation(np.array([self.turn], float))[0]


@dataclass(frozen=True)
class ArmsFile:
    """Several arms, in the order of the joint vector."""

    arms: dict[str, Placed]  # by their prefixes: left, right
    format: str = SEVERAL  # of the file

    def __post_init__(self) -> None:
        if self.format != SEVERAL or len(self.arms) < 2:
            raise ConfigError(
                f"a file of several arms needs format: {SEVERAL} and two arms or more"
            )
        for name in self.arms:
            if not name.isidentifier():
                raise ConfigError(f"arms: {name} should be a plain name, as left or right")

    def forward(self, q: Floats) -> tuple[Floats, Floats, Floats]:
        """The first arm's tool in the common base frame: position [B, 3], rotation [B, 3, 3]
        and Jacobian [B, 6, n] at joint positions [B, n] of all arms."""
        xp = namespace(q)
        first = next(iter(self.arms.values()))
        arm = load_arm(first.arm)
        base = constant(first.rotation, q)
        place, turn, jacobian = arm.forward(q[:, : len(arm)])
        rest = xp.zeros_like(q[:, None, len(arm) :]) + xp.zeros_like(jacobian[:, :, :1])
        both = xp.concatenate([base @ jacobian[:, :3], base @ jacobian[:, 3:]], 1)
        place = (base @ place[:, :, None])[:, :, 0] + constant(first.place, q)
        return place, base @ turn, xp.concatenate([both, rest], 2)


def read_arms_file(name: str) -> ArmsFile | None:
    """The file of several arms at path `name`, or of this repository (`two_so101`); None where
    there is no such file, or it is of another kind. ConfigError where it is wrong."""
    shipped = files("embodied.embodiments") / f"{name}_arms.yaml"
    if not (Path(name) if is_arm_file(name) else shipped).is_file():
        return None
    try:
        node = _loaded(name, shipped)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(node, dict) or "arms" not in node:
        return None
    return parse(ArmsFile, cast(dict[str, Any], node), name)


def forward_of(kinematics: str) -> Callable[..., Any]:
    """The forward kinematics that settings name: a registered function
    (`embodied.embodiments.fr3.forward`), an arm file, or a file of several arms, of which it is the
    first one's. Its first result is the tool's position [B, 3] at joint positions [B, n], its
    second the rotation. ConfigError."""
    if (several := read_arms_file(kinematics)) is not None:
        return several.forward
    if is_arm_file(kinematics):
        return load_arm(kinematics).forward
    return named_function(kinematics, "kinematics")
