"""Actors in processes of this machine: weights go through shared memory, steps through a pipe.

Commands and their answers go through a pipe of their own. `credits` counts the steps that the actor
may still make. An actor process steps where steps are allowed, and answers commands in between.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from embodied.core.children import safe_path
from embodied.training.actors.actor import EnvActor, sendable
from embodied.training.actors.transport import (
    END,
    LOOK,
    ActorDied,
    ActorSettings,
    ActorWeights,
    Collected,
    RemoteActor,
    Transport,
    Weights,
    as_bytes,
    decode,
    learned,
    load_flat,
)

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore


@dataclass
class Links:
    """`steps`: the end of the pipe that takes messages; `rng` [n] (uint8), in shared memory: the
    state of torch's generator in lockstep."""

    steps: Connection
    credits: Semaphore
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
        self.sent = 0

    def serve(self) -> None:
        while True:
            while self.pipe.poll(0 if self.actor.collector else None):
                command, arguments = self.pipe.recv()
                value = getattr(self.actor, command)(*arguments)
                self.pipe.send(("answer", value, self.sent))
            if self.actor.collector is not None and self._allowed():
                if self.lockstep:
                    torch.set_rng_state(self.links.rng.clone())
                message = self.actor.step()
                if self.lockstep:
                    self.links.rng.copy_(torch.get_rng_state())
                self.links.steps.send_bytes(message)
                self.sent += 1

    def _allowed(self) -> bool:
        if self.never_waits and self.begun:
            return True
        self.begun = self.links.credits.acquire(timeout=LOOK / 10)
        return self.begun


class Inbox:
    """Receives an actor's messages as they come, so that the actor never waits for room in `pipe`.

    `queue`: those that were not used yet; `received`: all since the start; `arrived` guards both.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.queue, self.received = pipe, deque[bytes](), 0
        self.arrived = threading.Condition()
        self.thread = threading.Thread(target=self._receive, daemon=True)
        self.thread.start()

    def _receive(self) -> None:
        """Until the actor has gone; a message that it did not finish is none."""
        with self.pipe, suppress(EOFError, OSError):
            while True:
                message = self.pipe.recv_bytes()
                with self.arrived:
                    self.queue.append(message)
                    self.received += 1
                    self.arrived.notify()


class ActorProcess(RemoteActor):
    """Runs `run`."""

    def __init__(self, settings: ActorSettings) -> None:
        # Actors start within a second: torch is imported once, in a process that they fork from.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["embodied.training.actors.processes"])
        rng = torch.get_rng_state().share_memory_()
        received, steps = context.Pipe(duplex=False)
        self.pipe, theirs = context.Pipe()
        self.lockstep, self.links = settings.lag == 0, Links(steps, context.Semaphore(0), rng)
        self.process: Any = context.Process(target=run, args=(settings, self.links, theirs))
        with safe_path():
            self.process.start()
        theirs.close()
        steps.close()  # the actor's is the only one, so that its death ends the inbox
        self.inbox, self.count = Inbox(received), 0
        # Before this process waits for its children at its end, also after an error.
        self.finalize = Finalize(self, end, (self.pipe, self.process), exitpriority=10)

    def send(self, command: str, *arguments: Any) -> None:
        try:
            self.pipe.send((command, arguments))
        except OSError as error:
            raise self._death() from error

    def answer(self) -> Any:
        while not self.pipe.poll(LOOK):
            if not self.process.is_alive() and not self.pipe.poll(0):
                raise self._death()
        try:
            kind, value, self.count = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if kind == "error":
            raise value
        inbox = self.inbox
        with inbox.arrived:
            while inbox.received < self.count and inbox.thread.is_alive():
                inbox.arrived.wait(LOOK)
        return value

    def allow(self, steps: int) -> None:
        if self.lockstep:
            self.links.rng.copy_(torch.get_rng_state())
        for _ in range(steps):
            self.links.credits.release()

    def take(self) -> Collected:
        inbox = self.inbox
        with inbox.arrived:
            while not inbox.arrived.wait_for(lambda: inbox.queue, LOOK):
                if self.pipe.poll(0):
                    self.answer()  # nothing was asked: it is an error
                elif not self.process.is_alive():
                    raise self._death()
            message = inbox.queue.popleft()
        if self.lockstep:
            torch.set_rng_state(self.links.rng.clone())
        return decode(message)

    @property
    def waiting(self) -> int:
        return len(self.inbox.queue)

    def messages(self) -> list[bytes]:
        inbox = self.inbox
        with inbox.arrived:
            late = inbox.received - self.count
            return list(inbox.queue)[: len(inbox.queue) - late]

    def remaining(self) -> list[bytes]:
        self.inbox.thread.join(END)
        return list(self.inbox.queue)

    def put_back(self, messages: list[bytes]) -> None:
        self.inbox.queue = deque(messages)

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


VERSION, SUMS = 0, 1  # the newest version, then one checksum for each slot


class SharedWeights(Weights, ActorWeights):
    """The learned tensors of `policy` in shared memory; pass it to a process as an argument.

    Two slots are written in turn and a reader never waits: it checks its copy's checksum, which
    depends on the version, and copies again where the writer was faster.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.version = 0  # of the writer
        self.sizes = [each.nbytes for each in learned(policy).values()]
        self.counters = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.slots = torch.zeros(2, sum(self.sizes), dtype=torch.uint8).share_memory_()

    def publish(self, policy: nn.Module) -> int:
        version = self.version = self.version + 1
        slot = self.slots[version % 2]
        for part, tensor in zip(slot.split(self.sizes), learned(policy).values(), strict=True):
            part.copy_(as_bytes(tensor))
        self.counters[SUMS + version % 2] = crc32(slot.numpy().data, version)
        self.counters[VERSION] = version
        return version

    def for_actor(self) -> SharedWeights:
        return self

    def load_into(self, policy: nn.Module, held: int) -> int:
        while (version := int(self.counters[VERSION])) != held:
            copy = self.slots[version % 2].clone()
            if crc32(copy.numpy().data, version) != int(self.counters[SUMS + version % 2]):
                continue
            load_flat(policy, copy)
            return version
        return held


class Processes(Transport):
    """Actors are processes of this machine."""

    def start(self, settings: ActorSettings) -> ActorProcess:
        return ActorProcess(settings)

    def weights(self, policy: nn.Module) -> SharedWeights:
        return SharedWeights(policy)

    def close(self) -> None:
        """Nothing is left."""
