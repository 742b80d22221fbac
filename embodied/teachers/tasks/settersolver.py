"""Setter-Solver: a normalizing flow and its goals of a given feasibility."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Few,
    Fraction,
    NonNegative,
    PositiveFraction,
    Units,
)
from embodied.core.spec import Spec
from embodied.nn.optim import Adam, gradient_step
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats
from embodied.teachers.torch_teacher import TorchTeacher, linear, mlp, tensor

EDGE = 1e-4  # goals are clamped to [EDGE, 1 - EDGE] before the logit
UNIT = math.log(math.e - 1)  # softplus of it is 1

PLAN = 64  # goals that are generated at a time


class Highway(nn.Module):
    """Highway layer: h -> g relu(A h) + (1 - g) h, g = sigmoid(B h)."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__()
        self.change = linear(width, width, random)
        self.gate = linear(width, width, random)

    def forward(self, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(h))
        return gate * F.relu(self.change(h)) + (1 - gate) * h


class Coupling(nn.Module):
    """Affine coupling layer; elements with `kept` [d] (bool) true are unchanged. Initially close to
    the identity."""

    kept: Tensor

    def __init__(self, kept: Tensor, width: int, layers: int, random: np.random.Generator) -> None:
        super().__init__()
        self.register_buffer("kept", kept.float(), persistent=False)
        highways = [Highway(width, random) for _ in range(layers)]
        last = linear(width, 2 * len(kept), random, scale=0.1)
        self.net = nn.Sequential(linear(len(kept) + 1, width, random), nn.ReLU(), *highways, last)

    def parts(self, kept: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift [n, d]; 1 and 0 for kept elements."""
        raw, shift = self.net(torch.cat([kept, condition], 1)).chunk(2, 1)
        moved = 1 - self.kept
        scale = 0.01 + F.softplus(raw + UNIT)
        return scale * moved + self.kept, shift * moved

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.parts(x * self.kept, condition)
        return x * scale + shift, scale.log().sum(1)

    def inverse(self, y: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Input x [n, d] for output y [n, d], and the log-determinant [n] of `forward` at x."""
        scale, shift = self.parts(y * self.kept, condition)
        return (y - shift) / scale, scale.log().sum(1)


class Flow(nn.Module):
    """RealNVP: maps normal noise z and a feasibility f to goals in the unit cube.

    Dinh, Sohl-Dickstein and Bengio, "Density estimation using Real NVP", 2017. Each affine coupling
    keeps part of the elements and maps the others by x -> x s + t, s = 0.01 + softplus(a); a
    network computes (a, t) from the kept part and f. The last layer is a sigmoid.

        log p(g | f) = log N(z) - log |dg / dz|

    Each of `blocks` has three couplings, which keep the first half of the elements, the second
    half, and every other element.
    """

    def __init__(
        self, d: int, blocks: int, width: int, layers: int, random: np.random.Generator
    ) -> None:
        super().__init__()
        place = torch.arange(d)
        left, odd = place < d // 2, place % 2 == 1
        masks = [left, ~left, odd] if d > 1 else [left] * 3
        couplings = [Coupling(mask, width, layers, random) for mask in masks * blocks]
        self.couplings = couplings
        self.parts = nn.ModuleList(couplings)

    def forward(self, z: Tensor, feasibility: Tensor) -> tuple[Tensor, Tensor]:
        """Goals [n, d] in (0, 1) and log p(goal | feasibility) [n]; z [n, d], feasibility [n]."""
        condition = feasibility[:, None] * 2 - 1
        x, log = z, normal(z)
        for coupling in self.couplings:
            x, volume = coupling(x, condition)
            log = log - volume
        return torch.sigmoid(x), log - squeezed(x)

    def inverse(self, goals: Tensor, feasibility: Tensor) -> tuple[Tensor, Tensor]:
        """Noise z [n, d] that is mapped to `goals` [n, d], and log p(goals | feasibility) [n]."""
        condition = feasibility[:, None] * 2 - 1
        x = torch.logit(goals.clamp(EDGE, 1 - EDGE))
        log = -squeezed(x)
        for coupling in reversed(self.couplings):
            x, volume = coupling.inverse(x, condition)
            log = log - volume
        return x, log + normal(x)


def normal(z: Tensor) -> Tensor:
    """Log-density [n] of the standard normal distribution at z [n, d]."""
    return -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)


def squeezed(x: Tensor) -> Tensor:
    """Log-determinant [n] of the sigmoid's Jacobian at x [n, d]."""
    return (F.logsigmoid(x) + F.logsigmoid(-x)).sum(1)


