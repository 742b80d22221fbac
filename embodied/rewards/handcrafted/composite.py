"""Mixed: rewards of several kinds added up, each weighted, cut off and brought to one scale.

    r = env_weight r_env + sum_k w_k clip((r_k - m_k) / s_k)

m_k and s_k are running moments of the term. A term may count only above a threshold, and less for
every further visit of the same observation within an episode (1 / visits^decay; Motif, Klissarov et
al., 2023). A term whose sum over episodes keeps being negatively correlated with success is warned
about once: it may be leading away from the task.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.build import ConfigError, Node, build
from embodied.core.env import Step, VecEnv
from embodied.core.reward import (
    AugmentsEnv,
    ObservesSteps,
    Reward,
    Scheduled,
    Stateful,
    accept_old_methods,
)
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.running_stats import RunningMeanStd
from embodied.rewards.wrappers.render_caption import augment_shared
from embodied.rewards.wrappers.visit_counts import VISITS, VisitCountWrapper


@dataclass(frozen=True)
class Term:
    """`reward`: its node (set its `own` to 0 where it has one); `clip`: largest size after
    normalising (0: none); `threshold`: smaller ones count as nothing; `decay`: see above (0: none).
    """

    reward: Node
    weight: float = 1.0
    clip: float = 0.0
    normalise: bool = False
    threshold: float | None = None
    decay: float = 0.0


@dataclass(frozen=True)
class Config:
    """`report`: episodes between looks at what goes with success, `suspect`: looks in a row before
    the warning (0: none, and n-step returns are possible); `visits`: the observation whose
    repetitions count (null: all that policies see)."""

    terms: dict[str, Term]
    env_weight: float = 1.0
    report: int = 50
    suspect: int = 3
    visits: str | None = None


@dataclass
class Record:
    """What a term's episodes were worth, beside whether they succeeded."""

    sums: list[list[float]] = field(default_factory=list)
    won: list[float] = field(default_factory=list)


