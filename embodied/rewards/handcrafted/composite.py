"""Composite reward: a weighted sum of rewards, each optionally normalised and clipped.

    r = env_weight r_env + sum_k w_k clip((r_k - m_k) / s_k)

m_k and s_k are the term's running mean and standard deviation. A term may be divided by
visits^decay for repeated visits of a state within an episode (Motif, Klissarov et al., 2023). A
term whose sum over episodes is repeatedly negatively correlated with success causes a warning: it
may be misspecified.

Reward curriculum: a weighted reward whose weights increase during training.

    w_k(step) = min(limit_k, start_k factor_k^(step // every))

From "Learning to Fly in Seconds" (Eschmann et al., 2024). Transitions are rewarded when they are
sampled, with the current weights, which equals rewriting all stored rewards at each change.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, NonNegative, Number
from embodied.core.build import ConfigError, Node, build, named_function
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import (
    AugmentsEnv,
    AugmentsEpisodes,
    FollowsPolicy,
    ObservesSteps,
    Reward,
    Scheduled,
    Stateful,
    SummedReward,
)
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.normalizers import RunningMeanStd
from embodied.rewards.wrappers.added_observations import VISITS, VisitCountWrapper, augment_shared


@dataclass(frozen=True)
class Term:
    """Settings of a term."""

    reward: Node  # the term's reward; set its `env_weight` to 0 if it has one
    weight: Number = 1.0  # factor of the term
    clip: NonNegative = 0.0  # bound of its size after normalisation; 0: none
    normalise: bool = False  # subtract the running mean and divide by the standard deviation
    decay: NonNegative = 0.0  # exponent of the visit count it is divided by; 0: not divided


@dataclass(frozen=True)
class Config:
    """Settings of the sum."""

    terms: dict[str, Term]  # terms of the sum, by name
    env_weight: Number = 1.0  # weight of the environment's reward
    report: Count = 50  # episodes between checks of the correlation with success
    suspect: CountOrZero = 3  # negative checks in a row until a warning; 0: none, allows n-step


@dataclass
class Record:
    """Sums of each term over episodes, and whether these succeeded."""

    sums: list[list[float]] = field(default_factory=list)
    won: list[float] = field(default_factory=list)


class CompositeReward(Remembered, SummedReward):
    """Frozen if all terms are frozen and none is normalised. It implements the optional protocols
    (`AugmentsEnv`, `ObservesSteps`, `Scheduled`) that one of its terms implements."""

    remembered = ("stateful", "moments", "running", "won", "record", "bad", "warned")

    def __init__(
        self,
        config: Config,
        spec: Spec,
        gamma: float,
        num_envs: int,
        device: torch.device,
        seed: int,
        folder: Path,
    ) -> None:
        if not config.terms:
            raise ConfigError("reward.terms is empty: set at least one term")
        self.config = config
        self.parts: dict[str, Reward] = {
            name: build(
                term.reward,
                Reward,
                spec=spec,
                gamma=gamma,
                num_envs=num_envs,
                device=device,
                seed=seed + number,
                folder=folder / name,
            )
            for number, (name, term) in enumerate(config.terms.items())
        }
        self.stateful = {n: p for n, p in self.parts.items() if isinstance(p, Stateful)}
        self.moments = {
            n: RunningMeanStd(1, device) for n, t in config.terms.items() if t.normalise
        }
        self.frozen = not self.moments and all(part.frozen for part in self.parts.values())
        self.running = torch.zeros(num_envs, len(self.parts), dtype=torch.float64)
        self.won = torch.zeros(num_envs, dtype=torch.bool)
        self.record = Record()
        self.bad = [0] * len(self.parts)
        self.warned = [False] * len(self.parts)
        self._adopt_protocols()

    def _adopt_protocols(self) -> None:
        """Implement only the protocols that a term needs: n-step returns and unwrapped environments
        remain possible otherwise."""
        parts = self.parts.values()
        for name, part in self.parts.items():
            if isinstance(part, FollowsPolicy):
                raise ConfigError(
                    f"reward.terms.{name} learns from the policy that maximises it alone, and is "
                    "no term of a sum"
                )
        if any(isinstance(part, AugmentsEnv) for part in parts) or self._decays:
            self.augment_env = self._augment_env
        if any(isinstance(part, AugmentsEpisodes) for part in parts):
            self.augment_episode = self._augment_episode
        if self.config.suspect or any(isinstance(part, ObservesSteps) for part in parts):
            self.observe_step = self._observe_step
        if any(isinstance(part, Scheduled) for part in parts):
            self.set_step = self._set_step

    @property
    def needs_local_env(self) -> bool:
        return any(part.needs_local_env for part in self.parts.values())

    @property
    def _decays(self) -> bool:
        return any(term.decay for term in self.config.terms.values())

    def _augment_env(self, env: VecEnv) -> VecEnv:
        for name, part in self.parts.items():
            env = augment_shared(env, part, f"reward.terms.{name}")
        return VisitCountWrapper(env) if self._decays else env

    def _augment_episode(self, obs: Tensors) -> Tensors:
        added: Tensors = {}
        for part in self.parts.values():
            if isinstance(part, AugmentsEpisodes):
                added |= part.augment_episode(obs)
        return added

    def _set_step(self, step: int) -> None:
        for part in self.parts.values():
            if isinstance(part, Scheduled):
                part.set_step(step)

    def _observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        for part in self.parts.values():
            if isinstance(part, ObservesSteps):
                part.observe_step(transitions, env_ids, step)
        if self.config.suspect and "success" in step.log:
            self._record_episodes(transitions, env_ids.cpu(), step)

    def components(self, transitions: Tensors) -> Tensors:
        parts = {name: self._term(name, transitions) for name in self.parts}
        return {"env": self.config.env_weight * transitions["reward"], **parts}

    def _term(self, name: str, transitions: Tensors) -> Tensor:
        """Term `name`, weighted, [N]."""
        term, value = self.config.terms[name], self.parts[name](transitions)
        if term.normalise:
            moments = self.moments[name]
            value = (value - moments.mean.float()) / moments.std
        if term.clip:
            value = value.clamp(-term.clip, term.clip)
        if term.decay:
            visits = transitions[f"next_obs/{VISITS}"].float().clamp(min=1)
            return term.weight * value * (1 / visits**term.decay)
        return term.weight * value

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            if not part.frozen:
                learned = part.update(transitions)
                metrics |= {f"{name}_{key}": value for key, value in learned.items()}
            if name in self.moments:
                self.moments[name].update(part(transitions).detach()[:, None])
            metrics[name] = self._term(name, transitions).detach().mean()
        return metrics

    def _record_episodes(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        """Add the terms to the sums of the running episodes; record finished episodes with their
        success."""
        with torch.no_grad():
            now = torch.stack([self._term(name, transitions) for name in self.parts], 1)
        self.running.index_add_(0, env_ids, now.cpu().double())
        self.won |= step.log["success"].cpu()
        ended = step.ended.cpu()
        if not ended.any():
            return
        self.record.sums += self.running[ended].tolist()
        self.record.won += self.won[ended].double().tolist()
        self.running[ended] = 0.0
        self.won = self.won & ~ended
        if len(self.record.won) >= self.config.report:
            self._check_correlations()

    def _check_correlations(self) -> None:
        sums, won = torch.tensor(self.record.sums), torch.tensor(self.record.won)
        self.record = Record()
        for number, name in enumerate(self.parts):
            against = float(correlation(sums[:, number], won)) < 0
            self.bad[number] = self.bad[number] + 1 if against else 0
            if self.bad[number] >= self.config.suspect and not self.warned[number]:
                self.warned[number] = True
                warnings.warn(
                    f"the reward term {name} was lower in successful episodes, "
                    f"{self.bad[number]} checks in a row: it may be misspecified "
                    f"(reward.terms.{name}.weight=0 removes it)",
                    stacklevel=2,
                )


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Pearson correlation of two samples [N]; 0 if one of them is constant."""
    one, other = one.double() - one.double().mean(), other.double() - other.double().mean()
    size = one.norm() * other.norm()
    return torch.where(size > 1e-12, (one * other).sum() / size.clamp(min=1e-12), 0.0).float()


