"""TwoGap: a point passes a wall through either of two gaps.

The smallest environment with bimodal demonstrations: both gaps are correct, and the average of both
is the wall between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction
from embodied.core.env import StateRoles, Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv, Generators, paint, paint_discs, pixel_grid

STRIDE = 0.05  # how far an action of 1 moves the point, in units of the square's side
WALL = (0.45, 0.55)
GAPS = (0.25, 0.75)
HALF = 0.08
GOAL = (0.95, 0.5)
NEAR = 0.06


@dataclass(frozen=True)
class Config:
    """Settings of the wall with gaps; reaching the goal ends an episode, with reward 1."""

    num_envs: Count = 16  # parallel environments
    horizon: Count = 50  # steps of an episode
    gaps: tuple[Fraction, ...] = GAPS  # open gaps (one: half of the demonstrations are wrong)
    prefer: Fraction | None = None  # a height: rewards are minus the distance; null: success
    distractors: CountOrZero = 0  # discs that move about, in images and in `privileged/scene`
    seed: CountOrZero = 0  # of the random numbers


class TwoGap(BatchedEnv):
    """Observation: position in the unit square; action: velocity. The wall stops the point."""

    name = "two_gap"
    kept: ClassVar = {
        "place": "place",
        "age": "age",
        "discs": "discs",
        "generator": "streams.state",
    }

    def __init__(self, config: Config) -> None:
        self.num_envs = config.num_envs
        self.horizon = config.horizon
        self.gaps = config.gaps
        self.prefer = config.prefer
        names = ("x", "y")
        obs = {"state": Leaf((2,), low=0.0, high=1.0, names=names)}
        if config.distractors:
            obs["privileged/scene"] = Leaf((2 + 2 * config.distractors,), low=0.0, high=1.0)
        self.spec = Spec(
            obs,
            Leaf((2,), low=-1.0, high=1.0, names=names),
            dt=0.1,
            text="pass the wall through either gap and go to the goal",
        )
        self.streams = Generators(config.seed, self.num_envs)
        self.place = torch.zeros(self.num_envs, 2)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)
        self.discs = torch.zeros(self.num_envs, config.distractors, 7)  # place, heading, colour

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        for row in rows.tolist():
            x, y = self.streams.uniform(2, row)
            self.place[row] = torch.stack([0.03 + 0.1 * x, 0.4 + 0.2 * y])
            if self.discs.shape[1]:
                self.discs[row] = self.streams.uniform(self.discs[row].numel(), row).view(-1, 7)
        self.age[rows] = 0

    def observe(self, rows: Tensor) -> Tensors:
        obs = {"state": self.place[rows]}
        if self.discs.shape[1]:  # the places of the point and of the discs
            obs["privileged/scene"] = torch.cat(
                [obs["state"], self.discs[rows, :, :2].flatten(1)], 1
            )
        return obs

    def step(self, action: Tensor) -> Step:
        self.place = moved(self.place, STRIDE * action.clamp(-1, 1), self.gaps)
        self.age = self.age + 1
        heading = self.discs[:, :, 2:4] - 0.5
        self.discs[:, :, :2] = (self.discs[:, :, :2] + STRIDE * heading) % 1
        following = self.observe(torch.arange(self.num_envs))
        won = (self.place - torch.tensor(GOAL)).norm(dim=1) < NEAR
        late = (self.age >= self.horizon) & ~won
        reward = won.float()
        if self.prefer is not None:
            reward = -(self.place[:, 1] - self.prefer).abs()
        return self.finish(following, reward, won, late, {"success": won})

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"generator": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A map: wall dark, goal green, the point red, behind it the distractors."""
        grid = pixel_grid(width, height, (0, 1), (0, 1))
        picture = torch.full((height, width, 3), 235, dtype=torch.uint8)
        paint(picture, inside(grid, self.gaps), (70, 75, 85))
        goal = (torch.tensor(GOAL), NEAR, (80, 170, 100))
        point = (self.place[row], 0.02, (200, 60, 50))
        others = [
            (disc[:2], 0.05, (int(255 * disc[4]), int(255 * disc[5]), int(255 * disc[6])))
            for disc in self.discs[row]
        ]
        return paint_discs(picture, grid, [goal, *others, point])

    def describe(self, row: int = 0) -> str:
        x, y = self.place[row].tolist()
        side = "before" if x < WALL[0] else "behind" if x > WALL[1] else "in"
        return f"The point is at ({x:.2f}, {y:.2f}), {side} the wall; the goal is at {GOAL}."


def inside(place: Tensor, gaps: tuple[float, ...] = GAPS) -> Tensor:
    """Whether places [..., 2] are in the wall that has `gaps`."""
    x, y = place[..., 0], place[..., 1]
    open_ = torch.stack([(y - gap).abs() < HALF for gap in gaps]).any(0)
    return (x > WALL[0]) & (x < WALL[1]) & ~open_


def moved(place: Tensor, stride: Tensor, gaps: tuple[float, ...] = GAPS) -> Tensor:
    """Move along x, then along y, each only where it does not lead into the wall [n, 2]."""
    for axis in (0, 1):
        step = torch.zeros_like(stride)
        step[:, axis] = stride[:, axis]
        there = (place + step).clamp(0, 1)
        place = torch.where(inside(there, gaps)[:, None], place, there)
    return place
