"""TicketSearch: which noise vector a frozen policy gets, learned from whole episodes.

Golden tickets (Patil et al., 2026; arXiv 2603.15757) search among K random vectors w_k by the mean
return of a few episodes each. One vector for all episodes: sequential halving (Karnin et al.,
2013). The decisions of the run are divided into ceil(log2 K) rounds; in each, the vectors still
open are played equally often, and after it the better half, by mean return, stays open.

One vector per episode (`finetune.per_context`), chosen by the features x of its first observation:
a contextual bandit whose returns y are linear in x, by ridge regression with a learned penalty,

    y = (u + b_k) . x + e,   b_k ~ N(0, diag(s)),   e ~ N(0, q),

with u common to all vectors. Expectation-maximisation estimates s and q from all vectors together,
so that what does not matter to the choice is ignored (empirical Bayes). The posterior N(m_k, C_k)
of b_k chooses: v_k = m_k for evaluation; episodes are played optimistically, by m_k . x + |z_k|
times the standard deviation of b_k . x, z_k ~ N(0, 1) (May et al., 2012).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, cat, each, state_to, take, under, where
from embodied.learners.learner import UNPLANNED, Learner, RunPlan
from embodied.policies.steering.ticket import Ticket

ITERATIONS = 20  # of expectation-maximisation
LEAST = 1e-3  # variance of the returns; below it nothing is left to estimate
DUE = 1e6  # added to the score of a vector that is to be played


@dataclass(frozen=True)
class Config:
    horizon: Count = 1  # decisions of each parallel environment between two choices
    gamma: PositiveFraction = 1.0  # discount of an episode's return, per environment step


class TicketSearch(Learner):
    """`update` takes the newest decisions, in the order of time, and sets the policy's buffers.
    `episodes`: of every finished episode its `context` [N, size], `candidate` and `returns` [N];
    `running` [B]: the same of those that go on, and their discount. All of it is on the CPU."""

    data = "on_policy"
    keeps_stale = True
    batch_size = 0
    counters = ("decisions", "started", "open", "episodes", "running")

    def __init__(self, config: Config, policy: Policy, run: RunPlan = UNPLANNED) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, Ticket):
            raise ConfigError("learner=ticket searches a policy's noise: finetune=ticket init=RUN")
        if distributed.world() > 1:
            raise ConfigError("learner=ticket searches in one process: start it without torchrun")
        self.planned = run.decisions
        self.decisions = 0
        count = len(policy.vectors)
        self.started = torch.zeros(count, dtype=torch.int64)  # episodes of each vector
        self.open = torch.ones(count, dtype=torch.bool)
        self.episodes: Tensors = {}
        self.running: Tensors = {}

    @torch.no_grad()
    def update(self, batch: Tensors) -> dict[str, Tensor]:
        known = len(self.episodes.get("returns", ()))
        self._follow(batch)
        if not self.policy.per_context:
            self._halve()
        elif len(self.episodes.get("returns", ())) > known:
            self._fit()
        mean = self._means()
        best = mean.max() if mean.isfinite().any() else torch.tensor(0.0)
        return {
            "episodes": torch.tensor(float(len(self.episodes.get("returns", ())))),
            "played_vectors": (self.started > 0).sum().float(),
            "open_vectors": self.open.sum().float(),
            "best_mean_return": best,
        }

    def _follow(self, batch: Tensors) -> None:
        """Add the decisions of a batch to the running episodes."""
        names = ("valid", "first", "ended", "reward", "discount", "candidate")
        rows = {name: batch[name].cpu() for name in names}
        begun = rows["first"] & rows["valid"]
        context = torch.zeros(*begun.shape, len(self.policy.center))
        if self.policy.per_context and begun.any():
            index = begun.flatten().nonzero().flatten().to(batch["valid"].device)
            first = take(each(under(batch, "obs"), lambda leaf: leaf.flatten(0, 1)), index)
            context[begun] = self.policy.context(first).cpu()
        self.decisions += int(rows["valid"].sum())
        self.started = self.started + torch.bincount(
            rows["candidate"][begun], minlength=len(self.open)
        )
        known = {"context": context, "candidate": rows["candidate"]}
        self.running, finished = finished_episodes(self.running, rows, known)
        for ended in finished:
            self.episodes = cat([self.episodes, ended]) if self.episodes else ended

    def _halve(self) -> None:
        """Close the worse vectors if a round is over, and have those played that were least."""
        count = len(self.open)
        rounds = max(1, math.ceil(math.log2(count)))
        over = rounds * self.decisions // self.planned if self.planned else 0
        stay = math.ceil(count / 2 ** min(over, rounds - 1))
        mean = self._means()
        if self.open.sum() > stay:
            best = mean.masked_fill(~self.open, -math.inf).topk(stay).indices
            self.open = torch.zeros_like(self.open).index_fill(0, best, True)
        least = self.started[self.open].min()
        due = self.open & (self.started == least)
        known = self.open & mean.isfinite()
        worst = mean[known].min() - 1 if known.any() else torch.tensor(0.0)
        self.policy.value.copy_(torch.where(known, mean, worst)[:, None])
        self.policy.spread.copy_(DUE * due[:, None, None])

    def _means(self) -> Tensor:
        """The mean return [K] of each vector; -inf without an episode."""
        count = len(self.open)
        if not self.episodes:
            return torch.full((count,), -math.inf)
        chosen = self.episodes["candidate"]
        played = torch.bincount(chosen, minlength=count)
        total = torch.bincount(chosen, self.episodes["returns"].double(), count)
        return torch.where(played > 0, total / played, -math.inf).float()

    def _fit(self) -> None:
        """Fit the linear returns of all vectors."""
        policy = self.policy
        context = self.episodes["context"].double()
        center = context.mean(0)
        project = principal(context - center, policy.project.shape[1])
        policy.center.copy_(center)
        policy.project.copy_(project)
        x = torch.cat([torch.ones_like(context[:, :1]), (context - center) @ project], 1)
        y = self.episodes["returns"].double()
        y = (y - y.mean()) / y.std(correction=0).clamp(min=1e-6)
        mean, root = posterior(x, y, self.episodes["candidate"], len(policy.vectors))
        policy.value.copy_(mean)
        policy.spread.copy_(root)

    def set_state(self, state: dict[str, object]) -> None:
        here = {name: state_to(state[name], "cpu") for name in self.counters}
        super().set_state({**state, **here})


def finished_episodes(
    running: Tensors, batch: Tensors, known: Tensors
) -> tuple[Tensors, list[Tensors]]:
    """Follow episodes through decisions [T, B] of `batch` (`valid`, `first`, `ended`, `reward`,
    `discount`), on the CPU. `known` [T, B, ...] is kept as it was at an episode's first decision.
    Returns the episodes [B] that go on (what is known of them, `returns`, `discount`), and of each
    step those that ended [N]: what is known of them, and their discounted `returns`."""
    names = ("valid", "first", "ended", "reward", "discount")
    rows = {name: batch[name].cpu() for name in names}
    finished: list[Tensors] = []
    for t in range(len(rows["first"])):
        now = {name: value[t] for name, value in rows.items()}
        valid, reward = now["valid"], now["reward"]
        zeros = torch.zeros_like(reward)
        new = {name: value[t] for name, value in known.items()} | {"returns": zeros}
        new["discount"] = torch.ones_like(zeros)
        running = where(now["first"] & valid, new, running or new)
        running["returns"] = running["returns"] + valid * running["discount"] * reward
        passed = running["discount"] * now["discount"]
        running["discount"] = torch.where(valid, passed, running["discount"])
        ended = (valid & now["ended"]).nonzero().flatten()
        if len(ended):
            finished.append(take({key: running[key] for key in (*known, "returns")}, ended))
    return running, finished


def principal(context: Tensor, width: int) -> Tensor:
    """The matrix [size, width] that standardises centred contexts [N, size]; where they have more
    than `width` elements, to their principal components. Elements that do not vary become 0."""
    std = context.std(0, correction=0)
    scale = torch.where(std < 1e-6, 0.0, 1 / std.clamp(min=1e-6))
    if context.shape[1] <= width:
        return scale.diag()
    _, size, basis = torch.linalg.svd(context * scale, full_matrices=False)
    rank = min(width, len(size))
    deviation = size[:rank] / math.sqrt(len(context))
    unit = torch.where(deviation < 1e-6, 0.0, 1 / deviation.clamp(min=1e-6))
    found = torch.zeros(context.shape[1], width, dtype=context.dtype)
    found[:, :rank] = scale[:, None] * basis[:rank].T * unit
    return found


def posterior(x: Tensor, y: Tensor, group: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The posterior means m [count, d] of the b_k, of rows x [N, d], y [N] of `group` [N], and S
    [count, d, d] with C_k = S_k^T S_k: |S_k x| is the standard deviation of b_k . x."""
    n, d = x.shape
    eye = torch.eye(d, dtype=x.dtype)
    y = y - x @ torch.linalg.solve(x.T @ x + eye, x.T @ y)
    squares, products = (
        torch.zeros(count, d, d, dtype=x.dtype),
        torch.zeros(count, d, dtype=x.dtype),
    )
    for k in group.unique().tolist():
        rows = x[group == k]
        squares[k], products[k] = rows.T @ rows, rows.T @ y[group == k]
    prior, noise = torch.ones(d, dtype=x.dtype), torch.ones((), dtype=x.dtype)
    for _ in range(ITERATIONS):
        factor = torch.linalg.cholesky(squares / noise + (1 / prior).diag())
        root = torch.linalg.solve_triangular(factor, eye.expand(count, d, d), upper=False)
        covariance = root.mT @ root
        mean = (covariance @ products[:, :, None]).squeeze(2) / noise
        prior = (mean.square() + covariance.diagonal(dim1=1, dim2=2)).mean(0).clamp(min=LEAST)
        error = (y - (x * mean[group]).sum(1)).square().sum() + (squares * covariance).sum()
        noise = (error / n).clamp(min=LEAST)
    return mean, root
