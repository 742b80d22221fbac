"""QuadrotorGoto: flies to a goal by velocity commands for a position set-point, batched.

The setting of a drone that is commanded over a radio: its firmware flies it, the policy moves the
set-point, which the drone follows with lag. Observations have the names of the real robot's.

    r = 10 (|goal - p| before - |goal - p|) + [|goal - p| < near] - |v|^2 / 20
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, NonNegative, Positive
from embodied.core.build import nearest
from embodied.core.device import pick_device
from embodied.core.env import NotFinite, StateRoles, Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.embodiments.crazyflie import RATE, VEHICLES, Vehicle
from embodied.embodiments.flight import Config as FlightConfig
from embodied.embodiments.flight import Flight
from embodied.envs.quadrotor.dynamics import Body, Pilot, numbers
from embodied.envs.quadrotor.flights import Flights
from embodied.envs.row_rng import RowRng

NAMES = (
    *(f"q{i}" for i in range(1, 5)),
    *(f"dq{i}" for i in range(1, 5)),
    *(f"{what}_{axis}" for what in ("tool", "lead", "goal", "goal_from_tool") for axis in "xyz"),
)
NOISE = (0.001,) * 4 + (0.01,) * 4
"""Of coordinates (m, rad) and their velocities."""


@dataclass(frozen=True)
class Config:
    """Settings of flights to a goal; initial positions and goals are inside the box of `flight`."""

    num_envs: Count = 16  # parallel environments
    horizon: Count = 100  # steps of `flight.dt` of an episode
    near: Positive = 0.05  # distance at which the goal counts as reached, m
    lag: NonNegative = 0.1  # largest smoothing of set-points (a time constant drawn per episode), s
    vehicle: str = "library"  # of `embodied.embodiments.crazyflie.VEHICLES`
    noise: NonNegative = 1.0  # factor of the sensor noise
    flight: FlightConfig = field(default_factory=FlightConfig)  # the robot's own controller
    device: str = "cpu"  # torch device of the simulation: auto, cpu, cuda:0
    seed: CountOrZero = 0  # of the random numbers


class QuadrotorGoto(Flights):
    """`state` [20]: joint coordinates and velocities, position, lead of the set-point, goal, goal -
    position.
    """

    name = "quadrotor_goto"
    kept: ClassVar = {
        **{"flight": "state", "sent": "sent", "wanted": "wanted", "goal": "goal", "lag": "lag"},
        **{"count": "count", "stream": "streams.state"},
    }
    columns = ("flight", "sent", "wanted", "goal")

    def __init__(self, config: Config) -> None:
        if config.vehicle not in VEHICLES:
            raise ValueError(
                f"unknown vehicle {config.vehicle!r}{nearest(config.vehicle, VEHICLES)}"
            )
        self.config = config
        self.num_envs = config.num_envs
        self.device = device = pick_device(config.device)
        self.flight = Flight(config.flight)
        vehicle = VEHICLES[config.vehicle]
        self.pilot = Pilot(vehicle, device)
        act = Leaf((3,), low=-1.0, high=1.0, names=self.flight.names)
        obs = {"state": Leaf((len(NAMES),), names=NAMES)}
        self.spec = Spec(obs, act, dt=config.flight.dt, text="fly to the goal and stay there")
        self.ticks = round(config.flight.dt * RATE)
        n = config.num_envs
        zero = torch.zeros(3, n, device=device)
        still = numbers(vehicle).to(device).expand(-1, n)
        self.body = self.pilot.physics.body(still, zero, zero).packed()
        self.hover = (vehicle.hover + 1) / 2
        self.deviation = config.noise * torch.tensor(NOISE, device=device)[:, None]
        self.low, self.high = (
            torch.tensor(end, device=device)[:, None]
            for end in (config.flight.low, config.flight.high)
        )
        self.streams = RowRng(config.seed, n, device)
        self.every = torch.arange(n, device=device)
        self.state = torch.zeros(17, n, device=device)
        self.sent = torch.zeros(4, n, device=device)
        """The set-point that the drone has."""
        self.wanted = torch.zeros(4, n, device=device)
        self.goal = torch.zeros(3, n, device=device)
        self.lag = torch.zeros(n, device=device)
        self.count = torch.zeros(n, dtype=torch.int64, device=device)

    def step(self, action: Tensor) -> Step:
        seen = self.checked(action)
        before = (self.goal - self.state[:3]).norm(dim=0)
        if not bool(torch.isfinite(action.sum())):
            raise NotFinite("quadrotor_goto: the action is not finite; the run stops here")
        self._fly(seen, action.detach().to(self.device, torch.float32).clamp(-1, 1))
        self.count = self.count + 1
        apart = (self.goal - self.state[:3]).norm(dim=0)
        there = apart < self.config.near
        reward = 10 * (before - apart) + there.float() - self.state[7:10].square().sum(0) / 20
        truncated = self.count >= self.config.horizon
        never = torch.zeros_like(truncated)
        return self.finish(self._observe(None), reward, never, truncated, {"success": there})

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"count": None}, {"stream": None})

    @property
    def vehicle(self) -> Vehicle:
        return self.pilot.vehicle

    def pose(self, row: int) -> Tensor:
        """Around the goal, which is the middle of the picture."""
        pose = self.state[:7, row].clone()
        pose[:3] -= self.goal[:, row]
        return pose

    def _fly(self, seen: Tensors, act: Tensor) -> None:
        """One step: the set-point goes in a straight line, smoothed on its way."""
        q, reference = seen["state"][:, :4], {"q": self.wanted.T, "width": self.lag}
        after = self.flight(act, q, reference)[0].T.float()
        before = self.wanted
        body = Body.of(self.body)
        share = 1 - torch.exp(-1 / (RATE * self.lag.clamp(min=1e-3)))
        nothing = torch.zeros_like(self.goal)
        for tick in range(1, self.ticks + 1):
            target = before + tick / self.ticks * (after - before)
            self.sent = self.sent + share * (target - self.sent)
            wanted = self.pilot.towards(self.state, self.sent[:3], nothing)
            command = self.pilot(self.state, wanted, self.pilot.turn_to(self.state, self.sent[3]))
            self.state = self.pilot.physics.fly(self.state, command, body, 1 / RATE)
        self.wanted = after

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        """New flights in `rows` [n]: hovering somewhere, with the set-point where they are."""
        lots = self.streams.uniform(7, rows)
        place = self.low + lots[:3] * (self.high - self.low)
        state = torch.zeros(17, len(rows), device=self.device)
        state[:3] = place
        state[3] = 1.0
        state[13:] = self.hover
        target = torch.cat([place, torch.zeros_like(place[:1])])
        goal = self.low + lots[3:6] * (self.high - self.low)
        for kept, value in (
            (self.state, state),
            (self.sent, target),
            (self.wanted, target),
            (self.goal, goal),
        ):
            kept.index_copy_(1, rows, value)
        self.lag.index_copy_(0, rows, self.config.lag * lots[6])
        self.count.index_fill_(0, rows, 0)

    def observe(self, rows: Tensor) -> Tensors:
        return self._observe(rows)

    def _observe(self, rows: Tensor | None) -> Tensors:
        pick = self.every if rows is None else rows
        state = self.state[:, pick]
        goal = self.goal[:, pick]
        yaw = self.pilot.heading(state)[None]
        measured = torch.cat([state[:3], yaw, state[7:10], state[12:13]])
        measured = measured + self.deviation * self.streams.normal(8, rows)
        place = measured[:3]
        parts = [measured, place, self.sent[:3, pick] - place, goal, goal - place]
        return {"state": torch.cat(parts).T.contiguous()}
