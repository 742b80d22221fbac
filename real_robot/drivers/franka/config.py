"""Settings of a Franka's driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError, Node
from embodied.embodiments import fr3
from embodied.real_robot.drivers.driver import Wait
from embodied.real_robot.drivers.franka.gripper import Config as HandConfig
from embodied.real_robot.drivers.springs import Gain, Tool

HIGHEST_FORCE = 300.0  # N (and N m): a threshold above that is none
Torque = Annotated[float, Bound(above=0.0, high=87.0)]
Force = Annotated[float, Bound(above=0.0, high=HIGHEST_FORCE)]
Seven = tuple[Torque, Torque, Torque, Torque, Torque, Torque, Torque]
Six = tuple[Force, Force, Force, Force, Force, Force]
Gains = tuple[Gain, Gain, Gain, Gain, Gain, Gain, Gain]
Inertia = tuple[Number, Number, Number, Number, Number, Number, Number, Number, Number]


@dataclass(frozen=True)
class Payload:
    """What is mounted or held besides the hand that Desk knows."""

    mass: Annotated[float, Bound(0.0, 3.0)]  # kg
    center: tuple[Number, Number, Number]  # m, in the flange's frame
    inertia: Inertia  # kg m^2, 3 x 3 column by column

    def __post_init__(self) -> None:
        if not 0 <= self.mass <= 3:
            raise ConfigError("payload.mass is from 0 to 3 kg")


@dataclass(frozen=True)
class Config:
    """Settings of a Franka. Thresholds and payload have no default: only you know them.

    The pull of the springs is bounded by `push`, because torques may change by 1 N m/ms and a
    stronger pull swings up. `senses` is a node of `embodied.real_robot.ipc.external_state`."""

    host: str  # address of the arm
    contact_torque: Seven  # N m of each joint above which a contact is reported
    collision_torque: Seven  # N m of each joint above which the arm stops itself
    contact_force: Six  # N (x, y, z), N m (roll, pitch, yaw) of the tool: contact is reported
    collision_force: Six  # N, N m of the tool above which the arm stops itself
    payload: Payload  # what is mounted or held
    stiffness: Gains = (600.0, 600.0, 600.0, 600.0, 250.0, 150.0, 50.0)  # N m/rad of each joint
    damping: Gains = (50.0, 50.0, 50.0, 50.0, 30.0, 25.0, 15.0)  # N m s/rad of each joint
    push: Gains = (45.0, 45.0, 45.0, 45.0, 11.0, 11.0, 9.0)  # largest pull of a spring, N m
    tool: Tool | None = None  # springs on the tool's pose; null: on the joints
    hand: HandConfig | None = None  # the hand; null: none
    realtime: bool = True  # false: do without a real-time kernel
    silence: Wait = 0.1  # s without news after which the arm is lost
    patience: Wait = 10.0  # s for what is asked before anything moves
    senses: Node | None = None  # what measures the things before the arm; null: nothing

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
