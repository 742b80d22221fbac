"""BatchLevels: maze levels as tensors, on any device: decode, draw and check many at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embodied.envs.row_rng import RowRng

if TYPE_CHECKING:
    from embodied.envs.maze.levels import MazeLevels

HASH = 20_612  # seed of the numbers that levels are compared by
FEW = 64  # levels; below, integers are faster than tensors
AT_ONCE = 4  # steps of the flood between two looks at whether it has ended


@dataclass(frozen=True)
class Plans:
    """n levels: `walls` [n, S * S] (bool), `start` and `goal` (cells) and `facing` [n] (int64)."""

    walls: Tensor
    start: Tensor
    goal: Tensor
    facing: Tensor


class BatchLevels:
    """The task vectors of `levels` (float64 [n, S^2 + 3]) as tensors on `device`."""

    def __init__(self, levels: MazeLevels, device: torch.device) -> None:
        self.side = levels.side
        self.cells = levels.cells
        self.size = levels.size
        self.blocks = levels.blocks
        self.lots = levels.lots
        self.device = device
        self.shortest = levels.shortest
        marks = np.random.default_rng(HASH).integers(1 << 62, size=self.cells * 3 + 4)
        self._marks = torch.from_numpy(marks).to(device)
        self._secret = self.keys(self.decode(torch.from_numpy(levels.held_out).to(device)))

    def decode(self, task: Tensor) -> Plans:
        """As `MazeLevels.decode`; ValueError if a value is not in [0, 1]."""
        if not bool(((task >= 0) & (task <= 1)).all()):
            raise ValueError("maze levels must be in [0, 1]")
        walls = task[:, : self.cells] >= 0.5
        # A little more than the number: float32 may be just below a cell's own bound.
        cells = (task[:, self.cells : self.cells + 2] * self.cells + 1e-3).long()
        start, goal = cells.clamp(max=self.cells - 1).unbind(1)
        goal = torch.where(goal == start, (goal + 1) % self.cells, goal)
        walls.scatter_(1, torch.stack([start, goal], 1), False)
        return Plans(walls, start, goal, (task[:, -1] * 4 + 1e-3).long().clamp(max=3))

    def encode(self, plans: Plans) -> Tensor:
        """[n, S^2 + 3]; the inverse of `decode`."""
        cells = torch.stack([plans.start, plans.goal], 1).double()
        marks = [(cells + 0.5) / self.cells, (plans.facing[:, None].double() + 0.5) / 4]
        return torch.cat([plans.walls.double(), *marks], 1)

    def draw(self, streams: RowRng, rows: Tensor) -> Tensor:
        """Solvable levels [n, S^2 + 3] that are not held out, from the generators of `rows` [n]."""
        task = torch.zeros(len(rows), self.size, dtype=torch.float64, device=self.device)
        wanted = torch.arange(len(rows), device=self.device)
        while len(wanted):
            plans = self.drawn(streams.uniform(self.lots, rows[wanted]).T.double())
            task[wanted] = self.encode(plans)
            wanted = wanted[~self.fit(plans)]
        return task

    def drawn(self, lots: Tensor) -> Plans:
        """Levels from uniform numbers [n, `lots`], possibly unsolvable: the number of walls is
        uniform up to `blocks`, then their positions are."""
        count = (lots[:, 0] * (self.blocks + 1)).long().clamp(max=self.blocks)
        order = lots[:, 1:-1].argsort(1)
        ranks = torch.arange(self.cells, device=self.device)
        walls = torch.zeros_like(order, dtype=torch.bool)
        walls.scatter_(1, order, ranks < count[:, None])
        facing = (lots[:, -1] * 4).long().clamp(max=3)
        return Plans(walls, order[:, -2], order[:, -1], facing)

    def fit(self, plans: Plans) -> Tensor:
        """[n] (bool): whether a level may be used in training: solvable, not too easily, and not
        held out."""
        return self.solvable(plans, self.shortest) & ~(
            self.keys(plans)[:, None] == self._secret
        ).any(1)

    def keys(self, plans: Plans) -> Tensor:
        """[n] (int64): sums of random numbers, one for each wall, start, goal and heading."""
        walls, start, goal, facing = self._marks.split([self.cells] * 3 + [4])
        sums = torch.where(plans.walls, walls, 0).sum(1)
        return sums + start[plans.start] + goal[plans.goal] + facing[plans.facing]

    def solvable(self, plans: Plans, shortest: int = 0) -> Tensor:
        """[n] (bool): whether there is a way from start to goal, and none of less than `shortest`
        cells."""
        if self.device.type == "cpu" and len(plans.start) <= FEW:
            return self._solvable_few(plans, shortest)
        return self._solvable_many(plans, shortest)

    def _solvable_few(self, plans: Plans, shortest: int = 0) -> Tensor:
        """The same by the bits of one integer a level: some rows end in a step, and a tensor
        operation on few levels takes as long as one on a thousand."""
        width = self.side + 1
        n = len(plans.start)
        free = torch.zeros(n, self.side, width, dtype=torch.uint8)
        free[:, :, : self.side] = ~plans.walls.view(n, self.side, self.side)
        ends = torch.stack([plans.start, plans.goal])
        starts, goals = (ends // self.side * width + ends % self.side).tolist()
        lines = np.packbits(free.view(n, -1).numpy(), axis=1, bitorder="little")
        boards = [int.from_bytes(line.tobytes(), "little") for line in lines]
        levels = zip(boards, starts, goals, strict=True)
        return torch.tensor(
            [_joined(board, 1 << at, 1 << to, width, shortest) for board, at, to in levels]
        )

    def _solvable_many(self, plans: Plans, shortest: int = 0) -> Tensor:
        """A flood from the start in all levels at once."""
        n = len(plans.start)
        side = self.side
        free = ~plans.walls.view(n, side, side)
        wet = torch.zeros(n, self.cells, dtype=torch.bool, device=self.device)
        wet.scatter_(1, plans.start[:, None], True)
        reached = wet.view(n, side, side)
        goal = plans.goal[:, None]
        for _ in range(shortest - 1):
            reached = _spread(reached) & free
        near = reached.view(n, -1).gather(1, goal)[:, 0]
        while True:
            before = reached
            for _ in range(AT_ONCE):
                reached = _spread(reached) & free
            at_goal = reached.view(n, -1).gather(1, goal)[:, 0]
            if bool(at_goal.all()) or torch.equal(before, reached):
                return at_goal & ~near


def _joined(free: int, wet: int, goal: int, width: int, shortest: int) -> bool:
    """Whether bit `goal` is reached from `wet` over the bits of `free`, in rows of `width`, of
    which the last bit is never free, in `shortest` steps or more."""
    steps = 0
    while not wet & goal:
        wave = (wet | wet << 1 | wet >> 1 | wet << width | wet >> width) & free
        if wave == wet:
            return False
        wet = wave
        steps = steps + 1
    return steps >= shortest


def _spread(wet: Tensor) -> Tensor:
    """The cells of `wet` [n, S, S] and their neighbours."""
    wave = wet.clone()
    wave[:, 1:] |= wet[:, :-1]
    wave[:, :-1] |= wet[:, 1:]
    wave[:, :, 1:] |= wet[:, :, :-1]
    wave[:, :, :-1] |= wet[:, :, 1:]
    return wave
