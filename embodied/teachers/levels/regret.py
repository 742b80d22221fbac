"""Base class of teachers whose level generator is rewarded by the student's regret (PAIRED, CLUTR).

Dennis et al., "Emergent complexity and zero-shot transfer via unsupervised environment design",
2020. On every level of a round both agents play at least `plays` episodes; then

    regret = max(0, max_j R_j of the antagonist - mean_i R_i of the student)

is the generator's reward. `flexible`: the antagonist is whichever agent did better.

In PAIRED the adversary generates a level token by token (level_generator.py). The student
(protagonist) and the antagonist are both trained on the environment's reward.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.episode_log import EpisodeLog
from embodied.teachers.levels.level_generator import Grammar, LevelGenerator, Settings, improve
from embodied.teachers.levels.level_teacher import LevelSpace, LevelTeacher, TokenizedLevelSpace
from embodied.teachers.task_space import Floats
from embodied.teachers.task_wrapper import TaskWrapper
from embodied.teachers.teacher import Outcome, StepSecondAgent, TwoAgentTeacher
from embodied.teachers.torch_teacher import TorchTeacher, tensor

STUDENT, RIVAL = 0, 1


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Settings of rounds of levels. The generator is updated when both agents have played each
    level at least `plays` times; the faster agent plays more episodes meanwhile."""

    every: Count = 32  # levels per round, generated together
    plays: Count = 1  # least number of episodes of each agent per level
    flexible: bool = False  # the antagonist is whichever agent did better


class RegretTeacher(LevelTeacher, TorchTeacher, TwoAgentTeacher):
    """Subclasses generate levels (`generate`) and learn from their regret (`update_generator`).

    The score of an outcome is its undiscounted return; a memo is (round, level, agent).
    """

    remembered = ("round", "made", "given", "returns", "how")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.duel = config
        self.rival = AntagonistTasks(self, RIVAL)
        self.round = 0
        self.made: list[Floats] = []  # this round's levels
        self.given = [[], []]  # how often each was assigned to the student and the antagonist
        self.returns: list[list[list[float]]] = [[], []]
        self.how: dict[str, float] = {}

    @abstractmethod
    def generate(self, n: int) -> Floats:
        """Generate levels [n, D], all solvable."""

    @abstractmethod
    def update_generator(self, regrets: Floats) -> dict[str, float]:
        """Update the generator with the `regrets` [n] of its last levels; returns metrics."""

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        return self.assign(n, STUDENT)

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return self.choose(n)

    def assign(self, n: int, who: int) -> list[tuple[Floats, Any]]:
        """Levels [D] and memos for `n` episodes of agent `who`: the levels it has played least."""
        if not self.made:
            made = self.generate(self.duel.every)
            self.made = list(made)
            self.recent = list(made)
            self.given = [[0] * len(made), [0] * len(made)]
            self.returns = [[[] for _ in made], [[] for _ in made]]
        given, dealt = self.given[who], []
        for _ in range(n):
            place = min(range(len(given)), key=given.__getitem__)
            given[place] += 1
            dealt.append((self.made[place], (self.round, place, who)))
        return dealt

    def scores(self, outcome: Outcome) -> Floats:
        return outcome.ret.double().cpu().numpy()

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Ignores late episodes, of a round that is over."""
        for score, (number, place, who) in zip(scores.tolist(), memos, strict=True):
            if number == self.round:
                self.returns[who][place].append(score)
        least = min((len(each) for side in self.returns for each in side), default=0)
        if self.made and least >= self.duel.plays:
            self._close()

    def _close(self) -> None:
        student, rival = self.returns
        regrets = [regret(*pair, self.duel.flexible) for pair in zip(student, rival, strict=True)]
        means = (float(np.mean([np.mean(each) for each in side])) for side in self.returns)
        how = dict(zip(("student", "rival"), means, strict=True))
        self.how = {
            **how,
            "regret": float(np.mean(regrets)),
            **self.update_generator(np.array(regrets)),
        }
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
        """One step of the second agent, in its own environment, per step of the first."""
        step_second()
        return step


class AntagonistTasks:
    """Task queue of the antagonist (the second agent)."""

    def __init__(self, teacher: RegretTeacher, who: int) -> None:
        self.teacher = teacher
        self.who = who

    def sample(self, n: int) -> tuple[Tensor, Tensor]:
        return self.teacher.issue(self.teacher.assign(n, self.who))

    def update(self, ticket: Tensor, outcome: Outcome) -> None:
        self.teacher.update(ticket, outcome)

    def trains(self, ticket: Tensor) -> Tensor:
        return self.teacher.trains(ticket)

    def forget(self) -> None:
        self.teacher.forget(self.who)


def regret(student: list[float], rival: list[float], flexible: bool) -> float:
    """The regret of one level, from the returns of its episodes (see the module docstring)."""
    if flexible and max(student) > max(rival):
        student, rival = rival, student
    return max(0.0, max(rival) - math.fsum(student) / len(student))


@dataclass(frozen=True, kw_only=True)
class PairedConfig(Config):
    """Settings of PAIRED."""

    adversary: Settings = field(default_factory=Settings)  # PPO of the level generator


class Paired(RegretTeacher):
    """Keeps the tokens, log-probabilities and values of the round's levels until the PPO update."""

    remembered = ("words", "old", "value")

    def __init__(
        self, config: PairedConfig, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.settings = config.adversary
        self.spelled = spelled(self.levels)
        space = self.spelled
        grammar = Grammar(space.words, space.length, space.marks)
        self.builder = LevelGenerator(grammar, self.settings.width, self.random)
        self.modules = {"builder": self.builder}
        self.optimizers = {"adam": torch.optim.Adam(self.builder.parameters(), self.settings.lr)}
        self.words = np.zeros((0, grammar.length), np.int64)
        self.old = self.value = torch.zeros(0, grammar.length)

    def generate(self, n: int) -> Floats:
        self.words, self.old, self.value = self.builder.generate(n, self.random)
        return self.spelled.built(self.words, self.random)

    def update_generator(self, regrets: Floats) -> dict[str, float]:
        adam, batch = self.optimizers["adam"], (self.words, self.old, self.value)
        return improve(self.builder, adam, self.settings, *batch, tensor(regrets))


def spelled(levels: LevelSpace) -> TokenizedLevelSpace:
    """`levels`, checked to be a TokenizedLevelSpace; ConfigError otherwise."""
    if not isinstance(levels, TokenizedLevelSpace):
        raise ConfigError(
            "this teacher generates levels token by token; the levels of this environment have no "
            "token encoding (TokenizedLevelSpace): use env=maze"
        )
    return levels
