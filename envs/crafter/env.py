"""Crafter: open-world survival game with 22 achievements, as a VecEnv (Hafner, 2021).

A reimplementation with exactly the rules and maps of the `crafter` package. It generates a map in
milliseconds and renders only if images are observed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero
from embodied.core.build import ConfigError, nearest
from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.crafter import rules
from embodied.envs.crafter.picture import Kind, leaves, observe, portrait, seen
from embodied.envs.crafter.player import (
    DRINK,
    ENERGY,
    FOOD,
    HEALTH,
    PLAYER,
    Player,
    Thing,
    World,
    daylight,
)
from embodied.envs.crafter.rules import ACHIEVEMENTS, ACTIONS, happened
from embodied.envs.row_rng import row_seed
from embodied.envs.workers import Worker, WorkerPool, receive_all, split

Arrays = dict[str, NDArray]

MANY = rules.SIDE * rules.SIDE  # a cell holds one thing
NOBODY = -1
NO_CHUNK = 255
VITALS = ("hunger", "thirst", "fatigue", "recover")


def read(world: World) -> Arrays:
    """Everything that continues `world` exactly. Leaves:

    `cells`; `things` [4096, 6] in the order of their turns (kind, cell, health, clock, way, place
    in its chunk; kind -1: none); `chunks` [36] in the order in which they were first entered;
    `generator` [625]; `inventory`; `achieved`; `vitals`; `numbers`; `age`, the steps that count for
    the time limit (`numbers` has the time of day).
    """
    player = world.player
    rank = {thing: place for things in world.chunks.values() for place, thing in enumerate(things)}
    things = np.full((MANY, 6), NOBODY, np.int32)
    for row, t in enumerate(world.things):
        way = rules.WAYS.index(t.way) if t.way else NOBODY
        things[row] = t.kind, t.at, t.health, t.clock, way, rank[t]
    chunks = np.full(len(rules.CHUNK_CELLS), NO_CHUNK, np.uint8)
    chunks[: len(world.chunks)] = list(world.chunks)
    clock = (world.seed, world.episode, world.clock, world.before, player.before, player.sleeping)
    return {
        "cells": np.frombuffer(world.cells, np.uint8).copy(),
        "things": things,
        "chunks": chunks,
        "generator": np.array(world.generator.getstate()[1], np.int64),
        "inventory": np.array(player.inventory, np.int64),
        "achieved": np.array(player.achieved, np.int64),
        "vitals": np.array([getattr(player, name) for name in VITALS]),
        "numbers": np.array(clock, np.int64),
        "age": np.array(world.clock - world.began),
    }


def write(world: World, state: Arrays) -> None:
    """Restore into `world` the state from `read`."""
    world.cells = bytearray(state["cells"].astype(np.uint8).tobytes())
    if len(world.cells) != rules.CELLS:
        raise ValueError(
            f"a Crafter map must have {rules.CELLS} cells (border included), got {len(world.cells)}"
        )
    world.set_random((3, tuple(state["generator"].tolist()), None))
    world.empty()
    numbers = state["numbers"].tolist()
    world.seed, world.episode, world.clock, world.before, health, sleeping = numbers
    # Older states have no age: their episodes began with the first day.
    world.began = world.clock - int(state["age"]) if "age" in state else 0
    world.light = daylight(world.clock)
    lines = [line for line in state["things"].tolist() if line[0] != NOBODY]
    made = [_thing(line) for line in lines]
    player = made[0]
    if not isinstance(player, Player):
        raise ValueError("the first object of a Crafter game must be the player")
    world.player = player
    player.inventory[:] = state["inventory"].tolist()
    player.achieved[:] = state["achieved"].tolist()
    for name, value in zip(VITALS, state["vitals"].tolist(), strict=True):
        setattr(player, name, value)
    player.before = health
    player.sleeping = bool(sleeping)
    world.unlocked = [count > 0 for count in player.achieved]
    for thing in made:
        world.add(thing)
    order = [chunk for chunk in state["chunks"].tolist() if chunk != NO_CHUNK]
    world.chunks = {chunk: {} for chunk in order}
    for _, thing in sorted(zip(lines, made, strict=True), key=lambda pair: pair[0][5]):
        world.chunks[rules.CHUNK_OF[thing.at]][thing] = None


def _thing(line: list[int]) -> Thing:
    kind, at, health, clock, way, _ = line
    direction = rules.WAYS[way] if way != NOBODY else 0
    if kind == PLAYER:
        player = Player(at)
        player.way = direction
        return player
    thing = Thing(kind, at, direction)
    thing.health = health
    thing.clock = clock
    return thing


VITAL = (HEALTH, FOOD, DRINK, ENERGY)


def words(world: World) -> str:
    """Near things with direction and distance, vitals, inventory, daylight, achievements."""
    player = world.player
    view = seen(world)
    down, right = rules.AHEAD[rules.WAYS.index(player.way)]
    ahead = rules.SYMBOLS[view[rules.HIGH // 2 + down, rules.WIDE // 2 + right]]
    vitals = ", ".join(f"{rules.ITEMS[i]} {player.inventory[i]}/9" for i in VITAL)
    has = [f"{n} {rules.ITEMS[i]}" for i, n in enumerate(player.inventory) if n and i not in VITAL]
    done = [name for name, count in zip(rules.ACHIEVEMENTS, player.achieved, strict=True) if count]
    state = "asleep" if player.sleeping else "awake"
    return "\n".join(
        [
            f"The player is {state}, faces {rules.WAY_NAMES[player.way]}, in front of it: {ahead}.",
            f"It sees {_near(view)}.",
            f"Vitals: {vitals}. It has {_listed(has)}.",
            f"Daylight {world.light:.0%}, step {world.clock}. Achieved: {_listed(done)}.",
        ]
    )


def _near(view: np.ndarray) -> str:
    """The nearest of every kind, the nearest kind first, and how many there are in view."""
    down = np.arange(rules.HIGH)[:, None] - rules.HIGH // 2 + np.zeros_like(view, np.int64)
    right = np.arange(rules.WIDE) - rules.WIDE // 2 + np.zeros_like(view, np.int64)
    distance = np.abs(down) + np.abs(right)
    found: list[tuple[int, str]] = []
    for kind in np.unique(view).tolist():
        if kind in (rules.SYMBOL["player"], rules.SYMBOL["nothing"]):
            continue
        here = np.where(view == kind, distance, 99)
        row, column = divmod(int(here.argmin()), here.shape[1])
        y, x = int(down[row, column]), int(right[row, column])
        ways = ((y, "down" if y > 0 else "up"), (x, "right" if x > 0 else "left"))
        where = " ".join(f"{abs(steps)} {name}" for steps, name in ways if steps)
        count = int((view == kind).sum())
        more = f" ({count} in view)" if count > 1 else ""
        found.append((int(here.min()), f"{rules.SYMBOLS[kind]} {where}{more}"))
    return _listed([text for _, text in sorted(found)])


def _listed(items: list[str]) -> str:
    return ", ".join(items) if items else "nothing"


ALIGN = 64  # bytes; every array begins on a cache line of its own


@dataclass(frozen=True)
class Settings:
    """`length`: time limit in steps; `goal`: number of the achievement that ends an episode (-1:
    none); `kinds`: what is observed."""

    length: int | None
    goal: int
    kinds: tuple[Kind, ...]


def layout(settings: Settings) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape (per env) and dtype of every shared array. `next/*`: the successor of the action;
    `obs/*`: the first observation of a new episode, where one started."""
    seen = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves(settings.kinds).items()}
    return {
        "action": ((), "int64"),
        "reward": ((), "float32"),
        **{name: ((), "bool") for name in ("terminated", "truncated")},
        "unlocked": ((len(rules.ACHIEVEMENTS),), "bool"),
        **{f"{side}/{name}": what for side in ("obs", "next") for name, what in seen.items()},
    }


