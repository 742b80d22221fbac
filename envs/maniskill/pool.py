"""ManiSkill rows over worker processes, one pipe each.

A step of one row takes milliseconds and its observation is at most a few hundred kilobytes, so that
sending it costs well under a hundredth of it: shared memory would gain nothing here.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.tensors import Tensors
from envs.maniskill.factory import Settings
from envs.maniskill.rows import Rows, joined


class Pool:
    """The methods of `Rows`, over `workers` processes that share `count` rows out."""

    def __init__(self, settings: Settings, count: int, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        spread = np.array_split(np.arange(count), workers)
        self.bounds = [(int(part[0]), int(part[-1]) + 1) for part in spread]
        self.parts = [_Worker(context, settings, high - low) for low, high in self.bounds]
        for part in self.parts:
            part.receive()

    def about(self) -> tuple[Any, Tensors, tuple[str, ...], float]:
        self.parts[0].send("about")
        return self.parts[0].receive()

    def reset(self, seeds: Mapping[int, tuple[int, int] | None]) -> Tensors:
        asked = []
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            mine = {row - low: seed for row, seed in seeds.items() if low <= row < high}
            if mine:
                part.send("reset", mine)
                asked.append(part)
        return joined([part.receive() for part in asked])

    def step(self, actions: NDArray[np.float32]) -> tuple[Tensors, Tensors]:
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("step", actions[low:high])
        played = [part.receive() for part in self.parts]
        return joined([obs for obs, _ in played]), joined([told for _, told in played])

    def read(self) -> dict[str, NDArray[Any]]:
        for part in self.parts:
            part.send("read")
        states = [part.receive() for part in self.parts]
        return {key: np.concatenate([state[key] for state in states]) for key in states[0]}

    def write(self, state: Mapping[str, NDArray[Any]]) -> None:
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("write", {key: value[low:high] for key, value in state.items()})
        for part in self.parts:
            part.receive()

    def draw(self, row: int, width: int, height: int) -> Tensor:
        return self._ask("draw", row, width, height)

    def tell(self, row: int) -> str:
        return self._ask("tell", row)

    def _ask(self, method: str, row: int, *more: Any) -> Any:
        number = next(n for n, (low, high) in enumerate(self.bounds) if low <= row < high)
        self.parts[number].send(method, row - self.bounds[number][0], *more)
        return self.parts[number].receive()

    def close(self) -> None:
        for part in self.parts:
            part.close()


class _Worker:
    """A process with a few rows, which ends with this one."""

    def __init__(self, context: Any, settings: Settings, count: int) -> None:
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, settings, count), daemon=True)
        self.process.start()
        other.close()

    def send(self, method: str, *given: Any) -> None:
        try:
            self.connection.send((method, given))
        except ConnectionError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        try:
            answer, error = self.connection.recv()
        except (EOFError, ConnectionError) as stop:
            self.process.join(1)
            raise self._ended() from stop
        if error is not None:
            raise error
        return _tensors(answer)

    def _ended(self) -> RuntimeError:
        code = self.process.exitcode
        return RuntimeError(f"a ManiSkill worker process ended (exit code {code}); try workers=0")

    def close(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()


def serve(connection: Connection, settings: Settings, count: int) -> None:
    """What a worker process does until the other end closes; its first answer says it is ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who holds the other end
    torch.set_num_threads(1)
    try:
        rows = Rows(settings, count)
    except Exception as error:  # whatever it is, it belongs to who asked
        connection.send((None, error))
        return
    connection.send((None, None))
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            return
        try:
            reply = _Sent(getattr(rows, method)(*given)), None
        except Exception as error:  # likewise
            reply = None, error
        connection.send(reply)


class _Sent:
    """An answer on its way: tensors travel as arrays (torch would open a file for each)."""

    def __init__(self, answer: Any) -> None:
        self.answer = _arrays(answer)


class _Array:
    """An array that was a tensor."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values


def _arrays(node: Any) -> Any:
    if isinstance(node, Tensor):
        return _Array(node.contiguous().numpy())
    if isinstance(node, dict):
        return {key: _arrays(part) for key, part in node.items()}
    return tuple(_arrays(part) for part in node) if isinstance(node, tuple) else node


def _tensors(node: Any) -> Any:
    if isinstance(node, _Sent):
        return _tensors(node.answer)
    if isinstance(node, _Array):
        return torch.from_numpy(node.values)
    if isinstance(node, dict):
        return {key: _tensors(part) for key, part in node.items()}
    return tuple(_tensors(part) for part in node) if isinstance(node, tuple) else node
