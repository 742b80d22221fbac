"""ResetDistribution: base class of teachers that choose the initial state of each episode.

A player (a trained policy or a scripted demonstrator) records trajectories; their simulator states
are the candidates. As with tasks, every episode has a ticket (its id), under which the choice is
kept until the outcome is known.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.remembered import Remembered
from embodied.core.spec import Spec
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.resets.reset_wrapper import DEFAULT_RESET, ResetStateWrapper
from embodied.teachers.resets.state_library import Trajectories, record_trajectories
from embodied.teachers.task_space import Floats
from embodied.teachers.teacher import Curriculum, Outcome, bounded

TRAINED = "embodied.policies.scripted.checkpoint.CheckpointDemonstrator"
GAMMA = 0.99
"""Discount of the return that followed a state."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of initial states. The player is the policy of `run`, or the demonstrator `player`;
    its states are recorded. The return of an episode is scored as a share of the player's from the
    same state."""

    run: str | None = None  # folder of a trained run, whose policy plays
    player: Node | None = None  # or a demonstrator
    episodes: Count = 10  # episodes that are recorded
    every: Count = 10  # steps between saved states
    usual: Fraction = 0.0  # share of episodes that start with the environment's own reset
    steps: CountOrZero = 0  # environment steps after which all episodes do; 0: never
    limit: CountOrZero = 0  # steps of episodes from a saved state; 0: the environment's limit
    signal: Literal["success", "return"] = "success"  # score of an episode


class ResetDistribution(Remembered, Curriculum, ABC):
    """Subclasses select trajectories (`select`), propose initial states (`propose`) and learn from
    the outcomes (`learn`).

    The attributes named in `remembered` and the trajectories are saved, so that a run resumes
    exactly even if the player is gone.
    """

    remembered = ("paths", "random", "pending", "clock", "issued", "dropped")
    needs = "states"

    def __init__(self, config: Any, spec: Spec, env: VecEnv, seed: int = 0) -> None:
        if config.run is not None and config.player is not None:
            raise ConfigError("give teacher.run or teacher.player, not both")
        if config.run is None and config.player is None:
            raise ConfigError(
                "this teacher needs a policy to record: teacher.run=RUN (a trained policy) or "
                "teacher.player={_target_: embodied.policies.scripted.fr3.Scripted, task: lift}"
            )
        self.config = config
        self.spec = spec
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.clock = 0
        self.issued = 0
        self.dropped = 0
        self.pending: dict[int, tuple[int, Any]] = {}
        trained: Node = {"_target_": TRAINED, "run": config.run}
        node: Node = trained if config.player is None else config.player
        player = build(node, Policy, spec=spec).eval()
        recorded = record_trajectories(player, env, config.episodes, config.every, seed, GAMMA)
        self.paths = self.select(recorded)
        self.set_up()

    @abstractmethod
    def select(self, paths: Trajectories) -> Trajectories:
        """The trajectories whose states are used as initial states."""

    def set_up(self) -> None:
        """Compute what depends on `paths`; called again after a resume."""

    @abstractmethod
    def propose(self, n: int) -> list[tuple[int, Any]]:
        """For `n` episodes: the index of the initial state, and a memo for `learn`."""

    @abstractmethod
    def learn(self, states: list[int], scores: Floats, memos: list[Any]) -> None:
        """Episodes from the states with these indices ended with `scores` [n] in [0, 1]."""

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        """Indices of the initial states of `n` episodes [n] (or DEFAULT_RESET), and their tickets
        [n] (int64)."""
        tickets = list(range(self.issued, self.issued + n))
        self.issued += n
        over = bool(self.config.steps) and self.clock >= self.config.steps
        usual = self.random.random(n) < (1.0 if over else self.config.usual)
        proposed = iter(self.propose(int((~usual).sum())))
        drawn = [(DEFAULT_RESET, None) if plain else next(proposed) for plain in usual]
        self.pending |= dict(zip(tickets, drawn, strict=True))
        return torch.tensor([state for state, _ in drawn]), torch.tensor(tickets)

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        """Report the outcomes of episodes `ticket` [n]. Episodes with a score that is NaN and those
        that started with the environment's own reset are not learned from."""
        known = [self.pending.pop(number) for number in ticket.tolist()]
        began = np.array([state for state, _ in known], np.intp)
        scores = self.scores(began, outcome)
        placed = began != DEFAULT_RESET
        lost = placed & ~np.isfinite(scores)
        if lost.any() and not self.dropped:
            warnings.warn(
                f"teacher: the {self.config.signal} of an episode is NaN; such episodes are "
                "ignored (teacher.signal=return if the environment reports no success)",
                stacklevel=2,
            )
        self.dropped += int(lost.sum())
        kept = np.flatnonzero(placed & ~lost)
        if len(kept):
            memos = [known[i][1] for i in kept]
            self.learn(began[kept].tolist(), scores[kept], memos)

    def scores(self, began: Any, outcome: Outcome) -> Floats:
        """[n] in [0, 1]; NaN where unknown."""
        if self.config.signal == "success":
            return bounded(outcome.success.double().cpu().numpy())
        ahead = self.paths.after[began].double().numpy()
        ret = outcome.ret.double().cpu().numpy()
        share = np.where(ahead > 0, ret / np.where(ahead > 0, ahead, 1), ret >= ahead)
        return bounded(np.where(np.isfinite(ret), share, np.nan))

    def count_steps(self, steps: int) -> None:
        """`steps` more environment steps were done."""
        self.clock += steps

    def wrap(self, env: VecEnv, episode_log: EpisodeLog | None) -> VecEnv:
        """`env`, whose episodes start from the states that this teacher samples."""
        return ResetStateWrapper(env, self, episode_log)

    def metrics(self) -> dict[str, float]:
        """Numbers to log."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        self.paths = Trajectories(**state["paths"])
        self.set_up()
        super().set_state(state)
