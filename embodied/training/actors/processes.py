"""Actors in processes of this machine: steps and weights go through shared memory.

Commands and their answers go through a pipe between the two; transitions through a `ByteRing`.
`credits` counts the steps that the actor may still make, `items` the messages in the ring. An actor
process steps where steps are allowed, and answers commands in between.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from embodied.core.children import safe_path
from embodied.training.actors.actor import EnvActor, sendable
from embodied.training.actors.shared_memory import ByteRing, SharedWeights
from embodied.training.actors.transport import (
    END,
    LOOK,
    ActorDied,
    ActorSettings,
    Collected,
    RemoteActor,
    Transport,
    decode,
)

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore


@dataclass
class Links:
    """What both processes share. `rng` [n] (uint8): the state of torch's generator in lockstep."""

    ring: ByteRing
    credits: Semaphore
    items: Semaphore
    rng: Tensor


def run(settings: ActorSettings, links: Links, pipe: Connection) -> None:
    """The process: serves until the learner closes `pipe` or is gone; errors are sent to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's, which ends this process
    actor: EnvActor | None = None
    try:
        actor = EnvActor(settings)
        ProcessLoop(actor, settings.lag, links, pipe).serve()
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        pipe.send(("error", sendable(error), 0))
    finally:
        if actor is not None:
            actor.close()


class ProcessLoop:
    """Every answer has the number of messages that were sent before it."""

    def __init__(self, actor: EnvActor, lag: int | None, links: Links, pipe: Connection) -> None:
        self.actor, self.links, self.pipe = actor, links, pipe
        self.lockstep, self.never_waits, self.begun = lag == 0, lag is None, False

    def serve(self) -> None:
        while True:
            while self.pipe.poll(0 if self.actor.collector else None):
                command, arguments = self.pipe.recv()
                value = getattr(self.actor, command)(*arguments)
                self.pipe.send(("answer", value, self.links.ring.put_count))
            if self.actor.collector is not None and self._allowed():
                if self.lockstep:
                    torch.set_rng_state(self.links.rng.clone())
                message = self.actor.step()
                if self.lockstep:
                    self.links.rng.copy_(torch.get_rng_state())
                self._send(message)

    def _allowed(self) -> bool:
        if self.never_waits and self.begun:
            return True
        self.begun = self.links.credits.acquire(timeout=LOOK / 10)
        return self.begun

    def _send(self, message: bytes) -> None:
        """Wait while the ring is full."""
        while not self.links.ring.put(message):
            time.sleep(LOOK / 10)
            parent = mp.parent_process()
            if parent is None or not parent.is_alive():
                raise EOFError
        self.links.items.release()


RING = 64 * 2**20  # bytes


class ActorProcess(RemoteActor):
    """Runs `run`."""

    def __init__(self, settings: ActorSettings) -> None:
        # Actors start within a second: torch is imported once, in a process that they fork from.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["embodied.training.actors.processes"])
        rng = torch.get_rng_state().share_memory_()
        self.links = Links(ByteRing(RING), context.Semaphore(0), context.Semaphore(0), rng)
        self.lockstep = settings.lag == 0
        self.pipe, theirs = context.Pipe()
        self.process: Any = context.Process(target=run, args=(settings, self.links, theirs))
        with safe_path():
            self.process.start()
        self.queue = deque[bytes]()  # taken out of the ring, and not yet used
        theirs.close()
        # Before this process waits for its children at its end, also after an error.
        self.finalize = Finalize(self, end, (self.pipe, self.process), exitpriority=10)

    def send(self, command: str, *arguments: Any) -> None:
        try:
            self.pipe.send((command, arguments))
        except OSError as error:
            raise self._death() from error

    def answer(self) -> Any:
        while not self.pipe.poll(LOOK):
            self._drain(self.links.ring.put_count)  # a full ring would block the actor
            if not self.process.is_alive() and not self.pipe.poll(0):
                raise self._death()
        try:
            kind, value, count = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if kind == "error":
            raise value
        self._drain(count)
        return value

    def allow(self, steps: int) -> None:
        if self.lockstep:
            self.links.rng.copy_(torch.get_rng_state())
        for _ in range(steps):
            self.links.credits.release()

    def take(self) -> Collected:
        if not self.queue:
            while not self.links.items.acquire(timeout=LOOK):
                if self.pipe.poll(0):
                    self.answer()  # nothing was asked: it is an error
                elif not self.process.is_alive():
                    raise self._death()
            self.links.items.release()
            self._drain(self.links.ring.taken_count + 1)
        if self.lockstep:
            torch.set_rng_state(self.links.rng.clone())
        return decode(self.queue.popleft())

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.links.ring)

    def messages(self) -> deque[bytes]:
        return self.queue

    def remaining(self) -> list[bytes]:
        self._drain(self.links.ring.put_count)
        return list(self.queue)

    def put_back(self, messages: list[bytes]) -> None:
        self.queue = deque(messages)

    def _drain(self, count: int) -> None:
        """Move messages out of the ring until `count` of them were taken."""
        while self.links.ring.taken_count < count:
            # An actor may die between a message and its release.
            self.links.items.acquire(timeout=LOOK)
            message = self.links.ring.take()
            assert message is not None, "they were counted"
            self.queue.append(message)

    def close(self) -> None:
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


class Processes(Transport):
    """Actors are processes of this machine."""

    def start(self, settings: ActorSettings) -> ActorProcess:
        return ActorProcess(settings)

    def weights(self, policy: nn.Module) -> SharedWeights:
        return SharedWeights(policy)

    def close(self) -> None:
        """Nothing is left."""
