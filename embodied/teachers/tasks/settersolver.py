"""Setter-Solver: a normalizing flow that proposes goals of a given feasibility.

Racaniere, Lampinen et al., "Automated curricula through setter-solver interactions", 2020. The
judge J predicts success from the goal (cross-entropy). The setter S(z, f), f uniform, minimises the
sum of its validity, feasibility and coverage losses (g: goals of successful episodes):

    E[-log p_S(g + U(0, e) | f)] + E[(J(S(z, f)) - logit f)^2] + E[log p_S(S(z, f) | f)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
)
from embodied.core.spec import Spec
from embodied.nn.fit import gradient_step
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats
from embodied.teachers.tasks.real_nvp import Flow
from embodied.teachers.torch_teacher import TorchTeacher, mlp, tensor

PLAN = 64  # goals that are generated at a time


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Settings of Setter-Solver. All goals are uniform before the first update."""

    solved: PositiveFraction = 0.5  # score from which an episode is a success
    every: Count = 100  # episodes between updates
    steps: Count = 50  # gradient steps of both networks per update
    batch: Count = 64  # episodes per gradient step
    memory: Count = 2_000  # newest episodes that are trained on
    lr: Positive = 3e-4  # Adam's learning rate
    random: Fraction = 0.1  # share of goals that are uniform over the box
    rarest: Annotated[float, Bound(above=0.0, below=0.5)] = 0.05  # feasibilities: this to 1 - this
    noise: NonNegative = 0.01  # e, noise on goals of successful episodes
    validity: NonNegative = 1.0  # weight of the validity loss
    feasibility: NonNegative = 1.0  # weight of the feasibility loss
    coverage: NonNegative = 1.0  # weight of the coverage loss
    old_latents: bool = False  # latents of observed goals, as in a re-implementation with 1 step
    judge: tuple[Count, ...] = (64, 64, 64)  # units of each hidden layer of the judge
    width: Count = 128  # units of the setter's hidden layers
    layers: CountOrZero = 3  # highway layers of a coupling
    blocks: Count = 3  # coupling layers of the setter


class SetterSolver(TorchTeacher):
    """The memo of an episode is the requested feasibility of its goal (-1: a uniform goal)."""

    remembered = ("plan", "rows", "fresh", "trained", "losses")

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        self.settings = config
        d = len(self.space)
        self.judge = mlp((d, *config.judge, 1), self.random)
        self.setter = Flow(d, config.blocks, config.width, config.layers, self.random)
        self.modules = {"judge": self.judge, "setter": self.setter}
        self.optimizers = {
            f"{name}_optimizer": torch.optim.Adam(net.parameters(), config.lr, fused=True)
            for name, net in self.modules.items()
        }
        self.plan: list[list[float]] = []
        self.rows: list[list[float]] = []  # points, requested feasibility, 1 for a success
        self.fresh = 0
        self.trained = 0
        self.losses: dict[str, float] = {}

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        return [self.one() for _ in range(n)]

    def one(self) -> tuple[Floats, Any]:
        if not self.trained or self.random.random() < self.settings.random:
            return self.random.random(len(self.space)), -1.0
        if not self.plan:
            self.plan = self.planned()
        goal = self.plan.pop()
        return np.array(goal[:-1]), goal[-1]

    @torch.no_grad()
    def planned(self) -> list[list[float]]:
        """Goals of the next episodes, with their requested feasibility; batched for speed."""
        wanted = self.wanted(PLAN)
        goals = self.setter(self.normal(PLAN, len(self.space)), wanted)[0]
        return torch.cat([goals, wanted[:, None]], 1).double().tolist()

    def wanted(self, n: int) -> Tensor:
        """Random feasibilities [n]."""
        rarest = self.settings.rarest
        return rarest + (1 - 2 * rarest) * self.uniform(n)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        won = scores >= self.settings.solved
        self.rows += np.column_stack([points, memos, won]).tolist()
        del self.rows[: -self.settings.memory]
        self.fresh += len(scores)
        if self.fresh >= self.settings.every:
            self.fresh %= self.settings.every
            self.train()

    def train(self) -> None:
        rows = tensor(self.rows)
        won = rows[rows[:, -1] > 0]
        for _ in range(self.settings.steps):
            some = self.some(rows, self.settings.batch)
            self.train_judge(some)
            self.train_setter(self.some(won, self.settings.batch) if len(won) else None, some)
        self.trained += 1
        self.plan = []  # they are from the former setter

    def train_judge(self, rows: Tensor) -> None:
        logit = self.judge(rows[:, :-2])[:, 0]
        loss = F.binary_cross_entropy_with_logits(logit, rows[:, -1])
        gradient_step(self.optimizers["judge_optimizer"], loss)
        self.losses["judge"] = loss.item()

    def train_setter(self, won: Tensor | None, seen: Tensor) -> None:
        parts, settings = self.asked(seen), self.settings
        if won is not None:
            parts["validity"] = self.valid(won)
        weights = {name: getattr(settings, name) for name in parts}
        loss = torch.stack([weights[name] * value for name, value in parts.items()]).sum()
        gradient_step(self.optimizers["setter_optimizer"], loss)
        self.losses |= {name: value.item() for name, value in parts.items()}

    def asked(self, seen: Tensor) -> dict[str, Tensor]:
        """Feasibility and coverage losses."""
        n, d = len(seen), len(self.space)
        wanted, latent = self.wanted(n), self.normal(n, d)
        if self.settings.old_latents:
            with torch.no_grad():
                latent = self.setter.inverse(seen[:, :-2], wanted)[0]
        goals, log = self.setter(latent, wanted)
        gap = self.judge(goals)[:, 0] - torch.logit(wanted)
        return {"feasibility": (gap**2).mean(), "coverage": log.mean()}

    def valid(self, won: Tensor) -> Tensor:
        """Validity loss: the negative log-likelihood of goals of successful episodes."""
        blurred = won[:, :-2] + self.settings.noise * self.uniform(len(won), len(self.space))
        return -self.setter.inverse(blurred, self.wanted(len(won)))[1].mean()

    def metrics(self) -> dict[str, float]:
        return {"trained": float(self.trained), **self.losses}
