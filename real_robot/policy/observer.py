"""Builds a policy's vector observations from robot measurements, by the element names of its Spec.

A policy was trained on named numbers; the same names say what has to be measured. `q1 ...`,
`dq1 ...`, `width`, `tool_x ...` and `lead_x ...` (how far the tool's target is ahead of it) come
from the arm. What its driver knows beyond the joints (a cube's pose) is `sensed`, what is known
beforehand (`goal_x ...`) is `given`, and `A_from_B_x ...` is the difference of A and B. A given
value takes precedence over a sensed one of the same name, and differences are computed anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError, build, nearest
from embodied.core.policy import Policy
from embodied.core.spec import Spec, hidden
from embodied.embodiments.controller import Controller
from embodied.policies import abilities
from embodied.real_robot.assemble import forward_kinematics
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Outside
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import MOST_ACTION

AXES = ("x", "y", "z")
APART = re.compile(r"(.+)_from_(.+)_([xyz])")
Forward = Callable[[Floats], Floats]


class Observer:
    """Fills the vector leaves of `spec`; ConfigError for a name that nothing here can fill.

    `forward` is the tool's position [k, 3] (m) at joint positions [k, n]. `given` holds further
    numbers by name and may be changed at any time. `pictures` are the leaves that cameras fill,
    `outside` the driver's names and units of joints and hand (`shoulder_pan.pos`, degrees).
    """

    def __init__(
        self,
        spec: Spec,
        joints: int,
        forward: Forward,
        given: Mapping[str, float],
        sensed: Sequence[str] = (),
        pictures: Collection[str] = (),
        outside: Outside | None = None,
    ) -> None:
        self.forward = forward
        self.given = dict(given)
        self.joints = joints
        self.sensed = tuple(sensed)
        self.outside = outside
        self.names: dict[str, tuple[str, ...]] = {}
        for leaf, about in spec.obs.items():
            if hidden(leaf) or (about.is_image and leaf in pictures):
                continue
            if about.is_depth or about.is_points:
                what = "depth picture" if about.is_depth else "point cloud"
                raise ConfigError(
                    f"the policy has the {what} {leaf}, and no camera here measures depth"
                )
            if about.is_image:
                raise ConfigError(
                    f"the policy has image observations ({leaf}): name a camera for it, "
                    f"robot.cameras.{leaf}"
                )
            if not about.names:
                raise ConfigError(
                    f"the elements of {leaf} have no names, so they cannot be "
                    "matched with measurements"
                )
            self.names[leaf] = about.names
        nothing = np.zeros(len(self.sensed))
        known = self._numbers(np.zeros(joints), np.zeros(joints), np.zeros(3), 0.0, nothing)
        for name in (each for names in self.names.values() for each in names):
            if _made(name, known) is None:
                raise ConfigError(
                    f"the policy observes {name}{nearest(name, known)}, "
                    "which this robot does not measure: "
                    "robot.given={NAME: NUMBER}"
                )

    def __call__(
        self, q: Floats, dq: Floats, target: Floats, width: float, sensed: Floats | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """Leaves [size] from joint positions and velocities [n], the tool's target [3], how far the
        hand is open (m) and what is sensed."""
        known = self._numbers(q, dq, target, width, np.zeros(0) if sensed is None else sensed)
        return {
            leaf: np.array([_made(name, known) for name in names], dtype=np.float32)
            for leaf, names in self.names.items()
        }

    def _numbers(
        self, q: Floats, dq: Floats, target: Floats, width: float, sensed: Floats
    ) -> dict[str, float]:
        tool = self.forward(q[None])[0]
        known = {f"q{i}": float(value) for i, value in enumerate(q, 1)}
        known |= {f"dq{i}": float(value) for i, value in enumerate(dq, 1)}
        known |= {f"tool_{axis}": float(value) for axis, value in zip(AXES, tool, strict=True)}
        ahead = zip(AXES, target - tool, strict=True)
        known |= {f"lead_{axis}": float(value) for axis, value in ahead}
        given = {*self.given}
        pairs = zip(self.sensed, sensed, strict=True)
        known |= {name: float(value) for name, value in pairs if given.isdisjoint(_apart(name))}
        if self.outside is not None:
            values = self.outside.values(q, width).tolist()
            known |= dict(zip(self.outside.names, values, strict=True))
        return {**known, "width": width, **self.given}


def names_of(joints: int, given: Iterable[str], sensed: Iterable[str]) -> tuple[str, ...]:
    """All that can be seen of an arm of so many joints, by name."""
    robot = [f"{what}{i}" for what in ("q", "dq") for i in range(1, joints + 1)]
    robot += [f"{what}_{axis}" for what in ("tool", "lead") for axis in AXES]
    return tuple(dict.fromkeys([*robot, "width", *given, *sensed]))


def _apart(name: str) -> tuple[str, ...]:
    """The two whose difference the name says; none where it says no difference."""
    found = APART.fullmatch(name)
    return () if found is None else (f"{found[1]}_{found[3]}", f"{found[2]}_{found[3]}")


def _made(name: str, known: Mapping[str, float]) -> float | None:
    """The number of that name, or the difference that it names; None where it is not known."""
    if name in known:
        return known[name]
    parts = [known[each] for each in _apart(name) if each in known]
    return parts[0] - parts[1] if len(parts) == 2 else None


SENSED = "success"
GOAL = ("goal_x", "goal_y", "goal_z")


class Success:
    """Success as it is sensed by that name; else the tool within `goal_within` m of the goal
    that is given or sensed; else it is not known (None)."""

    def __init__(self, deployment: Deployment) -> None:
        self.sensed = deployment.sensed
        self.within = deployment.goal_within
        self.given = deployment.given
        self.forward = forward_kinematics(deployment)
        has = {*deployment.given, *deployment.sensed}
        self.known = SENSED in self.sensed or (self.within is not None and {*GOAL} <= has)

    def __call__(self, q: Floats, sensed: Iterable[float]) -> bool | None:
        if not self.known:
            return None
        values = {**self.given, **dict(zip(self.sensed, sensed, strict=True))}
        if SENSED in self.sensed:
            return values[SENSED] > 0.5
        assert self.within is not None
        goal = np.array([values[name] for name in GOAL])
        return float(np.linalg.norm(self.forward(q[None])[0] - goal)) < self.within


def observer(spec: Spec, deployment: Deployment) -> Observer:
    """The `Observer` of a deployment."""
    forward, images = forward_kinematics(deployment), tuple(deployment.cameras)
    known = (deployment.given, deployment.sensed, images, deployment.outside)
    return Observer(spec, deployment.joints, forward, *known)


def require_rate(spec: Spec, deployment: Deployment) -> None:
    """ConfigError where the policy decides at another rate than the robot's controller expects."""
    if abs(spec.dt - deployment.step) > 1e-9:
        raise ConfigError(
            f"the policy decides every {spec.dt} s; the deployment's step is {deployment.step}"
        )


