"""Cascaded quadrotor controller: position or velocity set-points to rotor commands, batched.

The structure of a flight controller, with our own gains (not those of the firmware):

    v* = clip(k_p (p* - p)) + v_ff,   a* = k_v (v* - v),   the thrust's axis along a* + g e_z,
    omega* = k_a (axis error),   tau = J k_r (omega* - omega)

Motor lag is compensated by commands that lead the desired speed, so motors appear `QUICK`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.embodiments.crazyflie import GRAVITY, Vehicle
from embodied.envs.quadrotor.dynamics import Physics

QUICK = 0.03
"""Time constant that the motors seem to have while they are not at their ends, s."""


@dataclass(frozen=True)
class Gains:
    """Of place (1/s), velocity (1/s), attitude (1/s), turn rate (1/s), heading (1/s); most speed
    (m/s), acceleration (m/s^2) and turn rate of the heading (rad/s)."""

    place: float = 2.0
    velocity: float = 4.0
    attitude: float = 8.0
    rate: float = 25.0
    heading: float = 2.0
    speed: float = 1.0
    acceleration: float = 4.0
    turning: float = 2.0


class Pilot:
    """Cascaded controller of vehicles of one kind; states are those of
    `embodied.envs.quadrotor.dynamics` [17, B]."""

    def __init__(self, vehicle: Vehicle, device: torch.device, gains: Gains | None = None) -> None:
        self.vehicle = vehicle
        self.gains = Gains() if gains is None else gains
        self.physics = Physics(vehicle, device)
        mixer = torch.tensor(vehicle.mixer, device=device)
        mixer[3] *= vehicle.torque
        self.unmix = torch.linalg.inv(mixer)
        self.inertia = torch.tensor(vehicle.inertia, device=device)[:, None]
        self.up = torch.tensor([0.0, 0.0, GRAVITY], device=device)[:, None]

    def towards(self, state: Tensor, place: Tensor, ahead: Tensor) -> Tensor:
        """The acceleration [3, B] towards `place` [3, B], which moves at `ahead` (m/s)."""
        most = self.gains.speed
        wanted = (self.gains.place * (place - state[:3])).clamp(-most, most) + ahead
        return self.along(state, wanted)

    def along(self, state: Tensor, velocity: Tensor) -> Tensor:
        """The acceleration [3, B] towards the velocity `velocity` [3, B]."""
        most = self.gains.acceleration
        return (self.gains.velocity * (velocity - state[7:10])).clamp(-most, most)

    def heading(self, state: Tensor) -> Tensor:
        """Yaw [B], rad."""
        w, x, y, z = state[3:7]
        return torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))

    def turn_to(self, state: Tensor, yaw: Tensor) -> Tensor:
        """The turn rate [B] (rad/s) that leads to heading `yaw` [B], the short way."""
        apart = yaw - self.heading(state)
        apart = torch.remainder(apart + math.pi, 2 * math.pi) - math.pi
        return (self.gains.heading * apart).clamp(-self.gains.turning, self.gains.turning)

    def __call__(self, state: Tensor, acceleration: Tensor, turning: Tensor) -> Tensor:
        """Commands [4, B] in [-1, 1] for an acceleration [3, B] (m/s^2) and a turn rate about the
        drone's own vertical [B] (rad/s)."""
        gains = self.gains
        vehicle = self.vehicle
        rotation = self.physics.turn(state).view(3, 3, -1)
        force = acceleration + self.up
        # The thrust's axis as the drone sees it: its first two parts are the error.
        wanted = torch.einsum("ijb,ib->jb", rotation, force / force.norm(dim=0))
        rates = torch.stack([-gains.attitude * wanted[1], gains.attitude * wanted[0], turning])
        omega = state[10:13]
        torque = self.inertia * gains.rate * (rates - omega)
        torque = torque + torch.linalg.cross(omega, self.inertia * omega, dim=0)
        lift = vehicle.mass * (force * rotation[:, 2]).sum(0)
        pulls = self.unmix @ torch.cat([lift[None], torque])
        c0, c1, c2 = vehicle.thrust
        square = c1 * c1 + 4 * c2 * (pulls.clamp(min=c0) - c0)
        speeds = ((square.sqrt() - c1) / (2 * c2)).clamp(0, 1)
        apart = speeds - state[13:]
        lag = torch.where(apart > 0, vehicle.rise, vehicle.fall) / QUICK
        return 2 * (state[13:] + lag.clamp(min=1) * apart).clamp(0, 1) - 1
