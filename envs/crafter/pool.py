"""Parallel Crafter games, in this process or in worker processes; their text description."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.envs.crafter import state as crafter_state
from embodied.envs.crafter.picture import portrait
from embodied.envs.crafter.player import DRINK, ENERGY, FOOD, HEALTH
from embodied.envs.crafter.rules import ACHIEVEMENTS, HIGH, ITEMS, SYMBOL, SYMBOLS, WAYS, WIDE
from embodied.envs.crafter.view import Kind, fields, observe, seen
from embodied.envs.crafter.world import World
from embodied.envs.workers import Worker, receive_all, split

VITAL = (HEALTH, FOOD, DRINK, ENERGY)
FACING: dict[int, str] = dict(zip(WAYS, ("left", "right", "up", "down"), strict=True))
# The cell in front, from the middle of the view: (down, right).
AHEAD: dict[int, tuple[int, int]] = dict(zip(WAYS, ((0, -1), (0, 1), (-1, 0), (1, 0)), strict=True))


def words(world: World) -> str:
    """Near things with direction and distance, vitals, inventory, daylight, achievements."""
    player = world.player
    view = seen(world)
    down, right = AHEAD[player.way]
    ahead = SYMBOLS[view[HIGH // 2 + down, WIDE // 2 + right]]
    vitals = ", ".join(f"{ITEMS[i]} {player.inventory[i]}/9" for i in VITAL)
    has = [f"{n} {ITEMS[i]}" for i, n in enumerate(player.inventory) if n and i not in VITAL]
    done = [name for name, count in zip(ACHIEVEMENTS, player.achieved, strict=True) if count]
    state = "asleep" if player.sleeping else "awake"
    return "\n".join(
        [
            f"The player is {state}, faces {FACING[player.way]}, in front of it: {ahead}.",
            f"It sees {_near(view)}.",
            f"Vitals: {vitals}. It has {_listed(has)}.",
            f"Daylight {world.light:.0%}, step {world.clock}. Achieved: {_listed(done)}.",
        ]
    )


def _near(view: np.ndarray) -> str:
    """The nearest of every kind, the nearest kind first, and how many there are in view."""
    down = np.arange(HIGH)[:, None] - HIGH // 2 + np.zeros_like(view, np.int64)
    right = np.arange(WIDE) - WIDE // 2 + np.zeros_like(view, np.int64)
    distance = np.abs(down) + np.abs(right)
    found: list[tuple[int, str]] = []
    for kind in np.unique(view).tolist():
        if kind in (SYMBOL["player"], SYMBOL["nothing"]):
            continue
        here = np.where(view == kind, distance, 99)
        row, column = divmod(int(here.argmin()), here.shape[1])
        where = _way(int(down[row, column]), int(right[row, column]))
        count = int((view == kind).sum())
        more = f" ({count} in view)" if count > 1 else ""
        found.append((int(here.min()), f"{SYMBOLS[kind]} {where}{more}"))
    return _listed([text for _, text in sorted(found)])


def _way(down: int, right: int) -> str:
    ways = ((down, "down" if down > 0 else "up"), (right, "right" if right > 0 else "left"))
    return " ".join(f"{abs(steps)} {name}" for steps, name in ways if steps)


def _listed(items: list[str]) -> str:
    return ", ".join(items) if items else "nothing"


Arrays = dict[str, NDArray]
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
    seen = {name: (field.shape, field.dtype) for name, field in fields(settings.kinds).items()}
    flags = {name: ((), "bool") for name in ("terminated", "truncated")}
    return {
        "action": ((), "int64"),
        "reward": ((), "float32"),
        **flags,
        "unlocked": ((len(ACHIEVEMENTS),), "bool"),
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
        """Step every env and reset those whose episode ended."""
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
        states = [crafter_state.read(self.worlds[row]) for row in sorted(self.worlds)]
        return {key: np.stack([state[key] for state in states]) for key in states[0]}

    def write(self, state: Arrays) -> None:
        """Restore a state of `read`."""
        for row in range(len(self.arrays["action"])):
            if row not in self.worlds:
                self.worlds[row] = World(0, self.settings.length)
            crafter_state.write(self.worlds[row], {k: v[row] for k, v in state.items()})

    def draw(self, row: int, width: int, height: int) -> NDArray[np.uint8]:
        return portrait(self.worlds[row], width, height)

    def tell(self, row: int) -> str:
        return words(self.worlds[row])


class Pool:
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
        for part in self.parts:
            part.send("step")
        receive_all(self.parts)

    def read(self) -> Arrays:
        for part in self.parts:
            part.send("read")
        states = receive_all(self.parts)
        return {key: np.concatenate([state[key] for state in states]) for key in states[0]}

    def write(self, state: Arrays) -> None:
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("write", {key: value[low:high] for key, value in state.items()})
        receive_all(self.parts)

    def ask(self, method: str, row: int, *more: Any) -> Any:
        """Call `draw` or `tell` for one env."""
        count = len(self.arrays["action"])
        if not 0 <= row < count:
            raise ValueError(f"there is no env {row}; envs are 0 to {count - 1}")
        number = next(n for n, (low, high) in enumerate(self.bounds) if low <= row < high)
        self.parts[number].send(method, row - self.bounds[number][0], *more)
        return self.parts[number].receive()

    def close(self) -> None:
        for part in self.parts:
            part.close()


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
