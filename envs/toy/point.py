"""Point: a point and a goal that is not seen, for policies that learn within a lifetime.

The point robot of studies of meta-reinforcement learning (Rakelly et al., 2019): the reward of a
step is minus the distance to the goal after it. The goal is on a circle around the square in which
episodes start, so that the same return can be wanted in all tasks; its angle is the task vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero
from embodied.core.env import StateRoles, Step
from embodied.core.spec import DEMONSTRATOR, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv, paint_discs, pixel_grid
from embodied.envs.row_rng import RowRng

STRIDE = 0.1  # how far an action of 1 moves the point along an axis
SIDE = 1.5  # largest coordinate; the circle has radius 1
START = 0.5  # largest coordinate at the start of an episode
NEAR = 0.2  # distance from the goal of a success
NAMES = ("x", "y")


@dataclass(frozen=True)
class Config:
    """Settings of the point and of its oracle."""

    horizon: Count = 20  # steps of an episode
    play: bool = False  # show the oracle's action, for demonstrator=shown; not for training
    num_envs: Count = 16  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


@dataclass(frozen=True)
class Angle:
    """A task parameter: the direction of the goal."""

    name: str = "angle"
    low: float = 0.0
    high: float = 2 * math.pi
    unit: str = "rad"


class Point(BatchedEnv):
    """Observation: position; action: velocity. Success: a step that ends near the goal."""

    name = "point"
    kept: ClassVar = {
        **{name: name for name in ("task", "place", "age")},
        "stream": "streams.state",
    }

    def __init__(self, config: Config) -> None:
        self.num_envs = config.num_envs
        self.horizon = config.horizon
        self.parameters = (Angle(),)
        self.play = config.play
        velocity = Leaf((2,), low=-1.0, high=1.0, names=NAMES)
        shown = {DEMONSTRATOR: velocity} if config.play else {}
        self.spec = Spec(
            {"state": Leaf((2,), low=-SIDE, high=SIDE, names=NAMES), **shown},
            velocity,
            dt=0.1,
            task=Leaf((1,), low=0.0, high=1.0, names=("angle",)),
            text="go to the goal that is not seen",
        )
        self.streams = RowRng(config.seed, config.num_envs)
        self.task = torch.zeros(config.num_envs, 1)
        self.place = torch.zeros(config.num_envs, 2)
        self.age = torch.zeros(config.num_envs, dtype=torch.int64)

    @property
    def goal(self) -> Tensor:
        """The goals [B, 2]."""
        angle = 2 * math.pi * self.task[:, 0]
        return torch.stack([angle.cos(), angle.sin()], 1)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        lots = self.streams.uniform(3, rows).T
        self.task[rows] = lots[:, :1] if task is None else task[rows].float()
        self.place[rows] = START * (2 * lots[:, 1:] - 1)
        self.age[rows] = 0

    def observe(self, rows: Tensor) -> Tensors:
        towards = ((self.goal - self.place)[rows] / STRIDE).clamp(-1, 1)
        return {"state": self.place[rows], **({DEMONSTRATOR: towards} if self.play else {})}

    def step(self, action: Tensor) -> Step:
        self.place = (self.place + STRIDE * action.clamp(-1, 1)).clamp(-SIDE, SIDE)
        self.age = self.age + 1
        distance = (self.place - self.goal).norm(dim=1)
        late = self.age >= self.horizon
        following = self.observe(torch.arange(self.num_envs))
        log = {"success": distance < NEAR}
        return self.finish(following, -distance, torch.zeros_like(late), late, log)

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A map: the goal green, the point red."""
        grid = pixel_grid(width, height, (-SIDE, SIDE), (-SIDE, SIDE))
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        goal = (self.goal[row], NEAR, (80, 170, 100))
        return paint_discs(picture, grid, [goal, (self.place[row], 0.04, (200, 60, 50))])

    def describe(self, row: int = 0) -> str:
        x, y = self.place[row].tolist()
        goal = ", ".join(f"{value:.2f}" for value in self.goal[row].tolist())
        return f"at ({x:.2f}, {y:.2f}), goal ({goal}), step {int(self.age[row])}"
