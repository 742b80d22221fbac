"""Checks of a robot's settings: its parts fit together. No driver is opened, nothing moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.checks.check import checks_of, require
from embodied.core.build import Node, build
from embodied.embodiments.controller import Controller
from embodied.real_robot.assemble import forward_kinematics
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver
from embodied.real_robot.safety.workspace import Workspace


@dataclass(frozen=True)
class RobotSubject:
    """The node of a robot, as `embodied deploy` composes it."""

    node: Node


def deployment_of(subject: RobotSubject) -> tuple[Driver, Deployment]:
    """The driver, which is not opened, and the deployment's settings."""
    node = {key: value for key, value in subject.node.items() if key != "_target_"}
    driver = build(node["driver"], Driver)
    return driver, Deployment.parse({**node, "policy": "", "sensed": list(driver.sensed)})


def it_can_be_built(subject: RobotSubject) -> None:
    """It is a Deployment with a driver, and every setting is given."""
    target = subject.node.get("_target_")
    wanted = "embodied.real_robot.deployment.Deployment"
    require(target == wanted, f"_target_ is {target}, should be {wanted}")
    deployment_of(subject)


def the_driver_has_the_joints(subject: RobotSubject) -> None:
    """The driver reads as many joints as the robot has."""
    driver, made = deployment_of(subject)
    count = len(driver.joints)
    require(count == made.joints, f"the driver has {count} joints, the robot {made.joints}")


def the_controller_fits(subject: RobotSubject) -> None:
    """Its controller names its actions and has the deployment's step."""
    _, made = deployment_of(subject)
    controller: Any = build(made.controller, Controller)
    require(controller.names, "the controller names no actions")
    dt = controller.config.dt
    require(dt == made.step, f"controller.dt={dt} should be the deployment's step, {made.step}")


def times_fit_together(subject: RobotSubject) -> None:
    """A policy may be late by two steps, and the control rate is at least the policy's."""
    _, made = deployment_of(subject)
    late = made.fresh.hold >= 2 * made.step
    require(late, f"fresh.hold={made.fresh.hold} should be at least two steps of {made.step} s")
    require(
        made.hertz * made.step >= 1, f"hertz={made.hertz} is slower than a step of {made.step} s"
    )


def the_workspace_holds_home(subject: RobotSubject) -> None:
    """There is a workspace, the forward kinematics is finite, and home is inside."""
    _, made = deployment_of(subject)
    kinematics = forward_kinematics(made)
    home = np.asarray(made.home)[None]
    place = kinematics(home)
    sound = place.shape == (1, 3) and bool(np.isfinite(place).all())
    require(sound, f"the kinematics gives {place}, should be x, y, z in metres")
    require(made.workspace is not None, "no workspace: nothing keeps the tool from the table")
    assert made.workspace is not None
    depth = float(np.min(Workspace(made.workspace, kinematics).depth(home)))
    require(depth > 0, f"home, at {np.round(place[0], 3)}, is outside of the workspace")


CHECKS = checks_of(__name__)
