"""Maze: partially observed maze navigation with levels as task vectors, batched.

The environment of the studies of unsupervised environment design (Dennis et al., 2020): walls
anywhere, three actions (turn left, turn right, go forward). The reward on reaching the goal after t
steps is

    r = 1 - 0.9 t / horizon.

The level is the task vector (`envs.maze.levels`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from envs.maze.levels import Floats, MazeLevels
from envs.maze.render import drawing, words
from envs.row_rng import RowRng

EMPTY, WALL, GOAL = 0, 1, 2
LEFT, RIGHT, GO = 0, 1, 2
WAYS = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # right, down, left, up: (row, column)
DT = 0.1  # seconds; sets the speed of videos


@dataclass(frozen=True)
class Config:
    """`side`: cells per side; `blocks`: largest number of walls in a sampled level; `view`: cells
    in view per side, ahead and across (odd); `horizon` in steps.
    """

    side: int = 9
    blocks: int = 28
    view: int = 5
    horizon: int = 100
    num_envs: int = 32
    seed: int = 0


class Maze(VecEnv):
    """Observation: `view` [V, V] symbols (empty, wall, goal) with the agent in the middle of the
    lowest row, facing up (walls do not occlude), and `facing` [1]. Reaching the goal ends the
    episode with success. `held_out` [N, D] are the task vectors of evaluation mazes.
    """

    def __init__(self, config: Config) -> None:
        if config.view % 2 == 0 or config.view < 3 or config.horizon < 1:
            raise ValueError(
                f"maze: view={config.view} must be odd and at least 3, "
                f"horizon={config.horizon} at least 1"
            )
        self.config, self.num_envs = config, config.num_envs
        self.levels = MazeLevels(config.side, config.blocks)
        self.held_out = torch.from_numpy(self.levels.held_out).float()
        self.spec = self._spec()
        n = config.num_envs
        self.every = np.arange(n)
        self.streams = RowRng(config.seed, n)
        self.task = np.zeros((n, self.levels.size))
        self.pad = config.view - 1
        self.width = config.side + 2 * self.pad
        self.cells = np.full((n, self.width**2), WALL, np.uint8)
        self.strides = WAYS @ np.array([self.width, 1])
        self.looks = self._looks(config.view)
        self.place, self.goal, self.facing, self.age = np.zeros((4, n), np.int64)
        self.begun = False

    def _spec(self) -> Spec:
        view, levels = self.config.view, self.levels
        obs = {
            "view": Leaf((view, view), "uint8", low=0, high=GOAL, unit=SYMBOL),
            "facing": Leaf((1,), "uint8", low=0, high=3, unit=SYMBOL),
        }
        task = Leaf((levels.size,), low=0.0, high=1.0, unit="level", names=levels.names)
        text = "find the goal of the maze"
        return Spec(obs, Leaf((), "int64", low=0, high=GO), DT, task, text)

    def _looks(self, view: int) -> np.ndarray:
        """[4, V * V]: how far each cell of the view is from the agent's, by facing."""
        ahead, aside = np.indices((view, view))
        ahead, aside = view - 1 - ahead, aside - view // 2
        right = np.roll(self.strides, -1)
        return np.stack(
            [(ahead * go + aside * by).ravel() for go, by in zip(self.strides, right, strict=True)]
        )

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = self.every if mask is None else mask.cpu().numpy().astype(bool).nonzero()[0]
        if not self.begun and len(rows) < self.num_envs:
            raise ValueError("maze: the first reset must reset all envs (mask=None)")
        if seed is not None:
            self.streams.seed(seed, torch.from_numpy(rows))
        if task is not None and task.shape != self.task.shape:
            expected = self.task.shape
            raise ValueError(f"maze: task is {tuple(task.shape)}, expected {expected}")
        self.begun = True
        self._begin(rows, None if task is None else task.double().cpu().numpy()[rows])
        return self._observe()

    def step(self, action: Tensor) -> Step:
        act = action.detach().cpu().numpy()
        if act.shape != (self.num_envs,) or not ((act >= LEFT) & (act <= GO)).all():
            raise ValueError(f"maze: actions must be [{self.num_envs}] integers from 0 to 2")
        self.facing = (self.facing + (act == RIGHT) - (act == LEFT)) % 4
        ahead = self.place + self.strides[self.facing]
        free = self.cells[self.every, ahead] != WALL
        self.place = np.where((act == GO) & free, ahead, self.place)
        self.age += 1
        won = self.place == self.goal
        late = (self.age >= self.config.horizon) & ~won
        reward = (won * (1 - 0.9 * self.age / self.config.horizon)).astype(np.float32)
        obs = following = self._observe()
        if (won | late).any():
            self._notify_before_reset(torch.from_numpy(won | late))
            self._begin((won | late).nonzero()[0], None)
            obs = self._observe()
        arrived = torch.from_numpy(won)
        log = {"success": arrived}
        return Step(obs, following, torch.from_numpy(reward), arrived, torch.from_numpy(late), log)

    def _begin(self, rows: np.ndarray, task: Floats | None) -> None:
        """New episodes in `rows` [n], of levels `task` [n, D] or random ones."""
        task = self._drawn(rows) if task is None else task
        plans = self.levels.decode(task)
        side, inside = self.config.side, slice(self.pad, self.pad + self.config.side)
        grid = self.cells.reshape(-1, self.width, self.width)
        grid[rows, inside, inside] = np.where(plans.walls, WALL, EMPTY)
        row, column = np.divmod(np.stack([plans.start, plans.goal]), side)
        self.place[rows], self.goal[rows] = (row + self.pad) * self.width + column + self.pad
        self.cells[rows, self.goal[rows]] = GOAL
        self.facing[rows], self.age[rows], self.task[rows] = plans.facing, 0, task

    def _drawn(self, rows: np.ndarray) -> Floats:
        """Random levels from the envs' own generators, resampled until solvable."""
        task = np.zeros((len(rows), self.levels.size))
        wanted = np.arange(len(rows))
        while len(wanted):
            lots = self.streams.uniform(self.levels.lots, torch.from_numpy(rows[wanted]))
            task[wanted] = self.levels.drawn(lots.T.double().numpy())
            wanted = wanted[~self.levels.fit(task[wanted])]
        return task

    def _observe(self) -> Tensors:
        seen = self.cells[self.every[:, None], self.place[:, None] + self.looks[self.facing]]
        view = self.config.view
        return {
            "view": torch.from_numpy(seen.reshape(-1, view, view)),
            "facing": torch.from_numpy(self.facing.astype(np.uint8)[:, None]),
        }

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"numbers": (2,)}, {"stream": None})

    def get_state(self) -> Tensors:
        numbers = np.stack([self.place, self.facing, self.age], 1)
        return {
            "task": torch.from_numpy(self.task.copy()),
            "numbers": torch.from_numpy(numbers),
            "stream": self.streams.state.clone(),
        }

    def set_state(self, state: Tensors) -> Tensors:
        self._begin(self.every, state["task"].numpy())
        self.place, self.facing, self.age = state["numbers"].numpy().T.copy()
        self.streams.state = state["stream"].clone()
        self.begun = True
        return self._observe()

    def _cell(self, row: int) -> tuple[int, int]:
        y, x = divmod(int(self.place[row]), self.width)
        return y - self.pad, x - self.pad

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        plans = self.levels.decode(self.task[row : row + 1])
        picture = drawing(plans.walls[0], int(plans.goal[0]), self._cell(row), self.facing[row])
        return torch.from_numpy(fitted(picture, width, height))

    def describe(self, row: int = 0) -> str:
        plans = self.levels.decode(self.task[row : row + 1])
        return words(plans.walls[0], int(plans.goal[0]), self._cell(row), int(self.facing[row]))


def fitted(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """The picture [h, w, 3] as large as fits into uint8 [height, width, 3], on white."""
    scale = min(width / picture.shape[1], height / picture.shape[0])
    rows = np.arange(int(picture.shape[0] * scale)) / scale
    columns = np.arange(int(picture.shape[1] * scale)) / scale
    inside = picture[rows.astype(int)[:, None], columns.astype(int)]
    frame = np.full((height, width, 3), 255, np.uint8)
    top, left = (height - len(rows)) // 2, (width - len(columns)) // 2
    frame[top : top + len(rows), left : left + len(columns)] = inside
    return frame
