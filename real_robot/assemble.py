"""Builds the objects of a robot's processes from a Deployment's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from embodied.core.build import ConfigError, Node, build, printable, shown
from embodied.embodiments.controller import Controller
from embodied.embodiments.kinematics.arm import forward_of
from embodied.real_robot.control.chunk_follower import ChunkFollower, control_loop
from embodied.real_robot.control.homing import Homing
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.driver import Driver, DryRunDriver
from embodied.real_robot.drivers.joined import JoinedDriver
from embodied.real_robot.ipc.channels import Channels, Role
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.chain import Chain, Stage
from embodied.real_robot.kernel.checks import (
    DaemonAlive,
    Enabled,
    Finite,
    Fresh,
    HoldToRun,
    Torque,
    TorqueRate,
    Tracking,
)
from embodied.real_robot.kernel.hand import Config as HandConfig
from embodied.real_robot.kernel.hand import HandLimiter
from embodied.real_robot.kernel.limiter import Limiter
from embodied.real_robot.kernel.loop import ControlLoop
from embodied.real_robot.kernel.measured import Force, Outside, Overspeed, ToolJacobian
from embodied.real_robot.kernel.messages import state_record
from embodied.real_robot.safety.energy import Energy
from embodied.real_robot.safety.geometry import Geometry
from embodied.real_robot.safety.learned_reflex import Reflex
from embodied.real_robot.safety.workspace import Region, Workspace

T = TypeVar("T")
MOST = 300  # characters of a message of another library
REDUCED_SPEED = 0.25  # m/s: the reduced speed of ISO 10218-1


def forward_kinematics(deployment: Deployment) -> Callable[[Floats], Floats]:
    """The function of the tool's positions [k, 3] (m) at joint positions [k, n]."""
    solve = forward_of(deployment.kinematics)
    return lambda q: solve(q)[0]


def tool_poses(deployment: Deployment) -> Callable[[Floats], Floats]:
    """The function of the tool's poses [k, 12] (m; rotation matrices) at joint positions [k, n]."""
    solve = forward_of(deployment.kinematics)

    def poses(q: Floats) -> Floats:
        place, turn = solve(q)[:2]
        return np.concatenate([place, turn.reshape(len(q), 9)], 1)

    return poses


def tool_target(deployment: Deployment) -> Callable[[Floats], Floats]:
    """The function of the tool's target [3] (m) when the joints are sent to q [n]."""
    positions = forward_kinematics(deployment)
    return lambda q: np.asarray(positions(q[None])[0])


def build_regions(deployment: Deployment) -> list[Region]:
    """What the arm is kept in: the tool's workspace, and the whole arm's geometry."""
    regions: list[Region] = []
    if deployment.geometry is not None:
        regions.append(Geometry(deployment.geometry, deployment.joints))
    if deployment.workspace is not None:
        regions.insert(0, Workspace(deployment.workspace, tool_places(deployment, regions)))
    return regions


def tool_places(deployment: Deployment, regions: Sequence[Region]) -> Callable[[Floats], Floats]:
    """`forward_kinematics`, by the frames of the arm's geometry where there is one: ten times as
    fast, and computed once for both at the same positions."""
    forward = forward_kinematics(deployment)
    geometry = next((region for region in regions if isinstance(region, Geometry)), None)
    return forward if geometry is None else geometry.kinematics.point(forward) or forward


def tool_speed(deployment: Deployment) -> float:
    """The limit of the tool's speed (m/s): reduced with hold-to-run, and in a policy's first
    run."""
    reduced = deployment.hold_to_run or deployment.first_run
    return min(deployment.tool_speed, REDUCED_SPEED) if reduced else deployment.tool_speed


