"""Rigid-body dynamics of a quadrotor, batched over columns (Eschmann et al., 2024).

    p' = v,   q' = 1/2 q (0, omega),   v' = R(q) e_z F / m + g + f / m
    omega' = J^-1 (tau - omega x J omega + tau_ext),   u' = (command - u) / lag

A state is [17, B]: position p (m, world), attitude q (w, x, y, z; body to world), velocity v (m/s,
world), angular velocity omega (rad/s, body), rotor speeds u (fractions of the maximum). All
functions are pure and never synchronise with the device.

The pilot turns position or velocity set-points into rotor commands. It has the structure of a
flight controller, with our own gains (not those of the firmware):

    v* = clip(k_p (p* - p)) + v_ff,   a* = k_v (v* - v),   the thrust's axis along a* + g e_z,
    omega* = k_a (axis error),   tau = J k_r (omega* - omega)

Motor lag is compensated by commands that lead the desired speed, so motors appear `QUICK`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from embodied.core.build import nearest
from embodied.embodiments.crazyflie import GRAVITY, VEHICLES, Vehicle
from embodied.envs.fr3.tasks.task import Parameter

MULTIPLIED = {
    "mass": (0,),
    "inertia": (1, 2, 3),
    "thrust": (4, 5, 6),
    "torque": (7,),
    "lag": (8, 9),
}
"""Task parameters that multiply numbers of a vehicle, and which of `numbers` these are."""
NAMES = ("blend", *MULTIPLIED, "disturbance")


class Vehicles:
    """Columns of vehicle numbers [10, n] from task vectors [D, n] in [0, 1].

    ValueError where a vehicle or a range is not known.
    """

    def __init__(
        self,
        vehicle: str,
        other: str,
        ranges: Mapping[str, tuple[float, float]],
        device: torch.device,
    ) -> None:
        self.parameters = tuple(
            Parameter(name, *_checked(name, *bounds), unit="") for name, bounds in ranges.items()
        )
        self._index = {parameter.name: i for i, parameter in enumerate(self.parameters)}
        self._low = torch.tensor([p.low for p in self.parameters], device=device)[:, None]
        self._span = torch.tensor([p.high - p.low for p in self.parameters], device=device)[:, None]
        self._first = numbers(_named(vehicle)).to(device)
        self._way = numbers(_named(other)).to(device) - self._first
        self.ends = (self._first, self._way)

    def native(self, task: Tensor) -> Tensor:
        """Task parameters [D, n] in their own units."""
        return self._low + task * self._span

    def made(self, task: Tensor) -> tuple[Tensor, Tensor]:
        """The vehicles [10, n], and what multiplies the disturbance [n]."""
        values = self.native(task)
        n = task.shape[1]
        made = self._first.expand(-1, n).clone()
        if "blend" in self._index:
            made += values[self._index["blend"]] * self._way
        for name, places in MULTIPLIED.items():
            if name in self._index:
                made[places[0] : places[-1] + 1] *= values[self._index[name]]
        stirred = task.new_ones(n)
        if "disturbance" in self._index:
            stirred = values[self._index["disturbance"]]
        return made, stirred


def _named(name: str) -> Vehicle:
    if name not in VEHICLES:
        raise ValueError(f"unknown vehicle {name!r}{nearest(name, VEHICLES)}")
    return VEHICLES[name]


def _checked(name: str, low: float, high: float) -> tuple[float, float]:
    if name not in NAMES:
        raise ValueError(f"ranges: unknown parameter {name!r}{nearest(name, NAMES)}")
    least = 0.0 if name in ("blend", "disturbance") else 1e-3
    if not least <= low <= high or (name == "blend" and high > 1):
        raise ValueError(f"ranges: {name}=[{low:g}, {high:g}] is not a valid range for it")
    return low, high


SIZES = [3, 4, 3, 3, 4]
"""Rows of a state: place, attitude, velocity, turn rate, rotor speeds."""
Term = tuple[float, str, str]
LETTERS = {"w": 3, "x": 4, "y": 5, "z": 6, "a": 10, "b": 11, "c": 12}
"""Rows of the attitude (w, x, y, z) and of the turn rate (a, b, c) in a state."""
SPIN: list[list[Term]] = [
    [(-0.5, "x", "a"), (-0.5, "y", "b"), (-0.5, "z", "c")],
    [(0.5, "w", "a"), (0.5, "y", "c"), (-0.5, "z", "b")],
    [(0.5, "w", "b"), (0.5, "z", "a"), (-0.5, "x", "c")],
    [(0.5, "w", "c"), (0.5, "x", "b"), (-0.5, "y", "a")],
]
"""1/2 q (0, omega)."""
PAIRS: list[list[Term]] = [[(1.0, "b", "c")], [(1.0, "c", "a")], [(1.0, "a", "b")]]
"""What omega x J omega is made of."""
TURN: list[list[Term]] = [
    [(-2.0, "y", "y"), (-2.0, "z", "z")],
    [(2.0, "x", "y"), (-2.0, "w", "z")],
    [(2.0, "x", "z"), (2.0, "w", "y")],
    [(2.0, "x", "y"), (2.0, "w", "z")],
    [(-2.0, "x", "x"), (-2.0, "z", "z")],
    [(2.0, "y", "z"), (-2.0, "w", "x")],
    [(2.0, "x", "z"), (-2.0, "w", "y")],
    [(2.0, "y", "z"), (2.0, "w", "x")],
    [(-2.0, "x", "x"), (-2.0, "y", "y")],
]
"""R(q) - 1, row by row."""
AXIS = TURN[2::3]
"""R(q) e_z - e_z."""


class Products:
    """Sums of products of two rows of a state, as two gathers, a product and a matrix product.

    Small batches are bound by the number of operations, not by arithmetic: this is four of them.
    """

    def __init__(self, sums: list[list[Term]], like: Tensor, squares: Tensor | None = None) -> None:
        device = like.device
        pairs = sorted({(left, right) for terms in sums for _, left, right in terms})
        more = [] if squares is None else list(range(13, 17))
        self.left = torch.tensor([LETTERS[i] for i, _ in pairs] + more, device=device)
        self.right = torch.tensor([LETTERS[j] for _, j in pairs] + more, device=device)
        self.matrix = like.new_zeros(len(sums) + len(more), len(pairs) + len(more))
        for row, terms in enumerate(sums):
            for factor, left, right in terms:
                self.matrix[row, pairs.index((left, right))] = factor
        if squares is not None:
            self.matrix[len(sums) :, len(pairs) :] = squares

    def __call__(self, state: Tensor) -> Tensor:
        left, right = state.index_select(0, self.left), state.index_select(0, self.right)
        return self.matrix @ left.mul_(right)


class Body(NamedTuple):
    """The constants of each row's equations, all [k, B]: `still` [4] is thrust per mass (m/s^2) and
    turning acceleration (rad/s^2) at rest and by the disturbance, `linear` and `quadratic` [4]
    multiply the mixed speeds and squared speeds; `pull` [3] is gravity and force (m/s^2), `gyro`
    [3] multiplies products of turn rates, `rise` and `fall` [1] are rates of the motors (1/s)."""

    still: Tensor
    linear: Tensor
    quadratic: Tensor
    pull: Tensor
    gyro: Tensor
    rise: Tensor
    fall: Tensor

    def packed(self) -> Tensor:
        """All of it as one tensor [20, B]."""
        return torch.cat(self)

    @classmethod
    def of(cls, packed: Tensor) -> Body:
        """Views of what `packed` returned."""
        return cls(*packed.split([4, 4, 4, 3, 3, 1, 1]))


def numbers(vehicle: Vehicle, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter set as one column [10, 1]: mass, J (3), thrust (3), torque, rise, fall."""
    listed = [vehicle.mass, *vehicle.inertia, *vehicle.thrust]
    listed += [vehicle.torque, vehicle.rise, vehicle.fall]
    return torch.tensor(listed, dtype=dtype)[:, None]


