"""Regret: levels that one student solves and another does not, made by somebody who is paid for it.

Source: Dennis et al., "Emergent complexity and zero-shot transfer via unsupervised environment
design", 2020. On every level of a round both students play at least `plays` episodes; then

    regret = max(0, max_j R_j of the rival - mean_i R_i of the student)

and whoever made the levels hears of it. `flexible`: the rival is whichever of the two did better.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.levels import level_teacher
from embodied.teachers.levels.level_teacher import LevelSpace, LevelTeacher
from embodied.teachers.levels.two_agent import StepSecondAgent
from embodied.teachers.task_space import Floats
from embodied.teachers.task_wrapper import TaskWrapper
from embodied.teachers.teacher import Outcome
from embodied.teachers.torch_teacher import TorchTeacher

STUDENT, RIVAL = 0, 1


@dataclass(frozen=True, kw_only=True)
class Config(level_teacher.Config):
    """`every` levels are made at once, and learned from when both students have played each of them
    `plays` times; who is faster plays more episodes."""

    every: int = 32
    plays: int = 1
    flexible: bool = False


class Regretful(LevelTeacher, TorchTeacher):
    """Subclasses make levels (`invent`) and learn from their regret (`blame`). An outcome's score
    is its return, in the world's own units; a memo is the round, the level in it, and who plays.
    """

    needs = LevelTeacher.needs | {"rival"}
    remembered = (*LevelTeacher.remembered, "round", "made", "given", "returns", "how")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        if min(config.every, config.plays) < 1:
            raise ConfigError("teacher.every and teacher.plays should be at least 1")
        self.duel = config
        self.rival = Desk(self, RIVAL)
        self.round = 0
        self.made: list[Floats] = []  # this round's levels
        self.given = [[], []]  # how often each was given to the student, and to the rival
        self.returns: list[list[list[float]]] = [[], []]
        self.how: dict[str, float] = {}

    @abstractmethod
    def invent(self, n: int) -> Floats:
        """Levels [n, D], fit to be played."""

    @abstractmethod
    def blame(self, regrets: Floats) -> dict[str, float]:
        """The last levels that were invented had `regrets` [n]; what to log of it."""

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        return self.deal(n, STUDENT)

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return self.choose(n)

    def deal(self, n: int, who: int) -> list[tuple[Floats, Any]]:
        """Levels [D] for `n` episodes of one of the two: those it was given least often."""
        if not self.made:
            self._open()
        given, dealt = self.given[who], []
        for _ in range(n):
            place = min(range(len(given)), key=given.__getitem__)
            given[place] += 1
            dealt.append((self.made[place], (self.round, place, who)))
        return dealt

    def scores(self, outcome: Outcome) -> Floats:
        return outcome.ret.double().cpu().numpy()

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Episodes of a round that is over are late: they teach nothing."""
        for score, (number, place, who) in zip(scores.tolist(), memos, strict=True):
            if number == self.round:
                self.returns[who][place].append(score)
        least = min((len(each) for side in self.returns for each in side), default=0)
        if self.made and least >= self.duel.plays:
            self._close()

    def _open(self) -> None:
        made = self.invent(self.duel.every)
        self.made, self.recent = list(made), list(made)
        self.given = [[0] * len(made), [0] * len(made)]
        self.returns = [[[] for _ in made], [[] for _ in made]]

    def _close(self) -> None:
        student, rival = self.returns
        regrets = [regret(*pair, self.duel.flexible) for pair in zip(student, rival, strict=True)]
        means = (float(np.mean([np.mean(each) for each in side])) for side in self.returns)
        how = dict(zip(("student", "rival"), means, strict=True))
        self.how = {**how, "regret": float(np.mean(regrets)), **self.blame(np.array(regrets))}
        self.round += 1
        self.made = []

    def forget(self, who: int = STUDENT) -> None:
        self.pending = {k: v for k, v in self.pending.items() if v[1][2] != who}

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **self.how, "rounds": float(self.round)}

    def antagonist_env(self, env: VecEnv, make_env: Callable[[], VecEnv]) -> VecEnv:
        return TaskWrapper(make_env(), self.rival)

    def protagonist_env(self, env: VecEnv, log: EpisodeLog | None) -> VecEnv:
        return TaskWrapper(env, self, log)

    def after_step(self, step: Step, step_second: StepSecondAgent) -> Step:
        """Both agents step alike, each in its own environment."""
        step_second()
        return step


class Desk:
    """Where the rival gets its tickets."""

    def __init__(self, teacher: Regretful, who: int) -> None:
        self.teacher, self.who = teacher, who

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        return self.teacher.issue(self.teacher.deal(n, self.who))

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        self.teacher.update(ticket, outcome)

    def trains(self, ticket: Tensor) -> Tensor:
        return self.teacher.trains(ticket)

    def forget(self) -> None:
        self.teacher.forget(self.who)


def regret(student: list[float], rival: list[float], flexible: bool) -> float:
    """Of one level, from the returns of its episodes."""
    if flexible and max(student) > max(rival):
        student, rival = rival, student
    return max(0.0, max(rival) - math.fsum(student) / len(student))
