"""Crafter worlds side by side: in this process, or in worker processes over shared memory."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.crafter import state as crafter_state
from envs.crafter.picture import portrait
from envs.crafter.rules import ACHIEVEMENTS
from envs.crafter.view import Kind, fields, observe
from envs.crafter.words import words
from envs.crafter.world import World

Arrays = dict[str, NDArray]
ALIGN = 64  # bytes; every array begins on a cache line of its own


@dataclass(frozen=True)
class Settings:
    """What every row has to know: the time limit in steps, the number of the achievement that ends
    an episode (-1: none), what is observed."""

    length: int | None
    goal: int
    kinds: tuple[Kind, ...]


def layout(settings: Settings) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of one row of every shared array. `next/*` holds what an action led to,
    `obs/*` the start of a new episode, where one began."""
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
    """A few worlds and their rows of the shared arrays."""

    def __init__(self, arrays: Mapping[str, NDArray], settings: Settings) -> None:
        self.arrays, self.settings = arrays, settings
        self.worlds: dict[int, World] = {}
        self.start = {k[4:]: v for k, v in arrays.items() if k.startswith("obs/")}
        self.next = {k[5:]: v for k, v in arrays.items() if k.startswith("next/")}

    def reset(self, seeds: Mapping[int, int | None]) -> None:
        """Begin episodes: the first one of a seed, or (None) the row's next."""
        for row, seed in seeds.items():
            if seed is None:
                self.worlds[row].begin()
            else:
                self.worlds[row] = World(seed, self.settings.length)
            observe(self.worlds[row], self.start, row)

    def step(self) -> None:
        """One step of every row, and a new episode where one ended."""
        arrays, goal = self.arrays, self.settings.goal
        reward, terminated, truncated = (
            arrays[name] for name in ("reward", "terminated", "truncated")
        )
        for row, action in enumerate(arrays["action"].tolist()):
            world = self.worlds[row]
            reward[row], over, late = world.step(action)
            over = over or (goal >= 0 and world.unlocked[goal])
            terminated[row], truncated[row] = over, late and not over
            arrays["unlocked"][row] = world.unlocked
            observe(world, self.next, row)
            if over or late:
                world.begin()
                observe(world, self.start, row)

    def read(self) -> Arrays:
        """All worlds, as arrays with a leading row dimension."""
        states = [crafter_state.read(self.worlds[row]) for row in sorted(self.worlds)]
        return {key: np.stack([state[key] for state in states]) for key in states[0]}

    def write(self, state: Arrays) -> None:
        """Make all worlds what `read` found."""
        for row in range(len(self.arrays["action"])):
            if row not in self.worlds:
                self.worlds[row] = World(0, self.settings.length)
            crafter_state.write(self.worlds[row], {k: v[row] for k, v in state.items()})

    def draw(self, row: int, width: int, height: int) -> NDArray[np.uint8]:
        return portrait(self.worlds[row], width, height)

    def tell(self, row: int) -> str:
        return words(self.worlds[row])


class Pool:
    """`count` rows, spread over `workers` processes (0: this one). `arrays` [count, ...] are shared
    with them: write `action`, call `step`, read the rest."""

    def __init__(self, count: int, workers: int, settings: Settings) -> None:
        shapes = layout(settings)
        size = sum(_bytes(count, *what) for what in shapes.values())
        spread = np.array_split(np.arange(count), min(max(workers, 1), count))
        self.bounds = [(int(part[0]), int(part[-1]) + 1) for part in spread]
        if workers == 0:
            memory: Any = bytearray(size)
            self.arrays = _views(memory, count, shapes)
            self.parts: list[_Here | _There] = [_Here(Rows(self.arrays, settings))]
            return
        context = multiprocessing.get_context("spawn")
        memory = context.RawArray("B", size)
        self.arrays = _views(memory, count, shapes)
        self.parts = [_There(context, memory, count, part, settings) for part in self.bounds]

    def reset(self, seeds: Mapping[int, int | None]) -> None:
        """Begin episodes in the rows that are named."""
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("reset", {r - low: seed for r, seed in seeds.items() if low <= r < high})
        self._wait()

    def step(self) -> None:
        for part in self.parts:
            part.send("step")
        self._wait()

    def read(self) -> Arrays:
        for part in self.parts:
            part.send("read")
        states = self._wait()
        return {key: np.concatenate([state[key] for state in states]) for key in states[0]}

    def write(self, state: Arrays) -> None:
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("write", {key: value[low:high] for key, value in state.items()})
        self._wait()

    def ask(self, method: str, row: int, *more: Any) -> Any:
        """What one row answers to `draw` or `tell`."""
        count = len(self.arrays["action"])
        if not 0 <= row < count:
            raise ValueError(f"there is no row {row}; rows are 0 to {count - 1}")
        number = next(n for n, (low, high) in enumerate(self.bounds) if low <= row < high)
        self.parts[number].send(method, row - self.bounds[number][0], *more)
        answer = self.parts[number].receive()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _wait(self) -> list[Any]:
        """Everybody's answer; raises what one of them met, once none owes an answer."""
        answers = [part.receive() for part in self.parts]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        for part in self.parts:
            part.close()


class _Here:
    """Rows in this process."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.answer = rows, None

    def send(self, method: str, *given: Any) -> None:
        self.answer = getattr(self.rows, method)(*given)

    def receive(self) -> Any:
        return self.answer

    def close(self) -> None:
        """Nothing is held."""


class _There:
    """Rows in a process of their own, which ends with this one."""

    def __init__(
        self, context: Any, memory: Any, count: int, part: tuple[int, int], settings: Settings
    ) -> None:
        self.connection, other = context.Pipe()
        given = (other, memory, count, part, settings)
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()
        other.close()

    def send(self, method: str, *given: Any) -> None:
        try:
            self.connection.send((method, given))
        except BrokenPipeError as error:
            raise _ended(self.process.exitcode) from error

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(1)
            return _ended(self.process.exitcode)

    def close(self) -> None:
        self.connection.close()
        self.process.join(2)
        if self.process.is_alive():
            self.process.terminate()


def _ended(code: int | None) -> RuntimeError:
    return RuntimeError(f"a Crafter worker process ended (exit code {code}); try workers=0")


def serve(
    connection: Connection, memory: Any, count: int, part: tuple[int, int], settings: Settings
) -> None:
    """What a worker process does until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who holds the other end
    views = _views(memory, count, layout(settings))
    rows = Rows({key: view[slice(*part)] for key, view in views.items()}, settings)
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            return
        try:
            reply = getattr(rows, method)(*given)
        except Exception as error:  # whatever it is, it belongs to who asked
            reply = error
        connection.send(reply)


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
