"""Teacher: base class of automatic curriculum learning; samples the task of each episode.

Many episodes run in parallel. Each has a ticket (its id), under which the teacher's memo (which
region, bound or goal it sampled) is kept until the outcome is known.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Fraction, Number
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.task_space import Floats, TaskSpace


@dataclass(frozen=True)
class Outcome:
    """Outcomes of n episodes: undiscounted return `ret` [n], `success` [n] (1, 0 or NaN if
    unknown), `length` [n] in steps.

    For teachers with `uses_estimates`, also means over the steps of an episode of the student's
    positive advantages (`gain` [n]), absolute advantages (`error` [n]) and values (`value` [n]);
    NaN if unknown.
    """

    ret: Tensor
    success: Tensor
    length: Tensor
    gain: Tensor | None = None
    error: Tensor | None = None
    value: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that all teachers of tasks have."""

    box: Mapping[str, tuple[Fraction, Fraction]] = field(default_factory=dict)  # ranges by name
    signal: Literal["success", "return"] = "success"  # score of an episode
    returns: tuple[Number, Number] = (0.0, 1.0)  # returns that have the scores 0 and 1


Need = Literal["tasks", "levels", "states", "help", "counts"]


class Curriculum:
    """The role of `teacher=`: a `Teacher`, a distribution of initial states, or a second agent."""

    needs: ClassVar[Need] = "tasks"
    """What the environment must have: a task vector, `levels` (`HasLevels`), `states` that can be
    saved, `help` (privileged assistance in the task vector), or an episodic density of observations
    (`counts`)."""
    uses_estimates: ClassVar[bool] = False
    """Whether outcomes come with the student's estimates, after the end of the episode, and
    `trains` selects the episodes to learn from."""

    def metrics(self) -> dict[str, float]:
        """Metrics to log."""
        return {}


class Teacher(Remembered, Curriculum, ABC):
    """Subclasses sample tasks (`propose`) and learn from the outcomes (`learn`).

    They take random numbers from `self.random` only and name their state in `remembered`, so that a
    run resumes exactly.
    """

    remembered = ("random", "pending", "issued", "dropped")

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        if config.returns[0] >= config.returns[1]:
            raise ConfigError(
                f"teacher.returns={list(config.returns)} should be [low, high] with low < high"
            )
        self.config: Any = config
        self.space = TaskSpace(spec.task, config.box)
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.pending: dict[int, tuple[Floats, Any]] = {}
        self.issued = 0
        self.dropped = 0

    @abstractmethod
    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        """For `n` episodes: a point [d] of the unit cube and a memo for `learn`."""

    @abstractmethod
    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Update from finished episodes at `points` [n, d] with `scores` [n] in [0, 1]."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        """Task vectors [n, D] (float32) for `n` episodes, and their tickets [n] (int64)."""
        return self.issue(self.propose(n))

    def issue(self, proposed: list[tuple[Floats, Any]]) -> tuple[Tensor, Tensor]:
        """Task vectors and tickets of proposed points; stores their memos."""
        tickets = np.arange(self.issued, self.issued + len(proposed))
        self.issued += len(proposed)
        self.pending |= dict(zip(tickets.tolist(), proposed, strict=True))
        points = np.stack([point for point, _ in proposed])
        return torch.from_numpy(self.space.to_env(points)).float(), torch.from_numpy(tickets)

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        """Report the outcomes of episodes `ticket` [n]. Episodes with a NaN score are ignored."""
        known = [self.pending.pop(number) for number in ticket.tolist()]
        scores = self.scores(outcome)
        fine = np.atleast_1d(np.isfinite(scores).reshape(len(scores), -1).all(axis=1))
        if not fine.all():
            if not self.dropped:
                warnings.warn(
                    f"teacher: the {self.config.signal} of an episode is NaN; such episodes are "
                    "ignored (teacher.signal=return if the environment reports no success)",
                    stacklevel=2,
                )
            self.dropped += int((~fine).sum())
        kept = [each for each, good in zip(known, fine, strict=True) if good]
        if kept:
            points = np.stack([point for point, _ in kept])
            self.learn(points, scores[fine], [memo for _, memo in kept])

    def trains(self, ticket: Tensor) -> Tensor:
        """[n] (bool): whether the student trains on episodes `ticket` [n]."""
        return torch.ones(len(ticket), dtype=torch.bool)

    def forget(self) -> None:
        """Drop the running episodes: they were interrupted."""
        self.pending.clear()

    def scores(self, outcome: Outcome) -> Floats:
        """[n] in [0, 1] (some teachers: [n, k]); NaN if unknown."""
        if self.config.signal == "success":
            return bounded(outcome.success.double().cpu().numpy())
        low, high = self.config.returns
        return bounded((outcome.ret.double().cpu().numpy() - low) / (high - low))


def bounded(scores: Floats) -> Floats:
    """Scores [n] clipped to [0, 1]; NaN where they are infinite."""
    return np.where(np.isfinite(scores), scores, np.nan).clip(0, 1)


class StepSecondAgent(Protocol):
    """Steps all parallel envs of the second agent once, and updates it if an update is due.

    `obs`: its current observation; needed if the environment has changed since its last step.
    """

    def __call__(self, obs: Tensors | None = None) -> None: ...


@runtime_checkable
class TwoAgentTeacher(Protocol):
    """Protocol of teachers with a second agent, which the training loop trains too.

    The teacher makes the environments of both agents and decides after which steps of the first
    agent the second one is stepped. The second agent has the same kind of policy and learner as the
    first. Steps of both agents count as steps of the run. A run calls `antagonist_env`, then
    `protagonist_env`, and `after_step` after each step.
    """

    def antagonist_env(self, env: VecEnv, make_env: Callable[[], VecEnv]) -> VecEnv:
        """The second agent's environment. `env` is the run's environment; `make_env` makes another
        one like it."""
        ...

    def protagonist_env(self, env: VecEnv, log: EpisodeLog | None) -> VecEnv:
        """The first agent's environment."""
        ...

    def after_step(self, step: Step, step_second: StepSecondAgent) -> Step:
        """Called after `step` of the first agent: steps the second agent as often as is due, and
        returns the step that the first agent is trained on (with a changed reward, for example)."""
        ...

    def metrics(self) -> dict[str, float]: ...