class Physics:
    """The equations for vehicles whose rotors are where `vehicle` has them."""

    def __init__(
        self, vehicle: Vehicle, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.mixer = torch.tensor(vehicle.mixer, device=device, dtype=dtype)
        self.gravity = self.mixer.new_tensor([0.0, 0.0, -GRAVITY])[:, None]
        self.up = self.mixer.new_tensor([0.0, 0.0, 1.0])[:, None]
        self.one = torch.eye(3, device=device, dtype=dtype).flatten()[:, None]
        self.products = Products([*SPIN, *AXIS, *PAIRS], self.mixer, self.mixer)
        self.turning = Products(TURN, self.mixer)

    def body(self, vehicle: Tensor, force: Tensor, torque: Tensor) -> Body:
        """Vehicles [10, B] under a constant force (N, world) and torque (N m, body) [3, B]."""
        mass, inertia, thrust, spin, rise, fall = vehicle.split([1, 3, 3, 1, 1, 1])
        gain = torch.cat([1 / mass, 1 / inertia[:2], spin / inertia[2:]])
        still = gain * thrust[:1] * self.mixer.sum(1, keepdim=True)
        still[1:] += torque / inertia
        x, y, z = inertia
        return Body(
            still=still,
            linear=gain * thrust[1:2],
            quadratic=gain * thrust[2:],
            pull=self.gravity + force / mass,
            gyro=torch.stack([(y - z) / x, (z - x) / y, (x - y) / z]),
            rise=1 / rise,
            fall=1 / fall,
        )

    def derivative(self, state: Tensor, command: Tensor, quickness: Tensor, body: Body) -> Tensor:
        """Return d state / dt [17, B] while the rotors are asked for `command` [4, B]; their speeds
        follow at `quickness` [4, B] (1/s)."""
        speeds = state[13:]
        spin, axis, pairs, squares = self.products(state).split([4, 3, 3, 4])
        push = torch.addcmul(body.still, body.linear, self.mixer @ speeds)
        push.addcmul_(body.quadratic, squares)
        velocity = torch.addcmul(body.pull, axis.add_(self.up), push[:1])
        rate = push[1:].addcmul_(body.gyro, pairs)
        return torch.cat([state[7:10], spin, velocity, rate, (command - speeds).mul_(quickness)])

    def fly(self, state: Tensor, action: Tensor, body: Body, dt: float) -> Tensor:
        """The state after `action` [4, B] in [-1, 1] was held for `dt` (s): one Runge-Kutta step of
        fourth order, then a unit attitude and speeds in [0, 1]."""
        command = (action + 1) / 2
        # The command is held, so that a motor rises or falls all the way through the step.
        quickness = torch.where(command > state[13:], body.rise, body.fall)
        k1 = self.derivative(state, command, quickness, body)
        k2 = self.derivative(torch.add(state, k1, alpha=dt / 2), command, quickness, body)
        k3 = self.derivative(torch.add(state, k2, alpha=dt / 2), command, quickness, body)
        k4 = self.derivative(torch.add(state, k3, alpha=dt), command, quickness, body)
        slope = k1.add_(k2, alpha=2).add_(k3, alpha=2).add_(k4)
        after = torch.add(state, slope, alpha=dt / 6)
        after[3:7].mul_(after[3:7].square().sum(0).rsqrt_())  # vector_norm takes 40 times as long
        after[13:].clamp_(0, 1)
        return after

    def turn(self, state: Tensor) -> Tensor:
        """Rotation matrices, row by row [9, B]."""
        return self.turning(state).add_(self.one)


def tilted(axis: Tensor, share: Tensor) -> Tensor:
    """Quaternions [4, n] of uniformly distributed rotations by no more than a quarter turn.

    `axis` [3, n] is a direction of any length, `share` [n] uniform in [0, 1]. The angle of a
    uniform rotation has density (1 - cos a) / pi: below a quarter turn, with share s of them
    below a, it solves a - sin a = s (pi/2 - 1).
    """
    right = share * (math.pi / 2 - 1)
    angle = (6 * right).pow(1 / 3)
    for _ in range(2):  # Newton, from a start that is 4% off at most
        miss = angle - angle.sin() - right
        angle = angle - miss / (1 - angle.cos()).clamp(min=1e-6)
    half = angle / 2
    return torch.cat([half.cos()[None], axis / axis.norm(dim=0) * half.sin()])


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
