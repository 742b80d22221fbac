"""Darkroom: a square room with a goal that is not seen, for policies that learn within a lifetime.

The environment of studies of in-context reinforcement learning (Laskin et al., 2022; Lee et al.,
2023): the agent knows where it is, and the reward is 1 in each step that it ends on the goal, 0
elsewhere. The goal is the task vector. Some goals are held out for evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero
from embodied.core.env import StateRoles, Step
from embodied.core.spec import BEST_ACTION, SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.maze.env import WAYS, fitted
from embodied.envs.row_rng import RowRng

RIGHT, DOWN, LEFT, UP = range(len(WAYS))
STAY = len(WAYS)
HELD_OUT = 0.2  # share of the goals
HELD_OUT_SEED = 20_230
FLOOR, GOAL, AGENT = (235, 235, 240), (80, 170, 100), (200, 60, 50)


@dataclass(frozen=True)
class Config:
    """Settings of the room."""

    side: Annotated[int, Bound(3)] = 6  # cells per side
    horizon: Count = 40  # steps of an episode
    start: Literal["corner", "any"] = "corner"  # where episodes start
    num_envs: Count = 64  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


class Goals:
    """Goals as levels [n, 1] in [0, 1]: cell c of S^2 is from c / S^2 to (c + 1) / S^2."""

    size = 1
    names = ("goal",)

    def __init__(self, side: int) -> None:
        self.side = side
        self.cells = side**2
        order = np.random.default_rng(HELD_OUT_SEED).permutation(np.arange(1, self.cells))
        count = max(round(HELD_OUT * self.cells), 1)
        self.training = np.sort(order[count:])
        self.held_out = self.encode(np.sort(order[:count]))

    def encode(self, cells: NDArray[np.int64]) -> NDArray[np.float64]:
        """The middles [n, 1] of `cells` [n]."""
        return (cells[:, None] + 0.5) / self.cells

    def decode(self, levels: NDArray[np.float64]) -> NDArray[np.int64]:
        """Cells [n] of levels [n, 1]."""
        return np.minimum((levels[:, 0] * self.cells).astype(np.int64), self.cells - 1)

    def random(self, n: int, random: np.random.Generator) -> NDArray[np.float64]:
        """n goals that are not held out."""
        return self.encode(random.choice(self.training, n))

    plain = random

    def mutate(
        self, levels: NDArray[np.float64], edits: int, random: np.random.Generator
    ) -> NDArray[np.float64]:
        """Goals that are up to `edits` places away in the list of all that may be drawn."""
        place = np.searchsorted(self.training, self.decode(levels))
        moved = place + random.integers(-edits, edits + 1, len(levels))
        return self.encode(self.training[moved.clip(0, len(self.training) - 1)])

    def solvable(self, levels: NDArray[np.float64]) -> NDArray[np.bool_]:
        """[n]: all goals can be reached."""
        return np.ones(len(levels), bool)

    def picture(self, level: NDArray[np.float64]) -> NDArray[np.uint8]:
        """The room with its goal, uint8 [S, S, 3]."""
        room = np.full((self.cells, 3), FLOOR, np.uint8)
        room[self.decode(level[None])] = GOAL
        return room.reshape(self.side, self.side, 3)

    def traits(self, levels: NDArray[np.float64]) -> dict[str, float]:
        """The mean distance of the goal from the corner, in steps."""
        row, column = np.divmod(self.decode(levels), self.side)
        return {"distance": float((row + column).mean())}


class Darkroom(BatchedEnv):
    """Observation: `place` [2] (row and column, symbols) and `privileged/best_action` [1], the
    first step of a shortest way to the goal. Actions: right, down, left, up, stay. An episode lasts
    `horizon` steps; success: a step on the goal.
    """

    name = "darkroom"
    kept: ClassVar = {
        **{name: name for name in ("task", "place", "goal", "age")},
        "stream": "streams.state",
    }

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        self.levels = Goals(config.side)
        self.held_out = torch.from_numpy(self.levels.held_out).float()
        cell = Leaf((2,), "uint8", low=0, high=config.side - 1, unit=SYMBOL)
        task = Leaf((1,), low=0.0, high=1.0, unit="level", names=Goals.names)
        text = "find the goal that is not seen, and stay there"
        act = Leaf((), "int64", low=0, high=STAY)
        best = Leaf((1,), "int64", low=0, high=STAY, unit=SYMBOL)
        self.spec = Spec({"place": cell, BEST_ACTION: best}, act, 0.1, task, text)
        self.streams = RowRng(config.seed, config.num_envs)
        self.ways = torch.tensor([*WAYS, (0, 0)])
        self.task = torch.zeros(config.num_envs, 1)
        self.place = torch.zeros(config.num_envs, 2, dtype=torch.int64)
        self.goal = torch.zeros_like(self.place)
        self.age = torch.zeros(config.num_envs, dtype=torch.int64)

    def step(self, action: Tensor) -> Step:
        if action.shape != (self.num_envs,) or not bool(((action >= 0) & (action <= STAY)).all()):
            raise ValueError(f"darkroom: actions must be [{self.num_envs}] integers from 0 to 4")
        self.place = (self.place + self.ways[action]).clamp(0, self.config.side - 1)
        self.age = self.age + 1
        won = (self.place == self.goal).all(1)
        late = self.age >= self.config.horizon
        following = self.observe(torch.arange(self.num_envs))
        return self.finish(following, won.float(), torch.zeros_like(late), late, {"success": won})

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        lots = self.streams.uniform(2, rows)
        if task is None:
            training = self.levels.training
            drawn = (lots[0] * len(training)).long().clamp(max=len(training) - 1)
            task = torch.from_numpy(self.levels.encode(training[drawn.numpy()])).float()
        else:
            task = task[rows].float()
        self.task[rows] = task
        cells = torch.from_numpy(self.levels.decode(task.double().numpy()))
        self.goal[rows] = self._places(cells)
        last = self.levels.cells - 1
        start = (lots[1] * self.levels.cells).long().clamp(max=last)
        start = start if self.config.start == "any" else torch.zeros_like(start)
        self.place[rows] = self._places(start)
        self.age[rows] = 0

    def _places(self, cells: Tensor) -> Tensor:
        """Rows and columns [n, 2] of `cells` [n]."""
        return torch.stack([cells // self.config.side, cells % self.config.side], 1)

    def observe(self, rows: Tensor) -> Tensors:
        row, column = (self.goal[rows] - self.place[rows]).unbind(1)
        along = torch.where(row > 0, DOWN, torch.where(row < 0, UP, STAY))
        best = torch.where(column > 0, RIGHT, torch.where(column < 0, LEFT, along))
        return {"place": self.place[rows].byte(), BEST_ACTION: best[:, None]}

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """The room from above: the goal green, the agent red."""
        picture = self.levels.picture(self.task[row].double().numpy())
        picture[tuple(self.place[row].tolist())] = AGENT
        return torch.from_numpy(fitted(picture, width, height))

    def describe(self, row: int = 0) -> str:
        place, goal = self.place[row].tolist(), self.goal[row].tolist()
        return f"at {place}, goal {goal}, step {int(self.age[row])}"
