"""Controllers by name: `env.controller=joint_position`, `robot.controller=cartesian_pose`.

A name stands for the settings of that controller on the arm at hand. Anything else is a node with a
`_target_` and its own settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodied.core.build import ConfigError, Node, nearest
from embodied.embodiments.cartesian_delta import So101Config, Ur5eConfig
from embodied.embodiments.kinematics.arm import is_arm_file

PLACE = "embodied.embodiments"
NAMES = ("cartesian_delta", "cartesian_pose", "joint_position")
DELTAS = {
    "fr3": f"{PLACE}.cartesian_delta.CartesianDelta",
    "so101": f"{PLACE}.cartesian_delta.So101Delta",
    "ur5e": f"{PLACE}.cartesian_delta.Ur5eDelta",
}
BOXES: dict[str, Node] = {
    "fr3": {},
    "so101": {"low": So101Config.low, "high": So101Config.high, "weight": 0.1},
    "ur5e": {"low": Ur5eConfig.low, "high": Ur5eConfig.high},
}
"""Workspaces of the arms of this repository (m); an arm of five joints cannot hold every turn."""


def controller_node(said: str | Mapping[str, Any], arm: str, dt: float) -> Node:
    """The node of the controller that `said` means for `arm` (a name or an arm file) with control
    steps of `dt` s. ConfigError."""
    if not isinstance(said, str):
        return dict(said)
    if said not in NAMES:
        raise ConfigError(f"controller={said} is not known{nearest(said, NAMES)}")
    if said == "joint_position":
        return {"_target_": f"{PLACE}.joint_position.JointPosition", "arm": arm, "dt": dt}
    if is_arm_file(arm) or arm not in BOXES:
        raise ConfigError(
            f"controller={said} needs the box of your arm's workspace: write the controller with "
            "_target_, arm, low and high (m), as in docs/own_robot.md"
        )
    if said == "cartesian_delta":
        return {"_target_": DELTAS[arm], "dt": dt}
    return {"_target_": f"{PLACE}.cartesian_pose.CartesianPose", "arm": arm, "dt": dt, **BOXES[arm]}


def arm_of_kinematics(kinematics: str) -> str:
    """The arm that a deployment's `kinematics` belongs to: the arm file, or the module's name."""
    return kinematics if is_arm_file(kinematics) else kinematics.rpartition(".")[0].split(".")[-1]