class CompositeReward:
    """Frozen where all its parts are and none is normalised. It watches, notes and is told the
    time if one of its parts wants to."""

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
            raise ConfigError("reward.terms is empty: name at least one term")
        self.config = config
        self.parts: dict[str, Reward] = {
            name: accept_old_methods(
                build(
                    term.reward,
                    spec=spec,
                    gamma=gamma,
                    num_envs=num_envs,
                    device=device,
                    seed=seed + number,
                    folder=folder / name,
                )
            )
            for number, (name, term) in enumerate(config.terms.items())
        }
        self.moments = {
            n: RunningMeanStd(1, device) for n, t in config.terms.items() if t.normalise
        }
        self.frozen = not self.moments and all(part.frozen for part in self.parts.values())
        self.running = torch.zeros(num_envs, len(self.parts), dtype=torch.float64)
        self.won = torch.zeros(num_envs, dtype=torch.bool)
        self.record, self.bad, self.warned = (
            Record(),
            [0] * len(self.parts),
            [False] * len(self.parts),
        )
        self._take_up()

    def _take_up(self) -> None:
        """Only what a part is, the whole is: n-step returns and plain worlds stay possible."""
        parts = self.parts.values()
        if any(isinstance(part, AugmentsEnv) for part in parts) or self._decays:
            self.augment_env = self._augment_env
        if self.config.suspect or any(isinstance(part, ObservesSteps) for part in parts):
            self.observe_step = self._observe_step
        if any(isinstance(part, Scheduled) for part in parts):
            self.set_step = self._set_step

    @property
    def _decays(self) -> bool:
        return any(term.decay for term in self.config.terms.values())

    def _augment_env(self, env: VecEnv) -> VecEnv:
        for name, part in self.parts.items():
            env = augment_shared(env, part, f"reward.terms.{name}")
        return VisitCountWrapper(env, self.config.visits) if self._decays else env

    def _set_step(self, step: int) -> None:
        for part in self.parts.values():
            if isinstance(part, Scheduled):
                part.set_step(step)

    def _observe_step(self, rows: Tensors, who: Tensor, step: Step) -> None:
        for part in self.parts.values():
            if isinstance(part, ObservesSteps):
                part.observe_step(rows, who, step)
        if self.config.suspect and "success" in step.log:
            self._follow(rows, who.cpu(), step)

    def __call__(self, rows: Tensors) -> Tensor:
        return sum(self.components(rows).values(), start=0 * rows["reward"])

    def components(self, rows: Tensors) -> Tensors:
        parts = {name: self._term(name, rows) for name in self.parts}
        return {"env": self.config.env_weight * rows["reward"], **parts}

    def _term(self, name: str, rows: Tensors) -> Tensor:
        """One term as it counts, [N]."""
        term, value = self.config.terms[name], self.parts[name](rows)
        counts = torch.ones_like(value)
        if term.threshold is not None:
            counts = (value > term.threshold).to(value.dtype)
        if term.normalise:
            moments = self.moments[name]
            value = (value - moments.mean.float()) / moments.std
        if term.clip:
            value = value.clamp(-term.clip, term.clip)
        if term.decay:
            counts = counts / rows[f"next_obs/{VISITS}"].float().clamp(min=1) ** term.decay
        return term.weight * value * counts

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            if not part.frozen:
                learned = part.update(rows)
                metrics |= {f"{name}_{key}": value for key, value in learned.items()}
            value = part(rows).detach() if name in self.moments else None
            if value is not None:
                self.moments[name].update(value[:, None])
            counted = self._term(name, rows).detach()
            metrics[f"{name}"] = counted.mean()
            metrics[f"{name}_share"] = (counted != 0).float().mean()
            metrics[f"{name}_corr_env"] = correlation(counted, rows["reward"])
        return metrics

    def _follow(self, rows: Tensors, who: Tensor, step: Step) -> None:
        """Sums of the terms over each episode, beside its success."""
        with torch.no_grad():
            now = torch.stack([self._term(name, rows) for name in self.parts], 1)
        self.running.index_add_(0, who, now.cpu().double())
        self.won |= step.log["success"].cpu()
        ended = step.ended.cpu()
        if not ended.any():
            return
        self.record.sums += self.running[ended].tolist()
        self.record.won += self.won[ended].double().tolist()
        self.running[ended], self.won = 0.0, self.won & ~ended
        if len(self.record.won) >= self.config.report:
            self._look()

    def _look(self) -> None:
        sums, won = torch.tensor(self.record.sums), torch.tensor(self.record.won)
        self.record = Record()
        for number, name in enumerate(self.parts):
            against = float(correlation(sums[:, number], won)) < 0
            self.bad[number] = self.bad[number] + 1 if against else 0
            if self.bad[number] >= self.config.suspect and not self.warned[number]:
                self.warned[number] = True
                warnings.warn(
                    f"the reward's term {name} was lower in episodes that succeeded, "
                    f"{self.bad[number]} looks in a row: it may lead away from the task "
                    f"(reward.terms.{name}.weight=0 leaves it out)",
                    stacklevel=2,
                )

    def get_state(self) -> dict[str, Any]:
        return {
            "parts": {n: p.get_state() for n, p in self.parts.items() if isinstance(p, Stateful)},
            "moments": {name: each.get_state() for name, each in self.moments.items()},
            "running": self.running.clone(),
            "won": self.won.clone(),
            "record": {"sums": list(self.record.sums), "won": list(self.record.won)},
            "bad": list(self.bad),
            "warned": list(self.warned),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        for name, kept in state["parts"].items():
            part = self.parts[name]
            assert isinstance(part, Stateful), "the same parts as when it was saved"
            part.set_state(kept)
        for name, kept in state["moments"].items():
            self.moments[name].set_state(kept)
        self.running, self.won = state["running"].clone(), state["won"].clone()
        self.record = Record(list(state["record"]["sums"]), list(state["record"]["won"]))
        self.bad, self.warned = list(state["bad"]), list(state["warned"])


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Pearson's, 0 where one of them does not vary."""
    one, other = one.double() - one.double().mean(), other.double() - other.double().mean()
    size = one.norm() * other.norm()
    return torch.where(size > 1e-12, (one * other).sum() / size.clamp(min=1e-12), 0.0).float()
