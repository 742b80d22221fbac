"""Worker processes that simulate parts of a vectorised environment, one pipe each.

As `gymnasium.vector.AsyncVectorEnv`, but a worker holds several envs and any of its methods can be
called. Used by Crafter and ManiSkill.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.children import safe_path


def split(count: int, workers: int) -> list[tuple[int, int]]:
    """[low, high) of the envs of each worker: `count` envs over at most `workers` workers."""
    parts = np.array_split(np.arange(count), min(max(workers, 1), count))
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def _unchanged(answer: Any) -> Any:
    return answer


class Worker:
    """A process that builds `make(*given)` and calls its methods on request, in order.

    `make` is a function of a module, `given` can be pickled (shared memory of `context` too).
    `encode` is applied to each result in the worker process, `decode` in this one. The first
    `receive` waits until the object is built. The process ends with this one.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        given: tuple[Any, ...],
        encode: Callable[[Any], Any] = _unchanged,
        decode: Callable[[Any], Any] = _unchanged,
        context: Any = None,
    ) -> None:
        context = multiprocessing.get_context("spawn") if context is None else context
        self.name = name
        self.decode = decode
        self.connection, other = context.Pipe()
        arguments = (other, make, given, encode)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with safe_path():
            self.process.start()
        other.close()
        # Before multiprocessing waits for its processes: this one ends with its connection.
        Finalize(self, self.connection.close, exitpriority=1)

    def send(self, method: str, *given: Any) -> None:
        """Start a call; `receive` returns its result."""
        try:
            self.connection.send((method, given))
        except ConnectionError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        """The result of the oldest call. Raises what the call raised; RuntimeError if the process
        has ended."""
        try:
            answer, error = self.connection.recv()
        except (EOFError, ConnectionError) as stop:
            self.process.join(1)
            raise self._ended() from stop
        if error is not None:
            raise error
        return self.decode(answer)

    def _ended(self) -> RuntimeError:
        code = self.process.exitcode
        return RuntimeError(f"a {self.name} worker process ended (exit code {code}); try workers=0")

    def close(self) -> None:
        """Let the process end; it is killed after 5 s."""
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def receive_all(parts: Sequence[Any]) -> list[Any]:
    """The result of every worker; the first error is raised once all have answered."""
    answers: list[Any] = []
    first: Exception | None = None
    for part in parts:
        try:
            answers.append(part.receive())
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
    return answers


class WorkerPool:
    """Parallel envs, those from `bounds[i]` in `parts[i]`, which has the methods of `Worker`."""

    bounds: list[tuple[int, int]]
    parts: Sequence[Any]

    def call(self, method: str) -> list[Any]:
        """The results of `method` of every part."""
        for part in self.parts:
            part.send(method)
        return receive_all(self.parts)

    def read(self) -> dict[str, NDArray[Any]]:
        """The state of all envs, arrays [n, ...]."""
        states = self.call("read")
        return {key: np.concatenate([state[key] for state in states]) for key in states[0]}

    def write(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore a state of `read`."""
        for part, (low, high) in zip(self.parts, self.bounds, strict=True):
            part.send("write", {key: value[low:high] for key, value in state.items()})
        receive_all(self.parts)

    def ask(self, method: str, row: int, *more: Any) -> Any:
        """Call `method` of the part that has env `row`."""
        count = self.bounds[-1][1]
        if not 0 <= row < count:
            raise ValueError(f"there is no env {row}; envs are 0 to {count - 1}")
        number = next(n for n, (low, high) in enumerate(self.bounds) if low <= row < high)
        self.parts[number].send(method, row - self.bounds[number][0], *more)
        return self.parts[number].receive()

    def close(self) -> None:
        for part in self.parts:
            part.close()


def _serve(
    connection: Connection,
    make: Callable[..., Any],
    given: tuple[Any, ...],
    encode: Callable[[Any], Any],
) -> None:
    # Ctrl-C, and a batch system's SIGTERM to all processes, are handled by the parent process: a
    # run saves its state first, for which it needs its environments.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        target = make(*given)
    except Exception as error:  # raised in the parent process
        connection.send((None, error))
        return
    connection.send((None, None))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = encode(getattr(target, method)(*arguments)), None
        except Exception as error:  # raised in the parent process
            reply = None, error
        connection.send(reply)
