"""Craft: gather and make things until there is a sword, in facts and amounts.

A small crafting task for symbolic models and planners (in the manner of the tasks of RAMP): two
places to gather, a table to build, and recipes with amounts. The observation `action_mask` says
what is allowed now; anything else changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero
from embodied.core.env import StateRoles, Step
from embodied.core.spec import MASK, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.row_rng import RowRng

FACTS = ("at_tree", "at_rock", "at_table", "table")
AMOUNTS = ("wood", "plank", "stick", "stone", "sword")
ACTIONS = ("to_tree", "to_rock", "to_table", "chop", "mine", "plank", "stick", "table", "sword")
TREE, ROCK, BENCH, TABLE = range(len(FACTS))
WOOD, PLANK, STICK, STONE, SWORD = range(len(AMOUNTS))
# By the number of an action: the place where it is done (None: anywhere), and what it changes.
RECIPES: tuple[tuple[int | None, dict[int, int]], ...] = (
    *((None, {}),) * 3,
    (TREE, {WOOD: 1}),
    (ROCK, {STONE: 1}),
    (None, {WOOD: -1, PLANK: 2}),
    (None, {PLANK: -2, STICK: 2}),
    (None, {PLANK: -4}),
    (BENCH, {STICK: -1, STONE: -2, SWORD: 1}),
)
COLOURS = ((140, 100, 60), (210, 170, 110), (230, 200, 150), (130, 130, 140), (80, 170, 100))
FLOOR = (235, 235, 240)


@dataclass(frozen=True)
class Config:
    """Settings of the crafting task."""

    most: Annotated[int, Bound(4)] = 6  # of each thing that can be carried
    start: Literal["bare", "any"] = "any"  # bare: nowhere, with nothing; any: some wood, stone
    shaped: bool = True  # 0.02 to 0.1 for the first of each thing, beside 1 for the sword
    horizon: Count = 60  # steps of an episode
    num_envs: Count = 16  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


class Craft(BatchedEnv):
    """Observations: `facts` (0 or 1), `amounts`, and `action_mask`. Actions: ACTIONS. A sword
    ends the episode, with success."""

    name = "craft"
    kept: ClassVar = {
        **{key: key for key in ("facts", "amounts", "had", "age")},
        "stream": "streams.state",
    }

    def __init__(self, config: Config) -> None:
        self.config = config
        n = self.num_envs = config.num_envs
        obs = {
            "facts": Leaf((len(FACTS),), low=0.0, high=1.0, names=FACTS),
            "amounts": Leaf((len(AMOUNTS),), low=0.0, high=float(config.most), names=AMOUNTS),
            MASK: Leaf((len(ACTIONS),), low=0.0, high=1.0, names=ACTIONS),
        }
        act = Leaf((), "int64", low=0, high=len(ACTIONS) - 1)
        self.spec = Spec(obs, act, 0.1, None, "make a sword")
        self.streams = RowRng(config.seed, n)
        self.facts = torch.zeros(n, len(FACTS), dtype=torch.bool)
        self.amounts = torch.zeros(n, len(AMOUNTS))
        self.had = torch.zeros(n, len(AMOUNTS), dtype=torch.bool)
        self.age = torch.zeros(n, dtype=torch.int64)
        self.every = torch.arange(n)
        self.change = torch.zeros(len(ACTIONS), len(AMOUNTS))
        for number, (_, parts) in enumerate(RECIPES):
            for thing, count in parts.items():
                self.change[number, thing] = count

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        self.facts[rows] = False
        self.amounts[rows] = 0.0
        if self.config.start == "any":
            place, wood, stone = (3 * self.streams.uniform(3, rows)).long().clamp(max=2)
            self.facts[rows, TREE] = place == 1
            self.facts[rows, ROCK] = place == 2
            self.amounts[rows, WOOD] = wood.float()
            self.amounts[rows, STONE] = stone.float()
        self.had[rows] = self.amounts[rows] > 0
        self.age[rows] = 0

    def observe(self, rows: Tensor) -> Tensors:
        facts, amounts = self.facts[rows], self.amounts[rows]
        mask = self.allowed(facts, amounts).float()
        return {"facts": facts.float(), "amounts": amounts.clone(), MASK: mask}

    def allowed(self, facts: Tensor, amounts: Tensor) -> Tensor:
        """Which actions are allowed, [n, A] (bool), of facts [n, F] and amounts [n, K]."""
        after = amounts[:, None] + self.change
        fits = ((after >= 0) & (after <= self.config.most)).all(2)
        for number, (place, _) in enumerate(RECIPES):
            if place is not None:
                fits[:, number] &= facts[:, place]
        fits[:, BENCH] &= facts[:, TABLE]  # the way to the table
        fits[:, ACTIONS.index("table")] &= ~facts[:, TABLE]
        return fits

    def step(self, action: Tensor) -> Step:
        done = self.allowed(self.facts, self.amounts)[self.every, action]
        self.amounts = self.amounts + self.change[action] * done[:, None]
        facts = self.facts.clone()
        moves = done & (action <= BENCH)
        facts[moves, :TABLE] = False
        facts[self.every[moves], action[moves]] = True
        facts[:, TABLE] |= done & (action == ACTIONS.index("table"))
        self.facts = facts
        self.age = self.age + 1
        won = self.amounts[:, SWORD] > 0
        new = (self.amounts > 0) & ~self.had
        self.had = self.had | new
        worth = torch.linspace(0.02, 0.1, len(AMOUNTS)) * float(self.config.shaped)
        reward = (new * worth).sum(1) + won.float()
        late = (self.age >= self.config.horizon) & ~won
        return self.finish(self.observe(self.every), reward, won, late, {"success": won})

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """A bar for the amount of each thing."""
        picture = torch.tensor(FLOOR, dtype=torch.uint8).expand(height, width, 3).clone()
        wide = width // len(AMOUNTS)
        for thing, colour in enumerate(COLOURS):
            tall = int(height * float(self.amounts[row, thing]) / self.config.most)
            left = slice(thing * wide + 4, (thing + 1) * wide - 4)
            picture[height - tall :, left] = torch.tensor(colour, dtype=torch.uint8)
        return picture

    def describe(self, row: int = 0) -> str:
        true = [name for name, fact in zip(FACTS, self.facts[row], strict=True) if fact]
        carried = zip(AMOUNTS, self.amounts[row].tolist(), strict=True)
        return ", ".join([*true, *(f"{name} {count:g}" for name, count in carried)])
