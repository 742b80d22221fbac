"""Planner: shortest-path demonstrator for MiniGrid levels with a goal, keys and doors included.

Breadth-first search over (cell, heading, carried object, grid) with MiniGrid's own rules on the
whole level (`privileged/grid`, `privileged/agent`; set `privileged: true` in the environment).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from embodied.core.bounds import Fraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

LEFT, RIGHT, FORWARD, PICK, DROP, TOGGLE, WAIT = range(7)
EMPTY = 1
FLOOR = 3
DOOR = 4
KEY = 5
BALL = 6
BOX = 7
GOAL = 8
OPEN, CLOSED, LOCKED = range(3)
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))
MOST = 200_000  # states of one search
KEPT = 100_000  # size of the cache of answers


@dataclass(frozen=True)
class Config:
    """Settings of the planner."""

    mistakes: Fraction = 0.0  # share of random turns and steps, to demonstrate recovery


class State(NamedTuple):
    """A state: where the agent is, what it carries (kind, colour; (1, 0): nothing), and the level's
    cells, column by column, three bytes each."""

    x: int
    y: int
    turn: int
    hand: tuple[int, int]
    grid: bytes


class Planner(Policy):
    """Noise is [n, 2], uniform: whether to make a mistake, and which one.

    If there is no path to a goal any more, it waits for the end of the episode.
    """

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if not {"privileged/grid", "privileged/agent"} <= set(spec.obs):
            raise ConfigError("this planner needs the whole level: set env.privileged=true")
        self.spec = spec
        self.mistakes = config.mistakes
        self.height = spec.obs["privileged/grid"].shape[1]
        self.known: dict[State, int] = {}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.rand(n, 2)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        grids = obs["privileged/grid"].cpu()
        agents = obs["privileged/agent"].tolist()
        actions = []
        for row, (x, y, turn, kind, colour) in enumerate(agents):
            state = State(x, y, turn, (kind, colour), grids[row].numpy().tobytes())
            slips = float(noise[row, 0]) < self.mistakes
            actions.append(self._slip(state, float(noise[row, 1])) if slips else self.best(state))
        return torch.tensor(actions)[:, None], carry

    def best(self, state: State) -> int:
        """The first action of the shortest way to a goal from `state`."""
        if state not in self.known:
            if len(self.known) > KEPT:
                self.known.clear()
            if GOAL not in state.grid[::3]:
                raise ValueError(
                    "this level has no goal cell; the planner supports only missions that end at "
                    "a goal"
                )
            way = search(state, self.height, False) or search(state, self.height, True)
            self.known.update(way or {state: WAIT})
        return self.known[state]

    def _slip(self, state: State, chance: float) -> int:
        """A turn, or a step where it changes nothing but the place."""
        ahead = _cell(state, self.height)
        safe = ahead[0] in (EMPTY, FLOOR) or (ahead[0] == DOOR and ahead[2] == OPEN)
        return int(chance * (3 if safe else 2))


def search(start: State, height: int, everything: bool) -> dict[State, int]:
    """The states on a shortest way to a goal with the action to take in each; empty if none.

    `everything`: also move things out of the way and put them down, which makes many more states;
    otherwise only keys of locked doors are picked up.
    """
    came: dict[State, tuple[State, int]] = {}
    queue = deque([start])
    seen = {start}
    while queue and len(seen) < MOST:
        state = queue.popleft()
        if state.grid[3 * (state.x * height + state.y)] == GOAL:
            way: dict[State, int] = {}
            while state in came:
                state, action = came[state]
                way[state] = action
            return way
        for action, following in _successors(state, height, everything):
            if following not in seen:
                seen.add(following)
                came[following] = (state, action)
                queue.append(following)
    return {}


def _successors(state: State, height: int, everything: bool) -> Iterator[tuple[int, State]]:
    """The actions that are worth trying, with the states that they lead to."""
    x, y, turn, hand, grid = state
    kind, colour, door = _cell(state, height)
    dx, dy = STEPS[turn]
    place = 3 * ((x + dx) * height + y + dy)
    if kind in (EMPTY, FLOOR, GOAL) or (kind == DOOR and door == OPEN):
        yield FORWARD, State(x + dx, y + dy, turn, hand, grid)
    if kind == DOOR and (door == CLOSED or (door == LOCKED and hand == (KEY, colour))):
        yield TOGGLE, State(x, y, turn, hand, _put(grid, place, (DOOR, colour, OPEN)))
    wanted = kind == KEY and bytes((DOOR, colour, LOCKED)) in {
        grid[at : at + 3] for at in range(0, len(grid), 3)
    }
    if hand[0] == EMPTY and (wanted or (everything and kind in (KEY, BALL, BOX))):
        yield PICK, State(x, y, turn, (kind, colour), _put(grid, place, (EMPTY, 0, 0)))
    if everything and hand[0] != EMPTY and kind == EMPTY:
        yield DROP, State(x, y, turn, (EMPTY, 0), _put(grid, place, (*hand, 0)))
    yield LEFT, State(x, y, (turn - 1) % 4, hand, grid)
    yield RIGHT, State(x, y, (turn + 1) % 4, hand, grid)


def _cell(state: State, height: int) -> tuple[int, int, int]:
    """The cell ahead."""
    dx, dy = STEPS[state.turn]
    place = 3 * ((state.x + dx) * height + state.y + dy)
    kind, colour, condition = state.grid[place : place + 3]
    return kind, colour, condition


def _put(grid: bytes, place: int, code: tuple[int, int, int]) -> bytes:
    return grid[:place] + bytes(code) + grid[place + 3 :]
