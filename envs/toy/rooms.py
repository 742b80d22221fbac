"""Rooms: a grid of rooms for exploration, some noisy and some dark.

An environment for task-free exploration, in the manner of those of Adversarial Surprise (Fickinger
et al., 2021): noise traps novelty-seeking agents, darkness traps surprise-minimising ones. The
floor of a noisy room changes colour in every step until the agent stands on the room's switch. The
environment's own reward is 1/R for the first visit of each of R rooms in an episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero
from embodied.core.env import StateRoles, Step
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.maze.env import GO, LEFT, RIGHT, WAYS, fitted
from embodied.envs.row_rng import RowRng

EMPTY, WALL, SWITCH, DARK, NOISE = 0, 1, 2, 3, 4  # and the colours after it
DT = 0.1
INK = np.array([(244, 241, 234), (58, 66, 82), (220, 180, 60), (20, 22, 30)], np.uint8)
AGENT = (196, 66, 42)
LOUD = (180, 120, 200)
SEEN = (214, 232, 214)


@dataclass(frozen=True)
class Config:
    """Settings of `rooms` x `rooms` rooms; episodes start in the middle one, a plain one."""

    rooms: Annotated[int, Bound(2)] = 3  # rooms per side, one door between neighbours
    size: Annotated[int, Bound(2)] = 3  # cells per side of a room
    noisy: CountOrZero = 2  # rooms whose cells change colour at random
    dark: CountOrZero = 1  # rooms where nothing is seen
    colours: Count = 4  # of the noise
    view: Annotated[int, Bound(3)] = 5  # cells in view per side (odd)
    horizon: Count = 128  # steps of an episode
    num_envs: Count = 32  # parallel environments
    seed: CountOrZero = 0  # of the random numbers


class Rooms(BatchedEnv):
    """Observation: `view` [V, V] symbols with the agent in the middle of the lowest row, facing up,
    and `facing` [1]. Actions: turn left, turn right, go forward. Success: all rooms were visited.
    """

    name = "rooms"
    kept: ClassVar = {
        **{key: key for key in ("cells", "loud", "unlit", "visited", "flicker")},
        **{"place": "place", "facing": "facing", "age": "age", "stream": "streams.state"},
    }

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        if config.view % 2 == 0:
            raise ValueError(f"rooms: view={config.view} must be odd")
        if config.noisy + config.dark >= config.rooms**2:
            raise ValueError("rooms: noisy + dark is too large; the start room must be neither")
        n = config.num_envs
        view = config.view
        high = NOISE + config.colours - 1
        obs = {
            "view": Leaf((view, view), "uint8", low=0, high=high, unit=SYMBOL),
            "facing": Leaf((1,), "uint8", low=0, high=3, unit=SYMBOL),
        }
        self.spec = Spec(obs, Leaf((), "int64", low=0, high=GO), DT, None, "see all the rooms")
        self.every = np.arange(n)
        self.streams = RowRng(config.seed, n)
        self.pad = view - 1
        self.step_size = config.size + 1
        self.side = config.rooms * self.step_size + 1
        self.width = self.side + 2 * self.pad
        self.room, self.plan = self._plan()
        self.count = config.rooms**2
        self.strides = WAYS @ np.array([self.width, 1])
        ahead, aside = np.indices((view, view))
        ahead = view - 1 - ahead
        aside = aside - view // 2
        right = np.roll(self.strides, -1)
        pairs = zip(self.strides, right, strict=True)
        self.looks = np.stack([(ahead * go + aside * by).ravel() for go, by in pairs])
        self.cells: np.ndarray = np.tile(self.plan, (n, 1))
        self.loud, self.unlit, self.visited = np.zeros((3, n, self.count), bool)
        self.flicker = np.zeros((n, view * view), np.uint8)
        self.place, self.facing, self.age = np.zeros((3, n), np.int64)
        self.obs = self.observe(torch.from_numpy(self.every))

    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        """The room of every cell [W * W] (-1: none), and what is there without doors."""
        where = np.arange(self.width) - self.pad - 1
        inside = (
            (where >= 0) & (where < self.side - 1) & (where % self.step_size < self.step_size - 1)
        )
        row = np.where(inside, where // self.step_size, -1)
        room = row[:, None] * self.config.rooms + row[None]
        room[~(inside[:, None] & inside[None])] = -1
        return room.ravel(), np.where(room.ravel() >= 0, EMPTY, WALL).astype(np.uint8)

    def step(self, action: Tensor) -> Step:
        act = action.detach().cpu().numpy()
        if act.shape != (self.num_envs,) or not ((act >= LEFT) & (act <= GO)).all():
            raise ValueError(f"rooms: actions must be [{self.num_envs}] integers from 0 to 2")
        self.facing = (self.facing + (act == RIGHT) - (act == LEFT)) % 4
        ahead: np.ndarray = self.place + self.strides[self.facing]
        free = self.cells[self.every, ahead] != WALL
        self.place = np.where((act == GO) & free, ahead, self.place)
        self.age += 1
        # The reward [B] of the cell where each env stands now; switches are switched.
        room = self.room[self.place]
        new = (room >= 0) & ~self.visited[self.every, room]
        self.visited[self.every[new], room[new]] = True
        at = np.flatnonzero(self.cells[self.every, self.place] == SWITCH)
        self.loud[at, room[at]] = False
        self.cells[at, self.place[at]] = EMPTY
        reward = (new / self.count).astype(np.float32)
        lots = self.streams.uniform(self.flicker.shape[1]).T.numpy()
        self.flicker = np.minimum(lots * self.config.colours, self.config.colours - 1).astype(
            np.uint8
        )
        won = torch.from_numpy(self.visited.all(1))
        late = self.age >= self.config.horizon
        following = self.observe(torch.from_numpy(self.every))
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        pay = torch.from_numpy(reward)
        return self.finish(following, pay, never, torch.from_numpy(late), {"success": won})

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        config = self.config
        count = self.count
        side = self.config.rooms
        envs = rows.numpy()
        lots = self.streams.uniform(count + 4 * count + 1, rows).T.double().numpy()
        middle = count // 2
        order = lots[:, :count].copy()
        order[:, middle] = 2.0  # neither noisy nor dark
        rank = order.argsort(1).argsort(1)
        self.loud[envs] = rank < config.noisy
        self.unlit[envs] = (rank >= config.noisy) & (rank < config.noisy + config.dark)
        places = np.minimum((lots[:, count:-1] * config.size).astype(int), config.size - 1)
        self.cells[envs] = self.plan
        for room in range(count):
            row, column = divmod(room, side)
            right, down, *switch = (places[:, 4 * room + i] for i in range(4))
            corner = self._corner(row, column)
            if column + 1 < side:
                self.cells[envs, corner + right * self.width + config.size] = EMPTY
            if row + 1 < side:
                self.cells[envs, corner + config.size * self.width + down] = EMPTY
            at = envs[self.loud[envs, room]]
            there = (corner + switch[0] * self.width + switch[1])[self.loud[envs, room]]
            self.cells[at, there] = SWITCH
        self.facing[envs] = np.minimum((lots[:, -1] * 4).astype(int), 3)
        centre = config.size // 2
        self.place[envs] = self._corner(*divmod(middle, side)) + centre * self.width + centre
        self.age[envs] = 0
        self.flicker[envs] = 0
        self.visited[envs] = False
        self.visited[envs, middle] = True

    def _corner(self, row: int, column: int) -> int:
        return (row * self.step_size + 1 + self.pad) * self.width + (
            column * self.step_size + 1 + self.pad
        )

    def observe(self, rows: Tensor) -> Tensors:
        envs = rows.numpy()[:, None]
        facing = self.facing[rows.numpy()]
        at = self.place[envs] + self.looks[facing]
        seen = self.cells[envs, at].copy()
        room = self.room[at]
        inside = room >= 0
        noisy = inside & self.loud[envs, room] & (seen == EMPTY)
        seen = np.where(noisy, NOISE + self.flicker[envs[:, 0]], seen)
        seen = np.where(inside & self.unlit[envs, room], DARK, seen).astype(np.uint8)
        view = self.config.view
        return {
            "view": torch.from_numpy(seen.reshape(-1, view, view)),
            "facing": torch.from_numpy(facing.astype(np.uint8)[:, None]),
        }

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"stream": None})

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        """The rooms from above: those seen so far are green, noisy ones violet, dark ones black."""
        picture = INK[self.cells[row]]
        floor = (self.cells[row] == EMPTY) & (self.room >= 0)
        for marked, colour in (
            (self.visited[row], SEEN),
            (self.loud[row], LOUD),
            (self.unlit[row], INK[DARK]),
        ):
            picture[floor & marked[self.room]] = colour
        picture[self.place[row]] = AGENT
        inner = slice(self.pad, self.pad + self.side)
        square = picture.reshape(self.width, self.width, 3)[inner, inner]
        return torch.from_numpy(fitted(square, width, height))

    def describe(self, row: int = 0) -> str:
        seen = int(self.visited[row].sum())
        return f"{seen} of {self.count} rooms seen, step {int(self.age[row])}"
