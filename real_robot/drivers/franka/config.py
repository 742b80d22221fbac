"""Settings of a Franka's driver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.build import ConfigError, Node
from embodied.embodiments import fr3
from embodied.real_robot.drivers.franka.gripper import Config as HandConfig
from embodied.real_robot.drivers.springs import Tool

Seven = tuple[float, float, float, float, float, float, float]
Six = tuple[float, float, float, float, float, float]
HIGHEST_FORCE = 300.0  # N (and N m): a threshold above that is none


@dataclass(frozen=True)
class Payload:
    """What is mounted or held besides the hand that Desk knows: `mass` (kg), `center` (m, in the
    flange's frame), `inertia` (kg m^2, 3 x 3 column by column)."""

    mass: float
    center: tuple[float, float, float]
    inertia: tuple[float, float, float, float, float, float, float, float, float]

    def __post_init__(self) -> None:
        if not 0 <= self.mass <= 3:
            raise ConfigError("payload.mass is from 0 to 3 kg")


@dataclass(frozen=True)
class Config:
    """`host`: the arm's address. Above `contact_*` a contact is reported, above `collision_*` the
    arm stops itself: N m of each joint, N and N m of the tool's x, y, z, roll, pitch, yaw. These,
    and the payload, have no default: only you know them.

    `stiffness` (N m/rad) and `damping` (N m s/rad) of the joint impedance, whose spring pulls with
    no more than `push` (N m): torques may change by 1 N m/ms, and a stronger pull swings up. With
    `tool` the springs are on the tool's pose instead (Cartesian impedance).
    `realtime: false` does without a real-time kernel; `silence` (s) without news after which the
    arm counts as lost; `patience` (s) for what is asked before anything moves. `senses`: what
    measures the things before the arm (`embodied.real_robot.ipc.external_state`), where the policy
    wants to know.
    """

    host: str
    contact_torque: Seven
    collision_torque: Seven
    contact_force: Six
    collision_force: Six
    payload: Payload
    stiffness: Seven = (600.0, 600.0, 600.0, 600.0, 250.0, 150.0, 50.0)
    damping: Seven = (50.0, 50.0, 50.0, 50.0, 30.0, 25.0, 15.0)
    push: Seven = (45.0, 45.0, 45.0, 45.0, 11.0, 11.0, 9.0)
    tool: Tool | None = None
    hand: HandConfig | None = None
    realtime: bool = True
    silence: float = 0.1
    patience: float = 10.0
    senses: Node | None = None

    def __post_init__(self) -> None:
        pairs = [
            (self.contact_torque, self.collision_torque, fr3.TORQUE),
            (self.contact_force, self.collision_force, np.full(6, HIGHEST_FORCE)),
        ]
        for contact, collision, most in pairs:
            low, high = np.asarray(contact), np.asarray(collision)
            if not (len(low) == len(high) == len(most)):
                raise ConfigError("thresholds are 7 torques (joints) and 6 forces (the tool)")
            if not ((low > 0) & (low <= high) & (high <= most)).all():
                raise ConfigError(
                    "thresholds should be 0 < contact <= collision <= the joint's torque limit "
                    f"({fr3.TORQUE.tolist()} N m), or {HIGHEST_FORCE:.0f} N"
                )
        gains = np.array([self.stiffness, self.damping, self.push], float)
        if gains.shape != (3, 7) or not ((gains > 0) & (gains <= 3000)).all():
            raise ConfigError("stiffness, damping, push: 7 numbers each, above 0, up to 3000")
        if not (self.silence > 0 and self.patience > 0):
            raise ConfigError("silence and patience should be above 0 s")
