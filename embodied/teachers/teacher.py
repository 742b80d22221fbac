"""Teacher: chooses the tasks of coming episodes from what came of earlier ones.

Many episodes are in flight at once, so every one has a ticket: what the teacher meant by it (which
region, which bound, which goal) waits there for the outcome, whatever happened meanwhile.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers.task_space import Floats, TaskSpace


@dataclass(frozen=True)
class Outcome:
    """What came of n episodes: undiscounted `ret` [n], `success` [n] (1 or 0; NaN where the world
    does not know), `length` [n] in steps.

    For a teacher that needs "estimates", what the student thought of them, as means over their
    steps: `gain` [n] of its advantages where they are above 0, `error` [n] of their size, `value`
    [n] of the values it expected (NaN where it was not asked).
    """

    ret: Tensor
    success: Tensor
    length: Tensor
    gain: Tensor | None = None
    error: Tensor | None = None
    value: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """`box`: bounds of task parameters by name, in [0, 1] (those not named: all of it). `signal`:
    what an episode's score in [0, 1] is, its success or its return between the two `returns`."""

    box: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    signal: Literal["success", "return"] = "success"
    returns: tuple[float, float] = (0.0, 1.0)


class Teacher(ABC):
    """Subclasses say what to play (`propose`) and what they learn from it (`learn`).

    Their random numbers come from `random` only, and what they remember from `remembered`, which is
    what `get_state` saves: a resumed run goes on exactly.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """Beyond a box of tasks. Of the world: "levels" (levels.py), "states" that can be saved
    (resets.py), "help" in its task (privilege.py), "counts" of what it has shown (surprise.py).
    With "estimates", outcomes come with the student's own, later than the episode's end, and
    `trains` is asked which episodes it learns from. With "rival" there is a second student
    (rivals.py)."""

    remembered: ClassVar[tuple[str, ...]] = ()
    """Attributes that change: numbers, text, arrays, tensors, lists and dictionaries of these."""

    def __init__(self, config: Any, spec: Spec, seed: int = 0) -> None:
        if config.returns[0] >= config.returns[1]:
            raise ConfigError(f"teacher.returns={list(config.returns)} should be [low, high]")
        self.config, self.space = config, TaskSpace(spec.task, config.box)
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.pending: dict[int, tuple[Floats, Any]] = {}
        self.issued, self.dropped = 0, 0

    @abstractmethod
    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        """Points [d] of the cube for `n` episodes, each with what to remember of it."""

    @abstractmethod
    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Episodes at `points` [n, d] ended with `scores` [n] in [0, 1]."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        """Task vectors [n, D] (float32) for `n` episodes, and their tickets [n] (int64)."""
        return self.issue(self.propose(n))

    def issue(self, proposed: list[tuple[Floats, Any]]) -> tuple[Tensor, Tensor]:
        """Tickets for what was proposed."""
        tickets = np.arange(self.issued, self.issued + len(proposed))
        self.issued += len(proposed)
        self.pending |= dict(zip(tickets.tolist(), proposed, strict=True))
        points = np.stack([point for point, _ in proposed])
        return torch.from_numpy(self.space.to_env(points)).float(), torch.from_numpy(tickets)

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        """Episodes `ticket` [n] have ended. One whose score is not a number teaches nothing."""
        known = [self.pending.pop(number) for number in ticket.tolist()]
        scores = self.scores(outcome)
        fine = np.atleast_1d(np.isfinite(scores).reshape(len(scores), -1).all(axis=1))
        if not fine.all():
            if not self.dropped:
                warnings.warn(
                    f"teacher: an episode's {self.config.signal} is not a number; such episodes "
                    "teach nothing (teacher.signal=return, if this world knows no success)",
                    stacklevel=2,
                )
            self.dropped += int((~fine).sum())
        kept = [each for each, good in zip(known, fine, strict=True) if good]
        if kept:
            points = np.stack([point for point, _ in kept])
            self.learn(points, scores[fine], [memo for _, memo in kept])

    def trains(self, ticket: Tensor) -> Tensor:
        """[n] (bool): whether the student learns from episodes `ticket` [n], or only plays them."""
        return torch.ones(len(ticket), dtype=torch.bool)

    def forget(self) -> None:
        """Whatever is running was broken off."""
        self.pending.clear()

    def scores(self, outcome: Outcome) -> Floats:
        """[n] in [0, 1] (some teachers: rows [n, k] of numbers); NaN where there is no number."""
        if self.config.signal == "success":
            return bounded(outcome.success.double().cpu().numpy())
        low, high = self.config.returns
        return bounded((outcome.ret.double().cpu().numpy() - low) / (high - low))

    def metrics(self) -> dict[str, float]:
        """What to log of it."""
        return {}

    def get_state(self) -> dict[str, Any]:
        own = {name: copy.deepcopy(getattr(self, name)) for name in self.remembered}
        return {
            "own": own,
            "random": self.random.bit_generator.state,
            "pending": dict(self.pending),
            "issued": self.issued,
            "dropped": self.dropped,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on exactly from `get_state`."""
        for name in self.remembered:
            setattr(self, name, copy.deepcopy(state["own"][name]))
        self.random.bit_generator.state = state["random"]
        self.pending = dict(state["pending"])
        self.issued, self.dropped = state["issued"], state["dropped"]


def bounded(scores: Floats) -> Floats:
    """Scores [n] within [0, 1]; NaN where they are infinite: that is no number to learn from."""
    return np.where(np.isfinite(scores), scores, np.nan).clip(0, 1)
