"""Maze: partially observed maze navigation with levels as task vectors, as batched tensors.

The environment of the studies of unsupervised environment design (Dennis et al., 2020): walls
anywhere, three actions (turn left, turn right, go forward), and on reaching the goal after t steps
the reward 1 - 0.9 t / horizon. The level is the task vector (`embodied.envs.maze.levels`);
`BatchLevels` decodes, draws and checks many at once, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero
from embodied.core.build import ConfigError
from embodied.core.env import StateRoles, Step
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.maze.levels import MazeLevels, drawing, words
from embodied.envs.row_rng import RowRng

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


EMPTY, WALL, GOAL = 0, 1, 2
LEFT, RIGHT, GO = 0, 1, 2
TURNS = (-1, 1, 0)
WAYS = ((0, 1), (1, 0), (0, -1), (-1, 0))  # right, down, left, up: (row, column)
DT = 0.1  # seconds; sets the speed of videos


@dataclass(frozen=True)
class Config:
    """Settings of the mazes.

    `held_out`, the evaluation mazes: those of every side (`mixed`), the published ones of 13 x 13
    (`zero_shot`), or random ones with `blocks` walls, those of 4,000 with the longest shortest
    paths (`long`).
    """

    side: Annotated[int, Bound(5)] = 9  # cells per side
    blocks: CountOrZero = 28  # most walls in a sampled level
    view: Annotated[int, Bound(3)] = 5  # cells in view per side, ahead and across (odd)
    observe: Literal["view", "cell"] = "view"  # what is in view, or where the agent is (at most 16)
    horizon: Count = 100  # steps of an episode
    held_out: Literal["mixed", "zero_shot", "long"] = "mixed"  # evaluation mazes
    shortest: CountOrZero = 0  # smallest shortest path of a sampled level, in cells
    num_envs: Count = 32  # parallel environments
    seed: CountOrZero = 0  # of the random numbers
    device: str = "cpu"  # torch device of the simulation: auto, cpu, cuda:0


class Maze(BatchedEnv):
    """Observation: `view` [V, V] symbols (empty, wall, goal) with the agent in the middle of the
    lowest row, facing up (walls do not occlude), and `facing` [1]; with `observe=cell` the number
    of its `cell` [1] in place of the view. Reaching the goal ends the episode with success.
    `held_out` [N, D] are the task vectors of evaluation mazes.
    """

    name = "maze"

    def __init__(self, config: Config) -> None:
        if config.view % 2 == 0:
            raise ValueError(f"maze: view={config.view} must be odd")
        if config.observe == "cell" and config.side > 16:
            raise ConfigError("env.observe=cell: env.side is at most 16")
        self.config = config
        self.num_envs = config.num_envs
        self.device = torch.device(config.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"env.device={config.device}: no GPU was found; env.device=cpu")
        self.levels = MazeLevels(config.side, config.blocks, config.held_out, config.shortest)
        self.batch = BatchLevels(self.levels, self.device)
        self.held_out = torch.from_numpy(self.levels.held_out).float()
        self.held_out_names = self.levels.held_out_names
        view = self.config.view
        levels = self.levels
        look = Leaf((view, view), "uint8", low=0, high=GOAL, unit=SYMBOL)
        cell = Leaf((1,), "uint8", low=0, high=config.side**2 - 1, unit=SYMBOL)
        obs = {
            **({"view": look} if config.observe == "view" else {"cell": cell}),
            "facing": Leaf((1,), "uint8", low=0, high=3, unit=SYMBOL),
        }
        task = Leaf((levels.size,), low=0.0, high=1.0, unit="level", names=levels.names)
        text = "find the goal of the maze"
        self.spec = Spec(obs, Leaf((), "int64", low=0, high=GO), DT, task, text)
        n = config.num_envs
        device = self.device
        self.every = torch.arange(n, device=device)
        self.streams = RowRng(config.seed, n, device)
        self.task = torch.zeros(n, self.levels.size, dtype=torch.float64, device=device)
        self.pad = config.view - 1
        self.width = config.side + 2 * self.pad
        self.cells = torch.full((n, self.width**2), WALL, dtype=torch.uint8, device=device)
        self.strides = torch.tensor([y * self.width + x for y, x in WAYS], device=device)
        self.turns = torch.tensor(TURNS, device=device)
        # [4, V * V]: how far each cell of the view is from the agent's, by facing.
        ahead = torch.arange(config.view - 1, -1, -1, device=self.device)[:, None]
        aside = (torch.arange(config.view, device=self.device) - config.view // 2)[None]
        right = self.strides.roll(-1)
        self.looks = (ahead * self.strides[:, None, None] + aside * right[:, None, None]).flatten(1)
        numbers = torch.zeros(4, n, dtype=torch.int64, device=device)
        self.place, self.goal, self.facing, self.age = numbers
        self.given = False

    def expect_given_tasks(self) -> None:
        """Expect that `reset(task=...)` follows each end of an episode: `step` draws no levels."""
        self.given = True

    def step(self, action: Tensor) -> Step:
        act = action.detach().to(self.device)
        if act.shape != (self.num_envs,) or act.dtype != torch.int64:
            raise ValueError(f"maze: actions must be [{self.num_envs}] integers from 0 to 2")
        self.facing = (self.facing + self.turns[act.clamp(LEFT, GO)]) & 3
        ahead = self.place + self.strides[self.facing]
        free = self.cells.gather(1, ahead[:, None])[:, 0] != WALL
        self.place = torch.where((act == GO) & free, ahead, self.place)
        self.age = self.age + 1
        won = self.place == self.goal
        late = (self.age >= self.config.horizon) & ~won
        reward = (won * (1 - 0.9 * self.age.double() / self.config.horizon)).float()
        ended = won | late
        # One look from the host for both, which a GPU would have to wait for.
        wrong = ((act < LEFT) | (act > GO)).any()
        any_wrong, any_ended = torch.stack([wrong, ended.any()]).tolist()
        if any_wrong:
            raise ValueError(f"maze: actions must be [{self.num_envs}] integers from 0 to 2")
        obs = following = self.observe(self.every)
        if any_ended:
            self._notify_before_reset(ended)
            if not self.given:
                rows = ended.nonzero().flatten()
                self.begin(rows)
                obs = self.begun(obs, rows)
        self.obs = obs
        return Step(obs, following, reward, won, late, {"success": won})

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        levels = self.batch.draw(self.streams, rows) if task is None else task.to(self.task)[rows]
        plans = self.batch.decode(levels)
        side = self.config.side
        inside = slice(self.pad, self.pad + self.config.side)
        grid = self.cells.view(-1, self.width, self.width)
        grid[rows, inside, inside] = plans.walls.view(-1, side, side).to(torch.uint8) * WALL
        self.place[rows], self.goal[rows] = self._padded(plans.start), self._padded(plans.goal)
        self.cells[rows, self.goal[rows]] = GOAL
        self.facing[rows] = plans.facing
        self.age[rows] = 0
        self.task[rows] = levels

    def _padded(self, cell: Tensor) -> Tensor:
        row, column = cell // self.config.side, cell % self.config.side
        return (row + self.pad) * self.width + column + self.pad

    def observe(self, rows: Tensor) -> Tensors:
        view = self.config.view
        facing = self.facing[rows]
        turned = facing.to(torch.uint8)[:, None]
        if self.config.observe == "cell":
            place = self.place[rows]
            row = place // self.width - self.pad
            column = place % self.width - self.pad
            return {
                "cell": (row * self.config.side + column).to(torch.uint8)[:, None],
                "facing": turned,
            }
        seen = self.cells[rows].gather(1, self.place[rows][:, None] + self.looks[facing])
        return {"view": seen.view(-1, view, view), "facing": turned}

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"numbers": (2,)}, {"stream": None})

    def get_state(self) -> Tensors:
        numbers = torch.stack([self.place, self.facing, self.age], 1)
        return {"task": self.task.clone(), "numbers": numbers, "stream": self.streams.state.clone()}

    def set_state(self, state: Tensors) -> Tensors:
        self.begin(self.every, state["task"])
        self.place, self.facing, self.age = state["numbers"].to(self.device).T.clone()
        self.streams.state = state["stream"].to(self.device).clone()
        self.obs = self.observe(self.every)
        return self.obs

    def _cell(self, row: int) -> tuple[int, int]:
        y, x = divmod(int(self.place[row]), self.width)
        return y - self.pad, x - self.pad

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        plans = self.levels.decode(self.task[row : row + 1].cpu().numpy())
        facing = int(self.facing[row])
        picture = drawing(plans.walls[0], int(plans.goal[0]), self._cell(row), facing)
        return torch.from_numpy(fitted(picture, width, height))

    def describe(self, row: int = 0) -> str:
        plans = self.levels.decode(self.task[row : row + 1].cpu().numpy())
        return words(plans.walls[0], int(plans.goal[0]), self._cell(row), int(self.facing[row]))


def fitted(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """The picture [h, w, 3] as large as fits into uint8 [height, width, 3], on white."""
    scale = min(width / picture.shape[1], height / picture.shape[0])
    rows = np.arange(int(picture.shape[0] * scale)) / scale
    columns = np.arange(int(picture.shape[1] * scale)) / scale
    inside = picture[rows.astype(int)[:, None], columns.astype(int)]
    frame = np.full((height, width, 3), 255, np.uint8)
    top = (height - len(rows)) // 2
    left = (width - len(columns)) // 2
    frame[top : top + len(rows), left : left + len(columns)] = inside
    return frame
