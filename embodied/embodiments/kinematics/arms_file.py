"""Several arms on one base: a YAML file that places arms of this repository, or of arm files.

    format: embodied-arms-1
    arms:
      left:  {arm: so101, capsules: so101, place: [0, 0.2, 0], turn: [0, 0, 0], hand: true}
      right: {arm: so101, capsules: so101, place: [0, -0.2, 0]}

Joint vectors are concatenated in this order. An arm with a hand has one more joint at its end, the
hand's opening (m), so that limits and safety stages treat it like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from embodied.core.bounds import Number
from embodied.core.build import ConfigError, named_function, parse
from embodied.embodiments.arrays import Floats, constant, namespace
from embodied.embodiments.fr3 import rotation
from embodied.embodiments.kinematics.arm import is_arm_file, load_arm

FORMAT = "embodied-arms-1"
Point = tuple[Number, Number, Number]


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
        return rotation(np.array([self.turn], float))[0]


@dataclass(frozen=True)
class ArmsFile:
    """Several arms, in the order of the joint vector."""

    arms: dict[str, Placed]  # by their prefixes: left, right
    format: str = FORMAT  # of the file

    def __post_init__(self) -> None:
        if self.format != FORMAT or len(self.arms) < 2:
            raise ConfigError(f"a file of several arms needs format: {FORMAT} and two arms or more")
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
    source: Any = Path(name)
    if not is_arm_file(name):
        source = files("embodied.embodiments") / f"{name}_arms.yaml"
    if not source.is_file():
        return None
    try:
        node = yaml.load(source.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
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
