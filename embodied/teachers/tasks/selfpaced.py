"""Self-paced deep RL (SPDL): a Gaussian over tasks that moves towards a target as values grow.

Klink, D'Eramo, Peters and Pajarinen, "Self-paced deep reinforcement learning", 2020. Each update is
a natural gradient step with line search on

    max_nu mean_i [p_nu(c_i) / p_old(c_i) V_i] - alpha KL(p_nu || target)
    subject to KL(p_old || p_nu) <= eps,   alpha = zeta max(0, mean V) / KL(p_nu || target)

The divergence of two normal distributions with means m and covariances S:

    KL(p || q) = (tr(S_q^-1 S_p) + (m_q - m_p)' S_q^-1 (m_q - m_p) - d + log |S_q| - log |S_p|) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero, Fraction, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, Outcome, named_task

MOST_ALPHA, LEAST_KL = 1e5, 1e-10


class Gaussian(NamedTuple):
    """`mean` [d]; `factor` [d, d]: the Cholesky factor of the covariance, with the logarithm of its
    diagonal in place of the diagonal."""

    mean: Tensor
    factor: Tensor

    def root(self) -> Tensor:
        """The Cholesky factor [d, d] of the covariance."""
        return torch.tril(self.factor, -1) + torch.diag(torch.diagonal(self.factor).exp())

    def flat(self) -> Tensor:
        """Parameter vector [d + d + d (d - 1) / 2]: mean, log-diagonal, elements below it."""
        below = torch.tril_indices(len(self.mean), len(self.mean), -1)
        return torch.cat([self.mean, torch.diagonal(self.factor), self.factor[*below]])

    @classmethod
    def unflat(cls, flat: Tensor, d: int) -> Gaussian:
        below = torch.tril_indices(d, d, -1)
        factor = torch.diag(flat[d : 2 * d]).index_put((below[0], below[1]), flat[2 * d :])
        return cls(flat[:d], factor)


def log_density(gaussian: Gaussian, x: Tensor) -> Tensor:
    """Log-density [n] at x [n, d]."""
    d = len(gaussian.mean)
    off = torch.linalg.solve_triangular(gaussian.root(), (x - gaussian.mean).T, upper=False)
    volume = torch.diagonal(gaussian.factor).sum()
    return -0.5 * (off**2).sum(0) - volume - 0.5 * d * math.log(2 * math.pi)


def kl(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p || q)."""
    d, root = len(p.mean), q.root()
    both = torch.cat([p.root(), (p.mean - q.mean)[:, None]], 1)
    spread = torch.linalg.solve_triangular(root, both, upper=False)
    volume = torch.diagonal(q.factor).sum() - torch.diagonal(p.factor).sum()
    return 0.5 * ((spread**2).sum() - d) + volume


class HasTaskValues(Protocol):
    """A student with value estimates of tasks (`teacher.value=critic`)."""

    def values(self, tasks: Floats) -> Floats:
        """Values [n] of the first observations of episodes with task vectors `tasks` [n, D], in the
        environment's units of reward. The observation has to contain the task."""
        ...


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Settings of SPDL. `value` "critic" is the student's estimate (`HasTaskValues`), "score" the
    score of an episode, "discounted" gamma^length times it (the discounted return if the reward
    comes at the end). The target's task parameters that `hard` does not name are in the middle."""

    every: Annotated[int, Bound(2)] = 100  # episodes between updates
    value: Literal["critic", "score", "discounted"] = "score"  # V of an episode
    gamma: Fraction = 0.99  # discount per step, for value=discounted
    eps: Positive = 0.1  # largest KL divergence of an update
    zeta: NonNegative = 0.05  # weight of the KL divergence to the target
    offset: CountOrZero = 0  # first updates, with alpha = 0
    easy: Mapping[str, Fraction] = field(default_factory=dict)  # initial mean; others are random
    width: Positive = 0.1  # initial standard deviation
    hard: Mapping[str, Fraction] = field(default_factory=dict)  # mean of the target, by name
    spread: Positive = 0.25  # standard deviation of the target
    damping: NonNegative = 1e-2  # added to the Fisher matrix's diagonal
    tries: Count = 10  # halved steps of a line search


