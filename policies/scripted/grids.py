"""Woodcutter: collects wood, places a table, makes a wooden pickaxe in Crafter.

It observes what a policy observes (the 7 x 9 cells in view and the inventory) and has no memory: it
takes the shortest path in view to what it needs next, and goes straight on if none is in view.

Planner: shortest-path demonstrator for MiniGrid levels with a goal, keys and doors included.

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
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.scripted.simple import Script

# Symbols and actions of the environment; directions are left, right, up, down.
FREE = (2, 4, 5)  # grass, path, sand
TREE = 6
TABLE = 11
NOOP = 0
MOVE = 1
DO = 5
PLACE_TABLE = 8
MAKE_PICKAXE = 11
WAYS = ((0, -1), (0, 1), (-1, 0), (1, 0))  # (down, right)
ENOUGH = 3  # wood for a table and a pickaxe
FAR = 1000.0


@dataclass(frozen=True)
class WoodcutterConfig:
    """Settings of the woodcutter."""

    unsteady: Fraction = 0.05  # share of random actions


class Woodcutter(Script):
    """Noise: whether to slip, what to do then, where to turn."""

    width = 3
    uniform = True

    def __init__(self, config: WoodcutterConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        missing = {"symbols", "facing", "inventory"} - set(spec.obs)
        if missing:
            raise ConfigError(
                f"this demonstrator needs the observations {', '.join(sorted(missing))}; "
                "set env.observe=[symbols,inventory]"
            )
        names = spec.obs["inventory"].names
        self.wood = names.index("wood")
        self.pickaxe = names.index("wood_pickaxe")
        high = spec.act.high
        assert isinstance(high, int | float)
        self.actions = int(high) + 1

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        cells = obs["symbols"].long()
        facing = obs["facing"][:, 0].long()
        wood = obs["inventory"][:, self.wood]
        done = obs["inventory"][:, self.pickaxe] > 0
        table = cells == TABLE
        middle = table.shape[1] // 2, table.shape[2] // 2
        close = table[:, middle[0] - 1 : middle[0] + 2, middle[1] - 1 : middle[1] + 2]
        beside = torch.stack([cells[:, middle[0] + y, middle[1] + x] for y, x in WAYS], 1)
        free = _is_free(beside)
        ahead = beside.gather(1, facing[:, None]).squeeze(1)
        ready = table.flatten(1).any(1) & (wood >= 1)
        target = torch.where(ready[:, None, None], table, cells == TREE)
        action = _walk(target, cells, free, facing, noise[:, 2])
        action = torch.where(~ready & (ahead == TREE), DO, action)
        building = ~ready & (wood >= ENOUGH)
        roam = MOVE + _turn(free, facing, noise[:, 2])
        action = torch.where(building, torch.where(_is_free(ahead), PLACE_TABLE, roam), action)
        action = torch.where(close.flatten(1).any(1) & (wood >= 1), MAKE_PICKAXE, action)
        action = torch.where(done, NOOP, action)
        slip = (noise[:, 1] * self.actions).long().clamp(max=self.actions - 1)
        return torch.where(noise[:, 0] < self.config.unsteady, slip, action)[:, None], carry


def _is_free(cells: Tensor) -> Tensor:
    return torch.isin(cells, torch.tensor(FREE, device=cells.device))


def _walk(target: Tensor, cells: Tensor, free: Tensor, facing: Tensor, noise: Tensor) -> Tensor:
    """Moves [n] along the shortest way to the nearest target in view [n, 7, 9], or straight on."""
    distance = _distances(target, _is_free(cells))
    y, x = cells.shape[1] // 2, cells.shape[2] // 2
    beside = torch.stack([distance[:, y + down, x + right] for down, right in WAYS], 1)
    nearest, way = beside.min(1)
    return MOVE + torch.where(nearest < FAR, way, _turn(free, facing, noise))


def _distances(target: Tensor, free: Tensor) -> Tensor:
    """Steps from every cell [n, h, w] to the nearest target over free cells; FAR: no way."""
    distance = torch.where(target, 0.0, FAR)
    for _ in range(target.shape[1] * target.shape[2] // 2):
        padded = torch.nn.functional.pad(distance, (1, 1, 1, 1), value=FAR)
        around = (padded[:, 1:-1, :-2], padded[:, 1:-1, 2:], padded[:, :-2, 1:-1])
        best = torch.stack([*around, padded[:, 2:, 1:-1]]).amin(0)
        distance = torch.where(free, (best + 1).clamp(max=FAR), distance)
    return distance


def _turn(free: Tensor, facing: Tensor, noise: Tensor) -> Tensor:
    """A way to roam [n]: where it looks if it can go there, mostly; else one of the free ways."""
    ahead = free.gather(1, facing[:, None]).squeeze(1)
    onward = ahead & (noise > 0.03)
    # Of the k free ways the one that the noise points at; any way at all where none is free.
    weights = torch.where(free.any(1, keepdim=True), free.float(), torch.ones_like(free.float()))
    shares = weights.cumsum(1) / weights.sum(1, keepdim=True)
    point = torch.where(ahead, noise / 0.03, noise)
    other = (shares <= point[:, None]).sum(1).clamp(max=3)
    return torch.where(onward, facing, other)


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
class PlannerConfig:
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


class Planner(Script):
    """Noise: whether to make a mistake, and which one.

    If there is no path to a goal any more, it waits for the end of the episode.
    """

    width = 2
    uniform = True

    def __init__(self, config: PlannerConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        if not {"privileged/grid", "privileged/agent"} <= set(spec.obs):
            raise ConfigError("this planner needs the whole level: set env.privileged=true")
        self.height = spec.obs["privileged/grid"].shape[1]
        self.known: dict[State, int] = {}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        grids = obs["privileged/grid"].cpu()
        agents = obs["privileged/agent"].tolist()
        actions = []
        for row, (x, y, turn, kind, colour) in enumerate(agents):
            state = State(x, y, turn, (kind, colour), grids[row].numpy().tobytes())
            slips = float(noise[row, 0]) < self.config.mistakes
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