@dataclass(frozen=True)
class ScaledConfig:
    """Settings of the scaled reward."""

    factor: Number = 1.0  # factor of the environment's reward


class Scaled(Reward):
    """The environment's reward times a constant, applied once, when transitions are stored.

    Evaluation is not affected. It tests how sensitive a learner's settings are to the scale.
    """

    frozen = True
    sums_steps = True

    def __init__(self, config: ScaledConfig) -> None:
        self.config = config

    def __call__(self, transitions: Tensors) -> Tensor:
        return self.config.factor * transitions["reward"]


@dataclass(frozen=True)
class ScheduleConfig:
    """Settings of the reward curriculum; weights are by name."""

    function: str  # dotted name of f(transitions, weights, **settings) -> [N]
    start: dict[str, Number]  # initial weights
    factor: dict[str, Number] = field(default_factory=dict)  # growth of a weight; default 1
    limit: dict[str, Number] = field(default_factory=dict)  # largest weight; default none
    every: Count = 100_000  # environment steps between increases
    settings: dict[str, Number] = field(default_factory=dict)  # further arguments of `function`


class ScheduledWeights(Reward):
    """Weights depend on the step alone, so there is no state to save."""

    frozen = False

    def __init__(self, config: ScheduleConfig) -> None:
        if unknown := ({*config.factor} | {*config.limit}) - {*config.start}:
            raise ConfigError(f"reward.start has no {min(unknown)}; it must name every weight")
        self.config = config
        self.function = named_function(config.function, "scheduled reward")
        self.bumps = -1
        self.set_step(0)

    def set_step(self, step: int) -> None:
        bumps = step // self.config.every
        if bumps == self.bumps:
            return
        self.bumps = bumps
        limit = self.config.limit
        factor = self.config.factor
        self.weights = {
            name: min(limit.get(name, float("inf")), value * factor.get(name, 1.0) ** bumps)
            for name, value in self.config.start.items()
        }
        self.metrics = {name: torch.tensor(value) for name, value in self.weights.items()}

    def __call__(self, transitions: Tensors) -> Tensor:
        return self.function(transitions, self.weights, **self.config.settings)

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        return self.metrics