class SelfPaced(teacher.Teacher):
    """The memo of an episode: the sampled task (before clipping to the box) and its log-density."""

    remembered = ("mean", "factor", "drawn", "updates", "alpha", "step_kl")
    student: HasTaskValues | None

    def __init__(
        self, config: Config, spec: Spec, seed: int = 0, student: HasTaskValues | None = None
    ) -> None:
        super().__init__(config, spec, seed)
        self.student = student
        d = len(self.space)
        easy = named_task(self.space, config.easy, math.nan, "easy")
        self.mean = torch.from_numpy(np.where(np.isnan(easy), self.random.random(d), easy))
        self.factor = torch.eye(d).double() * math.log(config.width)
        hard = torch.from_numpy(named_task(self.space, config.hard, 0.5, "hard"))
        self.target = Gaussian(hard, torch.eye(d).double() * math.log(config.spread))
        self.drawn: list[list[float]] = []  # sampled task, its log-density, score
        self.updates = 0
        self.alpha = 0.0
        self.step_kl = 0.0

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        now = self.now()
        normal = torch.from_numpy(self.random.standard_normal((n, len(self.space))))
        raw = now.mean + normal @ now.root().T
        logs = log_density(now, raw).tolist()
        memos = [[*where, log] for where, log in zip(raw.tolist(), logs, strict=True)]
        return list(zip(raw.clamp(0, 1).numpy(), memos, strict=True))

    def now(self) -> Gaussian:
        return Gaussian(self.mean, self.factor)

    def scores(self, outcome: Outcome) -> Floats:
        scores = super().scores(outcome)
        if self.config.value != "discounted":
            return scores
        return scores * self.config.gamma ** outcome.length.double().cpu().numpy()

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        self.drawn += [[*memo, score] for memo, score in zip(memos, scores.tolist(), strict=True)]
        if len(self.drawn) >= self.config.every:
            rows = torch.tensor(self.drawn, dtype=torch.float64)
            where = rows[:, :-2]
            logs = rows[:, -2]
            self.advance(where, logs, self.values(where, rows[:, -1]))
            self.drawn = []

    def values(self, where: Tensor, scores: Tensor) -> Tensor:
        """V [n] of the episodes sampled at `where` [n, d] with these scores [n]."""
        if self.config.value != "critic":
            return scores
        if self.student is None:
            raise ConfigError(
                "teacher.value=critic needs a student with value estimates; set "
                "teacher.value=score or teacher.value=discounted"
            )
        tasks = self.space.to_env(where.numpy())
        return torch.from_numpy(np.asarray(self.student.values(tasks), dtype=np.float64))

    def advance(self, where: Tensor, logs: Tensor, values: Tensor) -> None:
        """Update the distribution; `logs` [n]: log-densities under which tasks were sampled."""
        old = self.now()
        self.alpha = self.weight(values)

        def gain(new: Gaussian) -> Tensor:
            ratio = torch.exp(log_density(new, where) - logs)
            return (ratio * values).mean() - self.alpha * kl(new, self.target)

        found = step(old, gain, self.config.eps, self.config.damping, self.config.tries)
        self.step_kl = kl(old, found).item()
        self.mean, self.factor = found
        self.updates += 1

    def weight(self, values: Tensor) -> float:
        """alpha, the weight of the KL to the target."""
        if self.updates < self.config.offset:
            return 0.0
        gap = max(kl(self.now(), self.target).item(), LEAST_KL)
        return min(self.config.zeta * max(values.mean().item(), 0.0) / gap, MOST_ALPHA)

    def metrics(self) -> dict[str, float]:
        now = self.now()
        return {
            "target_kl": kl(now, self.target).item(),
            "alpha": self.alpha,
            "step_kl": self.step_kl,
            "deviation": now.root().norm(dim=1).mean().item(),
            "updates": float(self.updates),
        }


def step(old: Gaussian, gain: Any, eps: float, damping: float, tries: int) -> Gaussian:
    """Natural gradient step with line search: the longest of `tries` halved steps that increases
    `gain` and keeps KL(old || new) <= eps; `old` if there is none.

    The Fisher matrix is small (a few dozen parameters), so the linear system is solved directly
    instead of by conjugate gradients.
    """
    start = old.flat()
    flat = start.clone().requires_grad_(True)
    before = gain(Gaussian.unflat(flat, len(old.mean)))
    (gradient,) = torch.autograd.grad(before, flat)
    fisher = torch.autograd.functional.hessian(
        lambda x: kl(old, Gaussian.unflat(x, len(old.mean))), start
    )
    assert isinstance(fisher, Tensor)
    direction = torch.linalg.solve(fisher + damping * torch.eye(len(start)).double(), gradient)
    length = (direction @ fisher @ direction).item()
    if not length > 0:
        return old
    full = math.sqrt(2 * eps / length) * direction
    for halving in range(tries):
        new = Gaussian.unflat(start + full * 0.5**halving, len(old.mean))
        if kl(old, new).item() <= eps and gain(new).item() > before.item():
            return new
    return old
