"""Compatibility of a policy with a deployment, checked before anything moves."""

from __future__ import annotations

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Bound, Leaf, Spec
from embodied.embodiments.controller import Controller
from embodied.policies import abilities
from embodied.real_robot.assemble import forward_kinematics
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.messages import MOST_ACTION
from embodied.real_robot.policy.observer import Observer


def observer(spec: Spec, deployment: Deployment) -> Observer:
    """The object that fills the policy's observations; ConfigError for one that is not measured
    here, or for a picture without a camera."""
    forward, given = forward_kinematics(deployment), deployment.given
    images = tuple(deployment.cameras)
    return Observer(spec, deployment.joints, forward, given, deployment.sensed, images)


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
    if _normalized(spec.act) == controller.physical:
        raise ConfigError(
            "the policy's actions are in physical units, the robot's controller takes [-1, 1]: "
            "robot.controller.action=deg (or rad), with robot.controller=joint_position"
            if controller.physical is False
            else "the policy's actions are in [-1, 1], the robot's controller takes joint "
            "positions: robot.controller.action=normalized, with its low and high"
        )


def _normalized(act: Leaf) -> bool:
    """Whether actions are in [-1, 1]; what has other bounds, or none, is in units of its own."""

    def every(bound: Bound, value: float) -> bool:
        each = bound if isinstance(bound, tuple) else (bound,)
        return all(number == value for number in each)

    return every(act.low, -1.0) and every(act.high, 1.0)


def with_real_time_chunking(policy: Policy, deployment: Deployment) -> Policy:
    """`policy`, with real-time chunking where `deployment.chunks` asks for it. ConfigError for a
    policy that cannot do it."""
    if deployment.chunks is None:
        return policy
    made = abilities.with_real_time_chunking(policy, deployment.chunks)
    return made if made is policy else made.eval()