class Rows:
    """Some of the games and their part of the shared arrays."""

    def __init__(self, arrays: Mapping[str, NDArray], settings: Settings) -> None:
        self.arrays = arrays
        self.settings = settings
        self.worlds: dict[int, World] = {}
        self.start = {k[4:]: v for k, v in arrays.items() if k.startswith("obs/")}
        self.next = {k[5:]: v for k, v in arrays.items() if k.startswith("next/")}

    def reset(self, seeds: Mapping[int, int | None]) -> None:
        """Start episodes: the first one of a seed, or (None) the next one of that env."""
        for row, seed in seeds.items():
            if seed is None:
                self.worlds[row].begin()
            else:
                self.worlds[row] = World(seed, self.settings.length)
            observe(self.worlds[row], self.start, row)

    def step(self) -> None:
        arrays = self.arrays
        goal = self.settings.goal
        reward, terminated, truncated = (
            arrays[name] for name in ("reward", "terminated", "truncated")
        )
        for row, action in enumerate(arrays["action"].tolist()):
            world = self.worlds[row]
            reward[row], over, late = world.step(action)
            over = over or (goal >= 0 and world.unlocked[goal])
            terminated[row] = over
            truncated[row] = late and not over
            arrays["unlocked"][row] = world.unlocked
            observe(world, self.next, row)
            if over or late:
                world.begin()
                observe(world, self.start, row)

    def read(self) -> Arrays:
        """The state of all games, arrays [n, ...]."""
        states = [read(self.worlds[row]) for row in sorted(self.worlds)]
        return {key: np.stack([state[key] for state in states]) for key in states[0]}

    def write(self, state: Arrays) -> None:
        """Restore a state of `read`."""
        for row in range(len(self.arrays["action"])):
            if row not in self.worlds:
                self.worlds[row] = World(0, self.settings.length)
            write(self.worlds[row], {k: v[row] for k, v in state.items()})

    def draw(self, row: int, width: int, height: int) -> NDArray[np.uint8]:
        return portrait(self.worlds[row], width, height)

    def tell(self, row: int) -> str:
        return words(self.worlds[row])


