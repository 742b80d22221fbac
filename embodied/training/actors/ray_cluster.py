"""Actors on Ray: anywhere in a cluster, each with CPU cores of its own.

A step that an actor is allowed to make is a task; Ray runs the tasks of an actor in order. A task
has a reference to the weights of the moment at which it was allowed, which each machine fetches
once, so a run with a lag does not depend on how fast its actors are. A step comes back as one
object in which each leaf is one block (`encode`).
"""

from __future__ import annotations

import signal
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.training.actors.actor import (
    END,
    ActorDied,
    ActorSettings,
    ActorWeights,
    Collected,
    EnvActor,
    RemoteActor,
    Transport,
    Weights,
    decode,
    flat_weights,
    load_flat,
    sendable,
)
from embodied.training.actors.ray_connection import connected, imported

SLOW = 60.0  # s for an actor to begin before a warning
Reply = tuple[bool, Any]  # (whether the call succeeded, its value or the error)


class TaskWeights(ActorWeights):
    """The weights that came with a task: `version` and `flat` [n] (uint8)."""

    version = 0
    flat = np.zeros(0, np.uint8)

    def load_into(self, policy: nn.Module, held: int) -> int:
        if self.version != held:
            load_flat(policy, torch.tensor(self.flat))
        return self.version


class RayWorker:
    """In the actor's process. Ray calls its methods one after the other."""

    def __init__(self, settings: ActorSettings) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's
        self.settings = settings

    @cached_property
    def actor(self) -> EnvActor:
        """Built by the first call, which reports what fails in it."""
        return EnvActor(self.settings)

    def call(self, command: str, arguments: tuple[Any, ...], version: int, flat: Any) -> Reply:
        """A command of `EnvActor`, with version `version` of the weights."""
        try:
            self._receive(version, flat)
            return True, getattr(self.actor, command)(*arguments)
        except Exception as error:
            return False, sendable(error)

    def step(self, rng: Tensor | None, version: int, flat: Any) -> Reply:
        """A step as a message, and the state of torch's generator in lockstep (`rng` is given)."""
        try:
            self._receive(version, flat)
            if rng is not None:
                torch.set_rng_state(rng)
            message = self.actor.step()
            return True, (message, None if rng is None else torch.get_rng_state())
        except Exception as error:
            return False, sendable(error)

    def _receive(self, version: int, flat: Any) -> None:
        if flat is not None:
            weights = self.actor.weights
            assert isinstance(weights, TaskWeights)
            weights.version, weights.flat = version, flat


class RayWeights(Weights):
    """`ref`: the newest version in Ray's object store."""

    def __init__(self, ray: Any) -> None:
        self.ray, self.version, self.ref = ray, 0, None

    def publish(self, policy: nn.Module) -> int:
        self.version += 1
        self.ref = self.ray.put(flat_weights(policy).numpy())
        return self.version

    def for_actor(self) -> TaskWeights:
        return TaskWeights()


class RayActor(RemoteActor):
    """An actor of a Ray cluster; `queue` has the steps that it may make or made."""

    def __init__(self, ray: Any, settings: ActorSettings, cpus: int) -> None:
        self.ray, self.lockstep = ray, settings.lag == 0
        self.worker = ray.remote(RayWorker).options(num_cpus=cpus).remote(settings)
        self.begun = False
        self.commands = deque[Any]()
        self.queue = deque[Any]()  # a message, or a reference to a Reply of `step`

    def send(self, command: str, *arguments: Any) -> None:
        self.commands.append(self.worker.call.remote(command, arguments, *self._weights()))

    def answer(self) -> Any:
        return self._value(self.commands.popleft())

    def allow(self, steps: int) -> None:
        rng = torch.get_rng_state() if self.lockstep else None
        for _ in range(steps):
            self.queue.append(self.worker.step.remote(rng, *self._weights()))

    def take(self) -> Collected:
        return decode(self._message(self.queue.popleft()))

    @property
    def waiting(self) -> int:
        made = sum(isinstance(each, bytes) for each in self.queue)
        refs = [each for each in self.queue if not isinstance(each, bytes)]
        if not refs:
            return made
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return made + len(ready)

    def messages(self) -> list[bytes]:
        """All that were allowed: they were made before any command that came after them."""
        self.queue = deque(self._message(each) for each in self.queue)
        return list(self.queue)

    def remaining(self) -> list[bytes]:
        made = list[bytes]()
        with suppress(ActorDied):
            for each in self.queue:
                made.append(self._message(each))
        return made

    def put_back(self, messages: list[bytes]) -> None:
        self.queue = deque(messages)

    def close(self) -> None:
        with suppress(self.ray.exceptions.RayError):  # it may be dead
            self.ray.wait([self.worker.call.remote("close", (), 0, None)], timeout=END)
        self.ray.kill(self.worker)

    def _weights(self) -> tuple[int, Any]:
        assert self.weights is None or isinstance(self.weights, RayWeights)
        return (0, None) if self.weights is None else (self.weights.version, self.weights.ref)

    def _message(self, item: Any) -> bytes:
        if isinstance(item, bytes):
            return item
        message, rng = self._value(item)
        if rng is not None:
            torch.set_rng_state(rng)
        return message

    def _value(self, reference: Any) -> Any:
        """What a call returned; raises what it raised, ActorDied if the actor ended."""
        errors = self.ray.exceptions
        try:
            self._wait_for_a_place(reference)
            succeeded, value = self.ray.get(reference)
        except (errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ActorDied(f"an actor on Ray ended ({reason})") from error
        if not succeeded:
            raise value
        return value

    def _wait_for_a_place(self, reference: Any) -> None:
        if self.begun:
            return
        if not self.ray.wait([reference], timeout=SLOW, fetch_local=False)[0]:
            warnings.warn(
                f"an actor did not begin within {SLOW:g} s: `ray status` shows what the cluster "
                "waits for",
                stacklevel=2,
            )
        self.begun = True


class RayCluster(Transport):
    """The cluster of RAY_ADDRESS ("auto": this machine's), else one that is started here. `count`
    actors need `cpus` cores each; ConfigError if the cluster has fewer."""

    def __init__(self, count: int, cpus: int) -> None:
        self.ray, self.cpus = imported("data.actors_on=ray"), cpus
        self.ours = connected(self.ray)
        have = int(self.ray.cluster_resources().get("CPU", 0))
        if have < count * cpus:
            self.close()
            raise ConfigError(
                f"data.actors={count} with threads={cpus} need {count * cpus} cores, and the Ray "
                f"cluster has {have}: data.actors={have // cpus}"
            )

    def start(self, settings: ActorSettings) -> RayActor:
        node = {**settings.node, "device": "cpu"}
        return RayActor(self.ray, replace(settings, node=node), self.cpus)

    def weights(self, policy: nn.Module) -> RayWeights:
        return RayWeights(self.ray)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self.ours:
            self.ray.shutdown()