def build_chain(deployment: Deployment) -> Chain:
    """The safety chain: all stages that have settings, and the hard limits."""
    limits, dt = deployment.limits, 1 / deployment.hertz
    regions = build_regions(deployment)
    forward, speed = tool_places(deployment, regions), tool_speed(deployment)
    jacobian = ToolJacobian(forward, deployment.joints)
    stages: list[Stage] = [
        Finite(),
        Fresh(deployment.fresh),
        Enabled(),
        DaemonAlive(deployment.heartbeat),
    ]
    if deployment.hold_to_run:
        stages.append(HoldToRun())
    if not isinstance(deployment.force, str):
        stages.append(Force(deployment.force, jacobian, dt))
    workspace = next((region for region in regions if isinstance(region, Workspace)), None)
    stages += [
        Overspeed(limits, jacobian, speed),
        Outside(limits, workspace and workspace.depths),
        *regions,
    ]
    if deployment.reflex is not None:
        stages.append(Reflex(deployment.reflex, deployment.joints, dt))
    if deployment.energy is not None:
        stages.append(Energy(deployment.energy, limits, dt, tool_poses(deployment)))
    stages.append(Torque(limits))
    if deployment.torque_rate is not None:
        stages.append(TorqueRate(deployment.torque_rate, dt))
    stages.append(Tracking(limits))
    hand = None if deployment.hand is None else HandLimiter(deployment.hand, dt)
    guards = [region.depths for region in regions]
    return Chain(stages, Limiter(limits, dt, guards, forward, speed), hand)


def open_flight_recorder(
    deployment: Deployment, folder: Path, create: bool = False, write: bool = False
) -> BlackBox:
    """The ring buffer of the last `seconds`, in `folder`."""
    slots = max(2, round(deployment.seconds * deployment.hertz))
    stages = len(build_chain(deployment).names)
    record = state_record(deployment.joints, stages, len(deployment.sensed))
    return BlackBox(folder / "ring", record, slots, create, write)


def open_channels(
    deployment: Deployment, folder: Path, role: Role = Role.READER, create: bool = False
) -> Channels:
    """The mailboxes in `folder`, opened as `role`; MailboxError where they should exist and do
    not."""
    stages = len(build_chain(deployment).names)
    made = Channels.make if create else Channels.open
    return made(folder, deployment.joints, stages, len(deployment.sensed), role)


def build_control(deployment: Deployment, folder: Path) -> ControlLoop:
    """The control loop on the mailboxes in `folder`; nothing is connected yet."""
    driver, controller = build_driver(deployment), _built(deployment.controller, Controller)
    if len(driver.joints) != deployment.joints:
        raise ConfigError(
            f"limits are given for {deployment.joints} joints, the driver has {len(driver.joints)}"
        )
    chain = build_chain(deployment)
    home, retreat = np.asarray(deployment.home), [np.asarray(q) for q in deployment.retreat]
    return control_loop(
        driver,
        chain,
        ChunkFollower(controller, deployment.step, deployment.blend, deployment.grace),
        open_channels(deployment, folder, Role.CONTROL),
        ring=open_flight_recorder(deployment, folder, write=True),
        homing=Homing(
            home,
            deployment.limits,
            build_regions(deployment),
            retreat,
            forward_kinematics(deployment),
            tool_speed(deployment),
            deployment.home_width,
        )
        if deployment.home
        else None,
    )


def build_driver(deployment: Deployment) -> Driver:
    """The driver, as a dry run where the deployment says so; nothing is connected yet."""
    driver = _built(deployment.driver, Driver)
    if driver.sensed != deployment.sensed:
        raise ConfigError(
            f"sensed is {shown(list(deployment.sensed))}, the driver senses {list(driver.sensed)}"
        )
    if driver.grip is not None:
        _require_limits(deployment.hand, driver.grip, isinstance(driver, JoinedDriver))
    return DryRunDriver(driver) if deployment.dry else driver


def _require_limits(hand: HandConfig | None, grip: float, joined: bool) -> None:
    """ConfigError where a driver's hand, which can be limited to `grip` N, has no limits, or some
    that it cannot keep. `joined`: hands whose openings are joints."""
    if hand is None:
        raise ConfigError(
            "hand: this robot has a hand, and its limits are not set: hand={high: 0.08, "
            "speed: 0.2, force: 20, at_stop: hold} (m, m/s, N; hold, open or limp)"
        )
    if hand.force < grip:
        raise ConfigError(f"hand.force={hand.force:g}: this hand presses with {grip:g} N or more")
    if hand.at_stop == "limp" and grip:
        raise ConfigError("hand.at_stop=limp: this hand cannot be limp; hold or open")
    if hand.at_stop == "open" and joined:
        raise ConfigError("hand.at_stop=open: hands that are joints hold, or are limp")


def _built(node: Node, role: type[T]) -> T:
    """ConfigError also where the class itself refuses a setting that has the right type."""
    try:
        return build(node, role)
    except (TypeError, ValueError, ArithmeticError, LookupError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"{printable(str(node.get('_target_')))}: {reason[:MOST]}") from error
