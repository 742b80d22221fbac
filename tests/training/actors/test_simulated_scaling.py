"""64 actors by a simulated clock: how far the pool's order of steps scales, without a cluster.

The pool is the real one. Its actors take recorded times for a step, and the learner recorded times
to read one; the learner makes no updates.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.training.actors import actor
from embodied.training.actors.actor import ActorSettings, Collected, RemoteActor
from embodied.training.actors.pool import ActorEnv, ActorPool
from tests.builders import Clock, make_policy

# ms of CPU time of a vector step of 16 Ants with a policy of 256 x 256: 40 quantiles of 250 steps.
STEP = [
    4.28, 4.39, 4.45, 4.50, 4.53, 4.54, 4.55, 4.56, 4.59, 4.62, 4.65, 4.66, 4.67, 4.69,
    4.72, 4.73, 4.73, 4.75, 4.78, 4.79, 4.81, 4.82, 4.83, 4.85, 4.87, 4.90, 4.93, 4.95,
    4.98, 5.00, 5.01, 5.03, 5.08, 5.12, 5.17, 5.23, 5.32, 5.41, 5.51, 5.79,
]  # fmt: skip
READ = 0.071  # ms to decode and join the message of one actor, likewise
SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.05)


class SimulatedActor(RemoteActor):
    """Makes its steps one after the other, each in a time drawn from `STEP`."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.clock, self.free = clock, 0.0
        self.random = torch.Generator().manual_seed(seed)
        self.made = deque[float]()  # when the steps that were not taken are made

    def send(self, command: str, *arguments: Any) -> None:
        self.asked = command

    def answer(self) -> Any:
        return SPEC if self.asked == "spec" else True

    def allow(self, steps: int) -> None:
        for _ in range(steps):
            drawn = int(torch.randint(len(STEP), (), generator=self.random))
            self.free = max(self.free, self.clock.now) + STEP[drawn]
            self.made.append(self.free)

    def take(self) -> Collected:
        self.clock.now = max(self.clock.now, self.made.popleft()) + READ
        zero, no = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
        obs = {"state": torch.zeros(1, 1)}
        return Collected({}, Step(obs, obs, zero, no, no, {}), None, 0)

    @property
    def waiting(self) -> int:
        return sum(made <= self.clock.now for made in self.made)

    def messages(self) -> list[bytes]:
        return []

    def remaining(self) -> list[bytes]:
        return []

    def put_back(self, messages: list[bytes]) -> None:
        assert not messages

    def close(self) -> None:
        """Nothing is left."""


class Simulated(actor.Transport):
    def __init__(self) -> None:
        self.clock = Clock(0.0)

    def start(self, settings: ActorSettings) -> SimulatedActor:
        return SimulatedActor(self.clock, settings.seed)

    def weights(self, policy: nn.Module) -> Any:
        return SimpleNamespace(version=0, publish=lambda policy: 1, for_actor=lambda: None)

    def close(self) -> None:
        """Nothing is left."""


def efficiency(actors: int, lag: int) -> float:
    """Steps of all actors together, as a share of what they would make alone."""
    return pace(actors, lag) / (actors * pace(1, lag))


def pace(actors: int, lag: int, steps: int = 200) -> float:
    """Steps of all actors together, per ms."""
    transport = Simulated()
    env = ActorEnv(ActorSettings({}, (), actors, 0, lag, "torch"), actors, transport)
    policy = make_policy("gaussian.Gaussian", SPEC, seed=None, hidden=[4])
    pool = ActorPool(env, policy, False, {}, torch.device("cpu"), lag)
    for _ in range(steps):
        pool.step()
    return actors * steps / transport.clock.now


def test_a_lag_lets_64_actors_make_nearly_64_times_the_steps_of_one() -> None:
    """Without one the learner waits for the slowest."""
    assert efficiency(64, 0) < efficiency(64, 1) < efficiency(64, 4)
    assert efficiency(64, 4) > 0.85


def test_a_learner_that_reads_too_slowly_is_the_limit() -> None:
    """Twice as many actors are no faster: 128 messages take longer than a step."""
    assert pace(128, 4) == pytest.approx(1 / READ, rel=0.05)
