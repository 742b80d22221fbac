"""Compatibility of a policy with a deployment, checked before anything moves."""

from __future__ import annotations

from typing import Any

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from real_robot.assemble import forward_kinematics
from real_robot.deployment import Deployment
from real_robot.ipc.messages import MOST_ACTION
from real_robot.policy.observer import Observer


def observer(spec: Spec, deployment: Deployment) -> Observer:
    """What fills the policy's observations; ConfigError for one that nobody here measures, or for a
    picture without a camera."""
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
    controller: Any = build(deployment.controller)
    names: tuple[str, ...] = tuple(controller.names)
    if spec.act.dtype != "float32" or spec.act.size > MOST_ACTION:
        raise ConfigError(f"a robot needs up to {MOST_ACTION} continuous actions")
    if spec.act.size != len(names) or (spec.act.names and spec.act.names != names):
        said = ", ".join(spec.act.names) if spec.act.names else f"{spec.act.size} numbers"
        raise ConfigError(
            f"the policy says {said}; the robot's controller takes {', '.join(names)} "
            "(robot.controller.turning=none|yaw|full changes which)"
        )


def with_real_time_chunking(policy: Policy, deployment: Deployment) -> Policy:
    """`policy`, with real-time chunking where `deployment.chunks` asks for it. ConfigError for a
    policy that cannot do it."""
    if deployment.chunks is None:
        return policy
    made = policy.with_real_time_chunking(deployment.chunks)
    return made if made is policy else made.eval()