@dataclass(frozen=True, kw_only=True)
class SetterSolverConfig(teacher.Config):
    """Settings of Setter-Solver. All goals are uniform before the first update."""

    solved: PositiveFraction = 0.5  # score from which an episode is a success
    every: Count = 100  # episodes between updates
    steps: Count = 50  # gradient steps of both networks per update
    batch: Count = 64  # episodes per gradient step
    memory: Count = 2_000  # newest episodes that are trained on
    lr: PositiveFraction = 3e-4  # Adam's learning rate
    random: Fraction = 0.1  # share of goals that are uniform over the box
    rarest: Annotated[float, Bound(above=0.0, below=0.5)] = 0.05  # feasibilities: this to 1 - this
    noise: NonNegative = 0.01  # e, noise on goals of successful episodes
    validity: NonNegative = 1.0  # weight of the validity loss
    feasibility: NonNegative = 1.0  # weight of the feasibility loss
    coverage: NonNegative = 1.0  # weight of the coverage loss
    judge: tuple[Count, ...] = (64, 64, 64)  # units of each hidden layer of the judge
    width: Units = 128  # units of the setter's hidden layers
    layers: CountOrZero = 3  # highway layers of a coupling
    blocks: Few = 3  # coupling layers of the setter


class SetterSolver(TorchTeacher):
    """Setter-Solver: a normalizing flow proposes goals of a given feasibility.

    Racaniere, Lampinen et al., "Automated curricula through setter-solver interactions", 2020. The
    judge J predicts success from the goal (cross-entropy). The setter S(z, f), f uniform, minimises
    the sum of its validity, feasibility and coverage losses (g: goals of successful episodes):

        E[-log p_S(g + U(0, e) | f)] + E[(J(S(z, f)) - logit f)^2] + E[log p_S(S(z, f) | f)]

    The memo of an episode is the requested feasibility of its goal (-1: a uniform goal).
    """

    remembered = ("plan", "rows", "fresh", "trained", "losses")

    def __init__(self, config: SetterSolverConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        d = len(self.space)
        self.judge = mlp((d, *config.judge, 1), self.random)
        self.setter = Flow(d, config.blocks, config.width, config.layers, self.random)
        self.modules = {"judge": self.judge, "setter": self.setter}
        self.optimizers = {
            f"{name}_optimizer": Adam(net.parameters(), config.lr, local=True)
            for name, net in self.modules.items()
        }
        self.plan: list[list[float]] = []
        self.rows: list[list[float]] = []  # points, requested feasibility, 1 for a success
        self.fresh = 0
        self.trained = 0
        self.losses: dict[str, float] = {}

    def one(self) -> tuple[Floats, Any]:
        if not self.trained or self.random.random() < self.config.random:
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
        rarest = self.config.rarest
        return rarest + (1 - 2 * rarest) * self.uniform(n)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        self.rows += np.column_stack([points, memos, scores >= self.config.solved]).tolist()
        del self.rows[: -self.config.memory]
        self.fresh += len(scores)
        if self.fresh >= self.config.every:
            self.fresh %= self.config.every
            self.train()

    def train(self) -> None:
        rows = tensor(self.rows)
        won = rows[rows[:, -1] > 0]
        for _ in range(self.config.steps):
            some = self.some(rows, self.config.batch)
            self.train_judge(some)
            self.train_setter(self.some(won, self.config.batch) if len(won) else None, some)
        self.trained += 1
        self.plan = []  # they are from the former setter

    def train_judge(self, rows: Tensor) -> None:
        logit = self.judge(rows[:, :-2])[:, 0]
        loss = F.binary_cross_entropy_with_logits(logit, rows[:, -1])
        gradient_step(self.optimizers["judge_optimizer"], loss)
        self.losses["judge"] = loss.item()

    def train_setter(self, won: Tensor | None, seen: Tensor) -> None:
        parts, settings = self.asked(seen), self.config
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
        goals, log = self.setter(latent, wanted)
        gap = self.judge(goals)[:, 0] - torch.logit(wanted)
        return {"feasibility": (gap**2).mean(), "coverage": log.mean()}

    def valid(self, won: Tensor) -> Tensor:
        """Validity loss: the negative log-likelihood of goals of successful episodes."""
        blurred = won[:, :-2] + self.config.noise * self.uniform(len(won), len(self.space))
        return -self.setter.inverse(blurred, self.wanted(len(won)))[1].mean()

    def metrics(self) -> dict[str, float]:
        return {"trained": float(self.trained), **self.losses}