class Pool(WorkerPool):
    """`count` envs over `workers` processes (0: this process). `arrays` [count, ...] are shared:
    write `action`, call `step`, read the other arrays."""

    def __init__(self, count: int, workers: int, settings: Settings) -> None:
        shapes = layout(settings)
        size = sum(_bytes(count, *what) for what in shapes.values())
        self.bounds = split(count, workers)
        if workers == 0:
            memory: Any = bytearray(size)
            self.arrays = _views(memory, count, shapes)
            self.parts: list[_Local | Worker] = [_Local(Rows(self.arrays, settings))]
            return
        context = multiprocessing.get_context("spawn")
        memory = context.RawArray("B", size)
        self.arrays = _views(memory, count, shapes)
        given = [(memory, count, part, settings) for part in self.bounds]
        self.parts = [Worker("Crafter", _make_rows, each, context=context) for each in given]
        receive_all(self.parts)

    def reset(self, seeds: Mapping[int, int | None]) -> None:
        """Start episodes in the envs that are keys of `seeds`."""
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("reset", {r - low: seed for r, seed in seeds.items() if low <= r < high})
        receive_all(self.parts)

    def step(self) -> None:
        self.call("step")


class _Local:
    """Envs in this process, with the interface of a `Worker`."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.answer = None

    def send(self, method: str, *given: Any) -> None:
        self.answer = getattr(self.rows, method)(*given)

    def receive(self) -> Any:
        return self.answer

    def close(self) -> None:
        """Nothing to release."""


def _make_rows(memory: Any, count: int, part: tuple[int, int], settings: Settings) -> Rows:
    """The envs `part` of a worker process."""
    views = _views(memory, count, layout(settings))
    return Rows({key: view[slice(*part)] for key, view in views.items()}, settings)


def _bytes(count: int, shape: tuple[int, ...], dtype: str) -> int:
    size = count * int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return -(-size // ALIGN) * ALIGN


def _views(memory: Any, count: int, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Arrays:
    """The arrays [count, ...] one after the other in `memory`."""
    views: Arrays = {}
    begin = 0
    for name, (shape, dtype) in shapes.items():
        size = count * int(np.prod(shape, dtype=int))
        flat = np.frombuffer(memory, dtype, size, begin)
        views[name] = flat.reshape(count, *shape)
        begin += _bytes(count, shape, dtype)
    return views


TASK = "survive, and unlock as many of the 22 achievements as you can"


@dataclass(frozen=True)
class Config:
    """Settings of Crafter.

    `observe`: "symbols" (the 7 x 9 cells in view, facing direction, daylight), "inventory" (16
    counts), "image" (64 x 64 x 3; rendered only if listed).
    """

    num_envs: Count = 16  # parallel environments
    workers: CountOrZero = 2  # worker processes (0: none)
    observe: tuple[Kind, ...] = ("symbols", "inventory")  # symbols, inventory, image
    length: Count = 10000  # time limit in steps
    goal: str | None = None  # achievement that is success and ends the episode (null: none)
    text: str = TASK  # task instruction as a sentence


class Crafter(VecEnv):
    """Crafter as a VecEnv with the package's 17 actions and reward.

    Reward: 1 for each newly unlocked achievement, and a tenth of each change of health. An episode
    ends with the player's death. Env i plays the episodes of the package's environment with a seed
    from (seed, i), one after the other. `log` has `achievement/<name>` (bool, unlocked in this
    episode) and, with a goal, `success`. `get_state` is exact, random generators included.
    """

    def __init__(self, config: Config) -> None:
        if not config.observe or len(set(config.observe)) < len(config.observe):
            raise ConfigError(
                f"observe={list(config.observe)} must not be empty or contain duplicates"
            )
        if config.goal is not None and config.goal not in ACHIEVEMENTS:
            raise ConfigError(
                f"unknown achievement {config.goal!r}{nearest(config.goal, ACHIEVEMENTS)}"
            )
        self.config = config
        self.num_envs = config.num_envs
        goal = -1 if config.goal is None else ACHIEVEMENTS.index(config.goal)
        self._knows_success = goal >= 0
        self._goal = goal
        self._pool = Pool(
            config.num_envs, config.workers, Settings(config.length, goal, config.observe)
        )
        self.spec = Spec(
            obs=leaves(config.observe),
            act=Leaf((), "int64", 0, len(ACTIONS) - 1),
            dt=1.0,
            text=config.text,
        )
        self._now: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError("Crafter has no task vector; call reset without `task`")
        if mask is not None and not self._now:
            raise ValueError("the first reset must reset every env; call reset without `mask`")
        rows = range(self.num_envs) if mask is None else mask.nonzero().flatten().tolist()
        going_on = seed is None and bool(self._now)
        self._pool.reset({row: None if going_on else row_seed(seed, row) for row in rows})
        began = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        self._now = self._with_first_obs(self._now, began)
        return self._now

    def step(self, action: Tensor) -> Step:
        if not self._now:
            raise ValueError("call reset() before step()")
        arrays = self._pool.arrays
        arrays["action"][:] = action.numpy()
        if arrays["action"].min() < 0 or arrays["action"].max() >= len(ACTIONS):
            raise ValueError(f"actions must be 0 to {len(ACTIONS) - 1}, got {action.tolist()}")
        self._pool.step()
        following = {name: _copied(arrays[f"next/{name}"]) for name in self.spec.obs}
        terminated, truncated = _copied(arrays["terminated"]), _copied(arrays["truncated"])
        ended = terminated | truncated
        self._now = self._with_first_obs(following, ended) if ended.any() else following
        unlocked = _copied(arrays["unlocked"])
        named = zip(ACHIEVEMENTS, unlocked.unbind(1), strict=True)
        log = {f"achievement/{name}": flags for name, flags in named}
        if self._knows_success:
            log["success"] = unlocked[:, self._goal]
        return Step(
            obs=self._now,
            next_obs=following,
            reward=_copied(arrays["reward"]),
            terminated=terminated,
            truncated=truncated,
            log=log,
        )

    def _with_first_obs(self, before: Tensors, began: Tensor) -> Tensors:
        """`before`, with the first observations of new episodes in the finished envs."""
        start = {name: _copied(self._pool.arrays[f"obs/{name}"]) for name in self.spec.obs}
        return tt.where(began, start, before) if before else start

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"age": None}, {"generator": None, "numbers": (0, 1)})

    def get_state(self) -> Tensors:
        if not self._now:
            raise ValueError("call reset() before get_state()")
        world = {key: torch.from_numpy(value) for key, value in self._pool.read().items()}
        # The noise of a night image cannot be drawn again from the generator.
        return world | {f"obs/{name}": value.clone() for name, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        self._pool.write({k: v.numpy() for k, v in state.items() if not k.startswith("obs/")})
        self._now = {name: state[f"obs/{name}"].clone() for name in self.spec.obs}
        return self._now

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return torch.from_numpy(self._pool.ask("draw", row, width, height))

    def describe(self, row: int = 0) -> str:
        return self._pool.ask("tell", row)

    def goal_names(self) -> tuple[str, ...]:
        return ACHIEVEMENTS

    def action_names(self) -> tuple[str, ...]:
        return ACTIONS

    def event_captions(self, before: Tensors, after: Tensors) -> list[str]:
        """One sentence per env for what changed from `before` to `after`; "" if there is none."""
        return happened(before, after)

    def close(self) -> None:
        self._pool.close()


def _copied(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())
