"""MPTS, model predictive task sampling: a neural process predicts the risk of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Number,
    PositiveFraction,
    Units,
)
from embodied.core.spec import Spec
from embodied.nn.optim import Adam, gradient_step
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats
from embodied.teachers.torch_teacher import TorchTeacher, mlp, tensor

Posterior = tuple[Tensor, Tensor]
"""Means and standard deviations of z, [width] each."""


@dataclass(frozen=True, kw_only=True)
class MptsConfig(teacher.Config):
    """Settings of MPTS. Risk is the negative score, standardised over the batch."""

    batch: Annotated[int, Bound(2)] = 16  # B, tasks that are selected at a time
    candidates: Annotated[float, Bound(1.0)] = 2.5  # m, uniform candidates as a multiple of B
    hardest: Fraction = 0.5  # share selected by predicted risk, the others at random
    weights: tuple[Number, Number] = (1.0, 5.0)  # gamma0, gamma1: of mean and standard deviation
    draws: Count = 50  # predictions of which these are computed
    steps: Count = 10  # gradient steps on each batch of finished episodes
    lr: PositiveFraction = 5e-3  # Adam's learning rate
    beta: NonNegative = 1e-4  # weight of the KL term
    warmup: CountOrZero = 160  # first episodes, with uniform tasks
    width: Units = 10  # units of the hidden layers, and size of z


class Mpts(TorchTeacher):
    """MPTS (model predictive task sampling): samples the tasks with the highest predicted risk.

    Wang et al., "Model predictive task sampling for efficient and robust adaptation", 2025. A
    neural process predicts the risk of a task x: z ~ q(z | batch), risk = f(x, z). Its loss on the
    last batch of (task, risk) pairs is MSE + beta KL(q(z | batch) || q(z | previous batch)). Of m B
    candidates, the tasks with the highest gamma0 mean + gamma1 std of the risk over z are selected.
    The memo of an episode is its predicted risk (NaN: not predicted).
    """

    remembered = ("plan", "rows", "posterior", "drawn", "learned", "correlation")

    def __init__(self, config: MptsConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        d = len(self.space)
        h = config.width
        self.encoder = mlp((d + 1, h, h, h), self.random)
        self.heads = mlp((h, 2 * h), self.random)
        self.decoder = mlp((d + h, h, h, h, 1), self.random)
        self.modules = {"encoder": self.encoder, "heads": self.heads, "decoder": self.decoder}
        learned = nn.ModuleDict(self.modules).parameters()
        self.optimizers = {"adam": Adam(learned, config.lr, local=True)}
        self.plan: list[list[float]] = []  # points and predicted risks of the next episodes
        self.rows: list[list[float]] = []  # points, predicted risks, scores of finished ones
        self.posterior: Posterior = (torch.zeros(h), torch.ones(h))
        self.drawn = 0
        self.learned = 0
        self.correlation = 0.0

    def one(self) -> tuple[Floats, Any]:
        if not self.plan:
            self.plan = self.planned()
        row = self.plan.pop()
        return np.array(row[:-1]), row[-1]

    def planned(self) -> list[list[float]]:
        """Select the next `batch` tasks; in random order, each with its predicted risk."""
        settings, d = self.config, len(self.space)
        before = self.drawn
        self.drawn = self.drawn + settings.batch
        if before < settings.warmup or not self.learned:
            points = self.random.random((settings.batch, d))
            return [[*point, np.nan] for point in points.tolist()]
        points = self.random.random((round(settings.candidates * settings.batch), d))
        mean, std = self.predicted(points)
        order = np.argsort(-(settings.weights[0] * mean + settings.weights[1] * std))
        first = round(settings.hardest * settings.batch)
        others = self.random.permutation(order[first:])[: settings.batch - first]
        chosen = self.random.permutation(np.concatenate([order[:first], others]))
        return np.column_stack([points, mean])[chosen].tolist()

    @torch.no_grad()
    def predicted(self, points: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation [n] of the risk at `points` [n, d] over samples of z."""
        center, spread = self.posterior
        z = center + spread * self.normal(self.config.draws, len(center))
        risks = self.risk(tensor(points), z).double().numpy()
        return risks.mean(0), risks.std(0)

    def risk(self, points: Tensor, z: Tensor) -> Tensor:
        """Predicted risk [m, n] of tasks [n, d] for each z [m, width]."""
        shape = (len(z), len(points), -1)
        pairs = torch.cat([points[None].expand(shape), z[:, None].expand(shape)], 2)
        return self.decoder(pairs)[..., 0]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        self.rows += np.column_stack([points, memos, scores]).tolist()
        batch = self.config.batch
        while len(self.rows) >= batch:
            self.train(np.array(self.rows[:batch]))
            self.rows = self.rows[batch:]

    def train(self, rows: Floats) -> None:
        """Fit the model to one batch; its posterior becomes the prior of the next batch."""
        self.correlation = correlated(rows[:, -2], -rows[:, -1], self.correlation)
        points, risk = tensor(rows[:, :-2]), tensor(standard(-rows[:, -1]))
        for _ in range(self.config.steps):
            now = self.encoded(points, risk)
            z = now[0] + now[1] * self.normal(1, len(now[0]))
            error = ((self.risk(points, z)[0] - risk) ** 2).mean()
            loss = error + self.config.beta * divergence(now, self.posterior)
            gradient_step(self.optimizers["adam"], loss)
        with torch.no_grad():
            self.posterior = self.encoded(points, risk)
        self.learned += 1

    def encoded(self, points: Tensor, risk: Tensor) -> Posterior:
        """Posterior q(z | batch)."""
        pooled = self.encoder(torch.cat([points, risk[:, None]], 1)).mean(0)
        mean, raw = self.heads(pooled).chunk(2)
        return mean, 0.1 + 0.9 * torch.sigmoid(raw)

    def metrics(self) -> dict[str, float]:
        return {"learned": float(self.learned), "correlation": self.correlation}


def standard(values: Floats) -> Floats:
    """Standardise to mean 0 and standard deviation 1; zeros if all values are equal."""
    spread = values.std()
    return (values - values.mean()) / spread if spread > 1e-8 else np.zeros_like(values)


def divergence(p: Posterior, q: Posterior) -> Tensor:
    """KL(p || q) of diagonal normal distributions."""
    ratio = p[1] / q[1]
    return 0.5 * (ratio**2 + ((p[0] - q[0]) / q[1]) ** 2 - 1).sum() - ratio.log().sum()


def correlated(predicted: Floats, actual: Floats, otherwise: float) -> float:
    """Pearson correlation over the episodes with a prediction; `otherwise` if it is undefined."""
    known = np.isfinite(predicted)
    if known.sum() < 2:
        return otherwise
    a, b = standard(predicted[known]), standard(actual[known])
    return float((a * b).mean()) if a.any() and b.any() else otherwise
