"""Race: a small car on a closed track with range measurements, for reset-free learning.

A kinematic bicycle model whose tyres slip above a lateral acceleration:

    v' = clip((wanted - v) / dt, -brake, push),  yaw' = clip(v tan(steer) / length, +-grip / |v|)

Walls stop the car; an impact faster than `shock` is a crash. Episodes do not end and the car is not
reset here; `embodied.envs.reset_free.wrapper` splits the interaction into episodes. Reward: speed
towards the goal as a share of the maximum, less a penalty for a crash (FastRLAP; Stachowicz et al.,
2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction, NonNegative, Positive
from embodied.core.env import StateRoles, Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv, paint, paint_discs, pixel_grid
from embodied.envs.reset_free.wrapper import Facts
from embodied.envs.row_rng import RowRng


@dataclass(frozen=True)
class Track:
    """A closed planar track with walls; its middle line has three lobes in polar coordinates.

        r(phi) = R (1 + a cos 3 phi),   off = (rho - r) / sqrt(1 + (r' / r)^2)

    `off` is the distance from the middle line, to first order.
    """

    size: Positive = 5.0  # mean radius R of the middle line, m
    bend: Fraction = 0.2  # relative amplitude a of the radius
    half: Positive = 0.9  # half the width, m
    goals: Count = 15  # goals on the middle line, evenly by angle

    def radius(self, angle: Tensor) -> Tensor:
        """The radius of the middle line (m) at `angle` (rad)."""
        return self.size * (1 + self.bend * torch.cos(3 * angle))

    def slope(self, angle: Tensor) -> Tensor:
        """The derivative dr / d phi of the radius (m)."""
        return -3 * self.size * self.bend * torch.sin(3 * angle)

    def off(self, place: Tensor) -> Tensor:
        """Signed distance of positions [..., 2] from the centre line (m, positive outside)."""
        angle = torch.atan2(place[..., 1], place[..., 0])
        radius = self.radius(angle)
        slope = self.slope(angle)
        return (place.norm(dim=-1) - radius) / torch.sqrt(1 + (slope / radius).square())

    def inside(self, place: Tensor) -> Tensor:
        """Whether places [..., 2] are between the walls."""
        return self.off(place).abs() < self.half

    def middle(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Places [n, 2] (m) of the middle line at `angle` [n], and its heading there [n] (rad)."""
        radius = self.radius(angle)
        slope = self.slope(angle)
        cos, sin = torch.cos(angle), torch.sin(angle)
        place = torch.stack([radius * cos, radius * sin], -1)
        heading = torch.atan2(slope * sin + radius * cos, slope * cos - radius * sin)
        return place, heading

    def goal(self, number: Tensor) -> Tensor:
        """Places [n, 2] (m) of goals [n] (int64)."""
        return self.middle(2 * math.pi * number / self.goals)[0]

    def next_goal(self, place: Tensor) -> Tensor:
        """The number [n] of the first goal that is ahead of places [n, 2], by angle."""
        angle = torch.atan2(place[:, 1], place[:, 0]) / (2 * math.pi) * self.goals
        return (angle.floor().long() + 1) % self.goals

    def sight(self, place: Tensor, heading: Tensor, rays: Tensor, reach: float) -> Tensor:
        """Distances [n, k] (m, at most `reach`) to the walls along `rays` [k] (rad from the
        heading), to a precision of 0.2 m.
        """
        steps = torch.arange(1, round(reach / 0.2) + 1) * 0.2
        angle = heading[:, None] + rays
        ways = torch.stack([angle.cos(), angle.sin()], -1)
        points = place[:, None, None] + steps[:, None] * ways[:, :, None]
        open_ = self.inside(points).cumprod(2).sum(2)
        return 0.2 * open_.clamp(max=len(steps))


RAYS = (-1.5, -0.9, -0.4, 0.0, 0.4, 0.9, 1.5)  # rad
REACH = 5.0  # m
DT = 0.1  # s
SUB = 4  # parts of a step
BACK = -1.0  # m/s at throttle -1
FAST = 4.0  # m/s at throttle 1
STEER = 0.5  # rad
TURNING = 3.0  # rad/s
LENGTH = 0.4  # m
PUSH = 3.0  # m/s^2
BRAKE = 5.0  # m/s^2
GRIP = 4.0  # m/s^2
NAMES = (
    "speed",
    "yaw_rate",
    "steering",
    "goal_ahead",
    "goal_left",
    "last_steer",
    "last_throttle",
    *(f"wall{i}" for i in range(len(RAYS))),
)


@dataclass(frozen=True)
class Config:
    """Settings of the race."""

    num_envs: Count = 1  # parallel environments
    track: Track = field(default_factory=Track)  # shape of the track
    near: Positive = 1.2  # distance at which a goal counts as reached, m
    shock: Positive = 1.5  # a faster impact is a crash, m/s
    crash: NonNegative = 5.0  # penalty of a crash; a fifth more per m/s
    seed: CountOrZero = 0  # of the random numbers


class Race(BatchedEnv):
    """Actions: steering and throttle. The car starts at rest anywhere on the centre line."""

    name = "race"
    kept: ClassVar = {
        **{name: name for name in ("place", "moving", "last", "goal", "crashed")},
        "generator": "streams.state",
    }

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.track = config.track
        act = Leaf((2,), low=-1.0, high=1.0, names=("steer", "throttle"))
        text = "drive round the track fast and touch no wall"
        self.spec = Spec({"state": Leaf((len(NAMES),), names=NAMES)}, act, dt=DT, text=text)
        n = self.num_envs
        self.rays = torch.tensor(RAYS)
        self.place = torch.zeros(n, 2)
        self.moving = torch.zeros(n, 4)
        self.last = torch.zeros(n, 2)
        self.goal = torch.zeros(n, dtype=torch.int64)
        self.crashed = torch.zeros(n, dtype=torch.bool)
        self.streams = RowRng(config.seed, n)
        self.begin(torch.arange(n))
        self.obs = self.look()

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        angle = 2 * math.pi * self.streams.uniform(1, rows)[0]
        place, heading = self.track.middle(angle)
        self.place[rows] = place
        still = torch.zeros_like(heading)
        self.moving[rows] = torch.stack([heading, still, still, still], 1)
        self.last[rows] = 0.0
        self.crashed[rows] = False
        self.goal[rows] = self.track.next_goal(place)

    def begun(self, obs: Tensors | None, rows: Tensor) -> Tensors:
        return self.look()  # the goals of others may have moved on

    def step(self, action: Tensor) -> Step:
        action = action.clamp(-1, 1)
        before = (self.track.goal(self.goal) - self.place).norm(dim=1)
        hit = torch.zeros(self.num_envs)
        for _ in range(SUB):
            hit = torch.maximum(hit, self._drive(action, DT / SUB))
        self.crashed = hit > self.config.shock
        after = (self.track.goal(self.goal) - self.place).norm(dim=1)
        reward = (before - after) / (DT * FAST)
        reward = reward - self.crashed * (self.config.crash + hit / 5)
        self.last = action.clone()
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        log = {"speed": self.moving[:, 1].clone()}
        return self.finish(self.look(), reward, never, never.clone(), log)

    def _drive(self, action: Tensor, dt: float) -> Tensor:
        """Drive for `dt` s; returns how fast each car ran into a wall [n] (m/s, 0: it did not)."""
        heading, speed, steering, _ = self.moving.unbind(1)
        wanted = BACK + (action[:, 1] + 1) / 2 * (FAST - BACK)
        speed = speed + (wanted - speed).clamp(-BRAKE * dt, PUSH * dt)
        turn = (STEER * action[:, 0] - steering).clamp(-TURNING * dt, TURNING * dt)
        steering = steering + turn
        most = GRIP / speed.abs().clamp(min=1e-3)
        rate = (speed * torch.tan(steering) / LENGTH).clamp(-most, most)
        heading = heading + rate * dt
        way = torch.stack([heading.cos(), heading.sin()], 1)
        there = self.place + (speed * dt)[:, None] * way
        free = self.track.inside(there)
        self.place = torch.where(free[:, None], there, self.place)
        hit = torch.where(free, 0.0, speed.abs())
        speed = torch.where(free, speed, 0.0)
        rate = torch.where(free, rate, 0.0)
        self.moving = torch.stack([heading, speed, steering, rate], 1)
        return hit

    def look(self) -> Tensors:
        return self.observe(torch.arange(self.num_envs))

    def observe(self, rows: Tensor) -> Tensors:
        heading, speed, steering, rate = self.moving[rows].unbind(1)
        place = self.place[rows]
        way = self.track.goal(self.goal[rows]) - place
        cos, sin = heading.cos(), heading.sin()
        ahead = way[:, 0] * cos + way[:, 1] * sin
        left = way[:, 1] * cos - way[:, 0] * sin
        own = torch.stack([speed, rate, steering, ahead, left], 1)
        walls = self.track.sight(place, heading, self.rays, REACH)
        return {"state": torch.cat([own, self.last[rows], walls], 1)}

    def facts(self) -> Facts:
        """The facts for `embodied.envs.reset_free.wrapper`."""
        reached = (self.track.goal(self.goal) - self.place).norm(dim=1) < self.config.near
        lost = torch.zeros_like(reached)
        return Facts(self.place.clone(), reached & ~self.crashed, self.crashed.clone(), lost)

    def advance(self, rows: Tensor) -> None:
        """Select the next goals of `rows` [B] (bool)."""
        self.goal = torch.where(rows, (self.goal + 1) % self.track.goals, self.goal)

    def rehome(self, rows: Tensor) -> None:
        """No effect: a car has no home pose."""

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({}, {"generator": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A map: walls dark, the goal green, the car red."""
        half = 1.3 * self.track.size
        grid = pixel_grid(width, height, (-half, half), (-half, half))
        grid[..., 0] = grid[..., 0] * width / height
        picture = torch.full((height, width, 3), 70, dtype=torch.uint8)
        paint(picture, self.track.inside(grid), (225, 225, 220))
        place = self.place[row]
        nose = 0.25 * torch.stack([self.moving[row, 0].cos(), self.moving[row, 0].sin()])
        discs = [
            (self.track.goal(self.goal)[row], 0.3, (80, 170, 100)),
            (place, 0.22, (200, 60, 50)),
            (place + nose, 0.12, (120, 30, 25)),
        ]
        return paint_discs(picture, grid, discs)

    def describe(self, row: int = 0) -> str:
        x, y = self.place[row].tolist()
        speed = float(self.moving[row, 1])
        goal = int(self.goal[row])
        return f"The car is at ({x:.1f}, {y:.1f}) m, {speed:.1f} m/s, on its way to goal {goal}."
