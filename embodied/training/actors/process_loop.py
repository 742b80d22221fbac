"""The loop of an actor process: steps where steps are allowed, and answers commands in between."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied.training.actors.actor import EnvActor, sendable
from embodied.training.actors.byte_ring import ByteRing
from embodied.training.actors.transport import LOOK, ActorSettings

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
