"""Chain: a row of cells with a goal at one end and a bait at the other, nearer one.

The smallest environment in which the first reward that is found is not the best one: the bait pays
less and ends the episode, the goal is far. All of its probabilities are known (`HasFiniteModel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero, Fraction
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles, Step
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.row_rng import RowRng

LEFT, RIGHT = 0, 1
FLOOR, BAIT, GOAL, AGENT = (235, 235, 240), (230, 140, 40), (80, 170, 100), (200, 60, 50)


@dataclass(frozen=True)
class Config:
    """Settings of the chain."""

    cells: Annotated[int, Bound(3, 255)] = 20  # the first is the bait, the last the goal
    start: Count = 3  # cells from the bait to where episodes start
    bait: Fraction = 0.1  # reward of the bait; the goal's is 1
    slip: Fraction = 0.1  # probability of a step to the other side
    horizon: Count = 40  # steps of an episode
    num_envs: Count = 16  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


class Chain(BatchedEnv):
    """Observation: `cell` [1], a symbol. Actions: left, right. Both ends end the episode; success:
    the goal."""

    name = "chain"
    kept: ClassVar = {"cell": "cell", "age": "age", "stream": "streams.state"}

    def __init__(self, config: Config) -> None:
        if config.start > config.cells - 2:
            raise ConfigError(f"chain: start={config.start} should be below cells - 1")
        self.config = config
        self.num_envs = config.num_envs
        obs = {"cell": Leaf((1,), "uint8", low=0, high=config.cells - 1, unit=SYMBOL)}
        act = Leaf((), "int64", low=LEFT, high=RIGHT)
        self.spec = Spec(obs, act, 0.1, None, "go to the far end")
        self.streams = RowRng(config.seed, config.num_envs)
        self.cell = torch.full((config.num_envs,), config.start)
        self.age = torch.zeros(config.num_envs, dtype=torch.int64)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        self.cell[rows] = self.config.start
        self.age[rows] = 0

    def observe(self, rows: Tensor) -> Tensors:
        return {"cell": self.cell[rows, None].to(torch.uint8)}

    def step(self, action: Tensor) -> Step:
        slipped = self.streams.uniform(1)[0] <= self.config.slip
        right = (action == RIGHT) ^ slipped
        self.cell = self.cell + 2 * right.long() - 1
        self.age = self.age + 1
        won = self.cell == self.config.cells - 1
        baited = self.cell == 0
        over = won | baited
        reward = won.float() + self.config.bait * baited.float()
        following = self.observe(torch.arange(self.num_envs))
        late = (self.age >= self.config.horizon) & ~over
        return self.finish(following, reward, over, late, {"success": won})

    def finite_model(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of the next cell [S, A, S] (none where the episode ends), mean rewards
        [S, A] and probabilities of the first cell [S]; the time limit is not in them."""
        cells = self.config.cells
        dynamics = torch.zeros(cells, 2, cells, dtype=torch.float64)
        inner = torch.arange(1, cells - 1)
        for action, side in ((LEFT, -1), (RIGHT, 1)):
            dynamics[inner, action, inner + side] += 1 - self.config.slip
            dynamics[inner, action, inner - side] += self.config.slip
        reward = dynamics[..., -1] + self.config.bait * dynamics[..., 0]
        dynamics[..., [0, -1]] = 0.0
        start = torch.zeros(cells, dtype=torch.float64)
        start[self.config.start] = 1.0
        return dynamics, reward, start

    def state_numbers(self, obs: Tensors) -> Tensor:
        """The states [n] (int64) of observations [n, ...]."""
        return obs["cell"][:, 0].long()

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """The row of cells: bait orange, goal green, agent red."""
        colours = torch.tensor([BAIT, *[FLOOR] * (self.config.cells - 2), GOAL])
        colours[self.cell[row]] = torch.tensor(AGENT)
        column = torch.arange(width) * self.config.cells // width
        return colours[column].to(torch.uint8).expand(height, width, 3).clone()

    def describe(self, row: int = 0) -> str:
        far = self.config.cells - 1 - int(self.cell[row])
        return f"The agent is {int(self.cell[row])} cells from the bait and {far} from the goal."
