"""Distances between reward functions that ignore potential shaping and positive scaling.

    EPIC   C(R)(s,a,s') = R(s,a,s') + E[ g R(s',A,S') - R(s,A,S') - g R(S,A,S') ]
    STARC  c(R)(s,a)    = E[ R(s,a,S') + g V(S') ] - V(s),  V of the uniform policy
    d = sqrt((1 - Pearson) / 2),  or half the distance of c(R) divided by their norms

Gleave et al. (2021), Skalse et al. (2024). Both are 0 between a reward and its positive multiples
and potential shapings, and 1 between a reward and its negation. Only STARC bounds the regret of one
reward's optimal policy under the other, and ignores changes that affect no expectation over
successors; EPIC evaluates transitions that never occur.

A learned reward is also compared with the true reward or progress of whole episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors
from embodied.nn.statistics import spearman

Numbers = NDArray[np.float64]

Table = NDArray[np.float64]
Measure = Literal["half", "pearson"]
Ask = Callable[[Tensors], Tensor]
NOTHING = 1e-12  # relative norm below which a difference is rounding


def within(one: Sequence[ArrayLike], other: Sequence[ArrayLike]) -> Numbers:
    """Spearman's correlation within each episode in which both vary."""
    each = np.array([spearman(a, b) for a, b in zip(one, other, strict=True)])
    return each[np.isfinite(each)]


def violations(progress: ArrayLike, slack: float = 0.0) -> float:
    """Fraction of steps in which a progress estimate decreases by more than `slack`."""
    change = np.diff(np.asarray(progress, float))
    return float((change < -slack).mean()) if len(change) else 0.0


def plateau(values: ArrayLike, share: float = 1e-3) -> float:
    """Fraction of steps that change by at most `share` of the episode's range of values."""
    series = np.asarray(values, float)
    if len(series) < 2:
        return 0.0
    return float((np.abs(np.diff(series)) <= share * np.ptp(series)).mean())


def interval(
    statistic: Callable[[NDArray[np.int64]], float],
    count: int,
    samples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap confidence interval (percentiles) of `statistic(episodes)`, with `count` episodes
    resampled with replacement; samples for which it is NaN are skipped."""
    draws = np.random.default_rng(seed).integers(count, size=(samples, count))
    values = np.array([statistic(draw) for draw in draws])
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    tail = 50 * (1 - confidence)
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def pearson_distance(one: Table, other: Table) -> float:
    """sqrt((1 - rho) / 2) in [0, 1]; 0 for two constants, sqrt(1/2) for a constant and a
    non-constant."""
    x, y = np.ravel(one) - np.mean(one), np.ravel(other) - np.mean(other)
    sizes = np.sqrt(np.mean(x**2)), np.sqrt(np.mean(y**2))
    most = np.abs(one).max(initial=NOTHING), np.abs(other).max(initial=NOTHING)
    flat = [size <= NOTHING * top for size, top in zip(sizes, most, strict=True)]
    if any(flat):
        return 0.0 if all(flat) else float(np.sqrt(0.5))
    # From the difference of the two, which keeps the digits that 1 - rho loses.
    return float(min(1.0, np.sqrt(np.mean((x / sizes[0] - y / sizes[1]) ** 2)) / 2))


def half_distance(one: Table, other: Table) -> float:
    """Half the Euclidean distance of the two divided by their norms, in [0, 1]; zero stays zero."""
    parts = []
    for each in (np.ravel(one), np.ravel(other)):
        size = np.linalg.norm(each)
        parts.append(each / size if size > 0 else each)
    return float(np.linalg.norm(parts[0] - parts[1]) / 2)


def sampled_epic(
    rewards: Sequence[Ask], transitions: Tensors, gamma: float, means: int = 128
) -> Table:
    """EPIC distances [K, K] of K reward functions, from samples.

    `transitions` [N] are the coverage distribution; `means` of them, evenly spaced, give
    the actions and successors of the expectations, together with the environment's reward.
    Terminations are ignored, as in the paper.
    """
    index = torch.linspace(0, tt.length(transitions) - 1, means).long()
    canonical = []
    for ask in rewards:
        before = _mean_from(ask, transitions, "obs", index, gamma)
        after = _mean_from(ask, transitions, "next_obs", index, gamma)
        reward_of = _evaluate(ask, transitions, gamma)
        value = reward_of + gamma * after - before - gamma * after[index].mean()
        canonical.append(value.double().cpu().numpy())
    return _table(canonical, pearson_distance)


def sampled_starc(
    rewards: Sequence[Ask],
    transitions: Tensors,
    features: tuple[Tensor, Tensor],
    ridge: float = 1e-6,
    measure: Measure = "half",
) -> Table:
    """STARC-like distances [K, K] from on-policy transitions alone.

    c = r + discount V(s') - V(s), with V linear in `features` ([N, F] of s and of s') by least
    squares on temporal differences (Bradtke and Barto, 1996).
    """
    now, then = (part.double() for part in features)
    then = then * transitions["discount"].double()[:, None]
    scale = ridge * len(now) * torch.eye(now.shape[1], dtype=torch.float64, device=now.device)
    system = now.T @ (now - then) + scale
    canonical = []
    for ask in rewards:
        reward_of = ask(transitions).detach().double()
        weight = torch.linalg.solve(system, now.T @ reward_of)
        canonical.append((reward_of + (then - now) @ weight).cpu().numpy())
    return _table(canonical, pearson_distance if measure == "pearson" else half_distance)


def fourier(states: Tensor, count: int = 256, width: float = 2.0, seed: int = 0) -> Tensor:
    """Features [N, 1 + D + D + count] of normalised states [N, D]: 1, s, s^2 and random Fourier
    features (Rahimi and Recht, 2007)."""
    generator = torch.Generator().manual_seed(seed)
    size = states.shape[1]
    turn = torch.randn(size, count, generator=generator) / (width * size**0.5)
    shift = torch.rand(count, generator=generator) * 2 * torch.pi
    waves = torch.cos(states @ turn.to(states) + shift.to(states))
    return torch.cat([torch.ones_like(states[:, :1]), states, states.square(), waves], 1)


def _evaluate(ask: Ask, transitions: Tensors, gamma: float) -> Tensor:
    with torch.no_grad():
        return ask(
            {**transitions, "discount": torch.full_like(transitions["reward"], gamma)}
        ).float()


def _mean_from(ask: Ask, transitions: Tensors, end: str, index: Tensor, gamma: float) -> Tensor:
    """Mean reward [N] of moving from each transition's state at `end` by the actions of the
    transitions `index` to their successors."""
    start = tt.nest(tt.under(transitions, end), "obs")
    others = tt.take({k: v for k, v in transitions.items() if not k.startswith("obs/")}, index)
    count, total = tt.length(transitions), torch.zeros_like(transitions["reward"])
    for j in range(len(index)):
        one = {
            key: value[j : j + 1].expand(count, *value.shape[1:]) for key, value in others.items()
        }
        total += _evaluate(ask, {**one, **start}, gamma)
    return total / len(index)


def _table(canonical: Sequence[Table], distance: Callable[[Table, Table], float]) -> Table:
    return np.array([[distance(one, other) for other in canonical] for one in canonical])
