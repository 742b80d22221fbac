"""Builds the objects of a robot's processes from a Deployment's settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.build import ConfigError, build, resolve
from real_robot.control.arm_state import Floats
from real_robot.control.chunk_follower import ChunkFollower
from real_robot.control.homing import Homing
from real_robot.control.loop import Control
from real_robot.deployment import Deployment
from real_robot.drivers.driver import Driver
from real_robot.drivers.dry_run import DryRunDriver
from real_robot.ipc.channels import Channels
from real_robot.ipc.messages import state_record
from real_robot.ipc.ring_buffer import BlackBox
from real_robot.safety.chain import Chain, Stage
from real_robot.safety.checks import Enabled, Finite, Fresh, Torque, TorqueRate, Tracking
from real_robot.safety.energy_tank import Energy
from real_robot.safety.learned_reflex import Reflex
from real_robot.safety.limits import Limiter
from real_robot.safety.workspace import Workspace


def forward_kinematics(deployment: Deployment) -> Callable[[Floats], Floats]:
    """The function of the tool's positions [k, 3] (m) at joint positions [k, n]."""
    solve: Any = resolve(deployment.kinematics)

    def positions(q: Floats) -> Floats:
        return solve(q)[0]

    return positions


def tool_target(deployment: Deployment) -> Callable[[Floats], Floats]:
    """The function of the tool's target [3] (m) when the joints are sent to q [n]."""
    positions = forward_kinematics(deployment)
    return lambda q: np.asarray(positions(q[None])[0])


def build_chain(deployment: Deployment) -> Chain:
    """The safety chain: all stages that have settings, and the hard limits."""
    limits, dt = deployment.limits, 1 / deployment.hertz
    stages: list[Stage] = [Finite(), Fresh(deployment.fresh), Enabled()]
    guard: Callable[[Floats], float] | None = None
    if deployment.workspace is not None:
        workspace = Workspace(deployment.workspace, forward_kinematics(deployment))
        stages, guard = [*stages, workspace], workspace.depth
    if deployment.reflex is not None:
        stages.append(Reflex(deployment.reflex, deployment.joints, dt))
    if deployment.energy is not None:
        stages.append(Energy(deployment.energy, limits, dt))
    stages.append(Torque(limits))
    if deployment.torque_rate is not None:
        stages.append(TorqueRate(deployment.torque_rate, dt))
    stages.append(Tracking(limits))
    return Chain(stages, Limiter(limits, dt, guard))


def open_flight_recorder(
    deployment: Deployment, folder: Path, stages: int, create: bool
) -> BlackBox:
    """The ring buffer of the last `seconds`, in `folder`."""
    slots = max(2, round(deployment.seconds * deployment.hertz))
    record = state_record(deployment.joints, stages, len(deployment.sensed))
    return BlackBox(folder / "ring", record, slots, create)


def open_channels(deployment: Deployment, folder: Path, create: bool = False) -> Channels:
    """The mailboxes in `folder`; MailboxError where they should exist and do not."""
    make = Channels.make if create else Channels.open
    stages = len(build_chain(deployment).names)
    return make(folder, deployment.joints, stages, len(deployment.sensed))


def build_control(deployment: Deployment, folder: Path) -> Control:
    """The control loop on the mailboxes in `folder`; nothing is connected yet."""
    driver, controller = build_driver(deployment), build(deployment.controller)
    if len(driver.joints) != deployment.joints:
        raise ConfigError(
            f"limits are given for {deployment.joints} joints, the driver has {len(driver.joints)}"
        )
    chain = build_chain(deployment)
    home = np.asarray(deployment.home)
    return Control(
        driver,
        chain,
        ChunkFollower(controller, deployment.step, deployment.blend, deployment.grace),
        open_channels(deployment, folder),
        ring=open_flight_recorder(deployment, folder, len(chain.names), create=False),
        homing=Homing(home, deployment.limits) if deployment.home else None,
        open_at_home=deployment.home_width,
    )


def build_driver(deployment: Deployment) -> Driver:
    """The driver, as a dry run where the deployment says so; nothing is connected yet."""
    driver = build(deployment.driver)
    if not isinstance(driver, Driver):
        raise ConfigError(f"{deployment.driver.get('_target_')} is no driver")
    if driver.sensed != deployment.sensed:
        raise ConfigError(
            f"sensed is {list(deployment.sensed)}, the driver senses {list(driver.sensed)}"
        )
    return DryRunDriver(driver) if deployment.dry else driver
