"""ActorProcess: one process that steps parallel envs, seen from the learner's process.

Commands and their answers go through a pipe between the two; transitions through a `ByteRing`.
`credits` counts the steps that the actor may still make, `items` the messages in the ring.
"""

from __future__ import annotations

import time
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch.multiprocessing as mp
from torch import Tensor

from embodied.core.build import Node, asked_packages
from embodied.training.actors.actor import run
from embodied.training.actors.byte_ring import ByteRing
from embodied.training.actors.collected import Collected, decode
from embodied.training.actors.links import LOOK, Links

RING = 64 * 2**20  # bytes
END = 20.0  # s for an actor to bring its environment to rest


class ActorDied(RuntimeError):
    """The process ended without a word, as after a kill."""


class ActorProcess:
    """Runs `actor.run` with the settings `node` of a run, for `num_envs` parallel envs seeded by
    `seed`. With lag None the actor never waits once it was allowed to step."""

    def __init__(
        self, node: Node, num_envs: int, seed: int, lag: int | None, product: str, rng: Tensor
    ) -> None:
        # Actors start within a second: torch is imported once, in a process that they fork from.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["embodied.training.actors.actor"])
        self.links = Links(
            ByteRing(RING), context.Semaphore(0), context.Semaphore(0), rng.clone().share_memory_()
        )
        self.pipe, theirs = context.Pipe()
        arguments = (node, asked_packages(), num_envs, seed, lag, product, self.links, theirs)
        self.process: Any = context.Process(target=run, args=arguments)
        self.process.start()
        self.fresh = True  # it was not allowed to step yet
        self.queue = deque[bytes]()  # taken out of the ring, and not yet used
        theirs.close()
        # Before this process waits for its children at its end, also after an error.
        self.finalize = Finalize(self, end, (self.pipe, self.process), exitpriority=10)

    def ask(self, command: str, *arguments: Any) -> Any:
        """The answer to a command; raises what the actor raised, ActorDied if it ended."""
        self.send(command, *arguments)
        return self.answer()

    def send(self, command: str, *arguments: Any) -> None:
        try:
            self.pipe.send((command, arguments))
        except OSError as error:
            raise self._death() from error

    def answer(self) -> Any:
        """The answer to the oldest command that waits for one."""
        while not self.pipe.poll(LOOK):
            self._drain(self.links.ring.put_count)  # a full ring would block the actor
            if not self.process.is_alive() and not self.pipe.poll(0):
                raise self._death()
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if kind == "error":
            raise value
        return value

    def take(self) -> Collected:
        """The next vector step; waits for it."""
        if self.queue:
            return decode(self.queue.popleft())
        while not self.links.items.acquire(timeout=LOOK):
            if self.pipe.poll(0):
                self.answer()  # nothing was asked: it is an error
            elif not self.process.is_alive():
                raise self._death()
        self.links.items.release()
        self._drain(self.links.ring.taken_count + 1)
        return decode(self.queue.popleft())

    def get_state(self) -> dict[str, Any]:
        """The collector's state (None: it cannot be saved), and the messages sent before it."""
        state, count = self.ask("get_state")
        self._drain(count)
        return {"collector": state, "waiting": [bytearray(each) for each in self.queue]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state`."""
        self.fresh = True  # it was not allowed to step yet
        self.queue = deque(bytes(each) for each in state["waiting"])
        if state["collector"] is None:
            self.ask("restart")
        else:
            self.ask("set_state", state["collector"])

    def allow(self, steps: int) -> None:
        """Let the actor make `steps` more steps."""
        for _ in range(steps):
            self.links.credits.release()

    @property
    def waiting(self) -> int:
        """Vector steps that were sent and not taken."""
        return len(self.queue) + len(self.links.ring)

    def _drain(self, count: int) -> None:
        """Move messages out of the ring until `count` of them were taken."""
        while self.links.ring.taken_count < count:
            self.links.items.acquire()
            message = self.links.ring.take()
            assert message is not None, "items counts the messages"
            self.queue.append(message)

    def close(self) -> None:
        """End the process; its environment is closed."""
        self.finalize()

    def _death(self) -> ActorDied:
        deadline = time.monotonic() + 1.0
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return ActorDied(f"an actor process ended (exit code {self.process.exitcode})")


def end(pipe: Connection, process: BaseProcess) -> None:
    """Close the pipe, which ends the actor's process; kill it where that takes too long."""
    pipe.close()
    process.join(END)
    if process.is_alive():
        process.kill()
        process.join()