def require_actions(spec: Spec, deployment: Deployment) -> None:
    """ConfigError where the robot's controller means something else by the policy's action."""
    controller = build(deployment.controller, Controller)
    names: tuple[str, ...] = tuple(controller.names)
    if spec.act.dtype != "float32" or spec.act.size > MOST_ACTION:
        raise ConfigError(f"a robot needs up to {MOST_ACTION} continuous actions")
    if spec.act.size != len(names) or (spec.act.names and spec.act.names != names):
        said = ", ".join(spec.act.names) if spec.act.names else f"{spec.act.size} numbers"
        raise ConfigError(
            f"the policy says {said}; the robot's controller takes {', '.join(names)} "
            "(robot.controller.turning=none|yaw|full changes which, or "
            "robot.controller=joint_position|cartesian_pose|cartesian_delta)"
        )
    if spec.act.is_unit == controller.physical:
        raise ConfigError(
            "the policy's actions are in physical units, the robot's controller takes [-1, 1]: "
            "robot.controller.action=deg (or rad), with robot.controller=joint_position"
            if controller.physical is False
            else "the policy's actions are in [-1, 1], the robot's controller takes joint "
            "positions: robot.controller.action=normalized, with its low and high"
        )


def with_real_time_chunking(policy: Policy, deployment: Deployment) -> Policy:
    """`policy`, with real-time chunking where the deployment asks for it. ConfigError."""
    if deployment.chunks is None:
        return policy
    made = abilities.with_real_time_chunking(policy, deployment.chunks)
    return made if made is policy else made.eval()
