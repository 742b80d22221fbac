"""Teachers whose level generator is rewarded by the student's regret: PAIRED, CLUTR.

Dennis et al., "Emergent complexity and zero-shot transfer via unsupervised environment design",
2020. On every level of a round both agents play at least `plays` episodes; then

    regret = max(0, max_j R_j of the antagonist - mean_i R_i of the student)

is the generator's reward. `flexible`: the antagonist is whichever agent did better.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, NonNegative, Positive, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.nn.optim import Optimizer, gradient_step
from embodied.teachers import teacher
from embodied.teachers.teacher import (
    EpisodeLog,
    Floats,
    LevelSpace,
    LevelTeacher,
    Outcome,
    StepSecondAgent,
    TaskWrapper,
    TokenizedLevelSpace,
    TwoAgentTeacher,
)
from embodied.teachers.torch_teacher import TorchTeacher, linear, mlp

Words = NDArray[np.int64]


@dataclass(frozen=True)
class Grammar:
    """Levels of `length` T tokens out of `words` V; the last token means nothing (never a mark)."""

    words: int
    length: int
    marks: int


@dataclass(frozen=True)
class Settings:
    """PPO settings of the level generator."""

    lr: PositiveFraction = 1e-3  # Adam's learning rate
    epochs: Count = 5  # gradient steps on the whole batch
    gamma: Fraction = 0.995  # discount per token
    lam: Fraction = 0.95  # lambda of GAE
    clip: Positive = 0.2  # clip range of the probability ratio
    value_weight: NonNegative = 0.5  # weight of the value loss
    entropy: NonNegative = 0.005  # weight of the entropy bonus
    width: Units = 64  # units of the hidden layers


class LevelGenerator(nn.Module):
    """PAIRED's adversary: a policy that writes a level token by token, trained by PPO (Schulman et
    al., 2017). For a level of T tokens w_t whose episode return for the generator is g:

        delta_t = gamma V_{t+1} - V_t,  delta_T = g - V_T,  A_t = sum_k (gamma lambda)^k delta_{t+k}
        L = E[ -min(rho A, clip(rho, 1 - eps, 1 + eps) A) + c_v (V - V_old - A)^2 - c_h H ]

    Its observation is the set of tokens so far and their number. The first `marks` tokens each have
    a meaning of their own; the order of the others does not matter, so no recurrence is needed.
    """

    def __init__(self, grammar: Grammar, width: int, random: np.random.Generator) -> None:
        super().__init__()
        self.grammar = grammar
        size = (grammar.marks + 1) * grammar.words + 1
        self.trunk = nn.Sequential(mlp((size, width, width), random, nn.Tanh), nn.Tanh())
        # Nearly uniform token probabilities at first.
        self.word = linear(width, grammar.words, random, 0.01)
        self.worth = linear(width, 1, random)

    def forward(self, seen: Tensor, t: Tensor | int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [..., V] of word `t` (counted from 0) and values [...]."""
        hidden = self.trunk(seen)
        logits = self.word(hidden)
        nothing = torch.zeros(self.grammar.words)
        nothing[-1] = -torch.inf
        marks = torch.as_tensor(t < self.grammar.marks)[..., None]
        logits = torch.where(marks, logits + nothing, logits)
        return logits.log_softmax(-1), self.worth(hidden)[..., 0]

    def observations(self, words: Tensor) -> Tensor:
        """Observations before each of the tokens [n, T]: [n, T, (marks + 1) V + 1]."""
        grammar = self.grammar
        n, length = words.shape
        said = nn.functional.one_hot(words, grammar.words).float()
        shown = torch.zeros(n, length, (grammar.marks + 1), grammar.words)
        for mark in range(grammar.marks):
            shown[:, mark + 1 :, mark] = said[:, mark : mark + 1]
        rest = said[:, grammar.marks : -1].cumsum(1).clamp(max=1)
        shown[:, grammar.marks + 1 :, grammar.marks] = rest
        clock = (torch.arange(length) / length).expand(n, length)[..., None]
        return torch.cat([shown.flatten(2), clock], 2)

    @torch.no_grad()
    def generate(self, n: int, random: np.random.Generator) -> tuple[Words, Tensor, Tensor]:
        """n levels: tokens, their log-probabilities and the values before them, [n, T] each."""
        grammar = self.grammar
        lots = torch.from_numpy(random.random((grammar.length, n))).float()
        seen, rows = torch.zeros(n, (grammar.marks + 1) * grammar.words + 1), torch.arange(n)
        words = []
        logs = []
        values = []
        for t in range(grammar.length):
            seen[:, -1] = t / grammar.length
            log, value = self(seen, t)
            edge = log.exp().cumsum(1)
            word = (lots[t, :, None] * edge[:, -1:] >= edge).sum(1).clamp(max=grammar.words - 1)
            # At a mark the last word has no width, and rounding must not give it any.
            word = word.clamp(max=grammar.words - 2) if t < grammar.marks else word
            seen[rows, min(t, grammar.marks) * grammar.words + word] = 1
            words.append(word)
            logs.append(log[rows, word])
            values.append(value)
        return torch.stack(words, 1).numpy(), torch.stack(logs, 1), torch.stack(values, 1)


def advantages(value: Tensor, earned: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages [n, T] (GAE) of tokens with values [n, T]; `earned` [n] is the final reward."""
    following = torch.cat([gamma * value[:, 1:], earned[:, None]], 1)
    delta = following - value
    out, ahead = torch.empty_like(delta), torch.zeros_like(earned)
    for t in reversed(range(delta.shape[1])):
        ahead = delta[:, t] + gamma * lam * ahead
        out[:, t] = ahead
    return out


def surrogate(log: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's clipped surrogate loss, elementwise."""
    ratio = (log - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def improve(
    builder: LevelGenerator,
    optimizer: Optimizer,
    settings: Settings,
    words: Words,
    old: Tensor,
    value: Tensor,
    earned: Tensor,
) -> dict[str, float]:
    """PPO update on levels [n, T] of `generate` with rewards `earned` [n]; numbers to log."""
    raw = advantages(value, earned, settings.gamma, settings.lam)
    target, advantage = raw + value, normal(raw)
    said = torch.from_numpy(words)
    seen, clock = builder.observations(said), torch.arange(said.shape[1])
    entropy = torch.zeros(())
    for _ in range(settings.epochs):
        logs, values = builder(seen, clock)
        log = logs.gather(2, said[..., None])[..., 0]
        entropy = -(logs.exp() * logs.clamp(min=-100)).sum(2).mean()
        loss = surrogate(log, old, advantage, settings.clip).mean()
        loss = loss + settings.value_weight * (values - target).square().mean()
        gradient_step(optimizer, loss - settings.entropy * entropy)
    return {"entropy": float(entropy.detach())}


def normal(values: Tensor) -> Tensor:
    """Standardised values; zeros if all are equal."""
    centred = values - values.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)


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

    in_order = True
    remembered = ("round", "made", "given", "returns", "how")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        if not isinstance(levels, TokenizedLevelSpace):
            raise ConfigError(
                "this teacher generates levels token by token; the levels of this environment have "
                "no token encoding (TokenizedLevelSpace): use env=maze"
            )
        self.spelled = levels
        self.grammar = Grammar(levels.words, levels.length, levels.marks)
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
            made = self.generate(self.config.every)
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
        if self.made and least >= self.config.plays:
            self._close()

    def _close(self) -> None:
        student, rival = self.returns
        regrets = [regret(*pair, self.config.flexible) for pair in zip(student, rival, strict=True)]
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
        self.unlearned = {k: v for k, v in self.unlearned.items() if v[1][2] != who}

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
