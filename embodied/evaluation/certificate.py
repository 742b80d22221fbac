"""Certificates of a smoothed policy: what no attack on its observations can bring about.

Policy smoothing (Kumar, Levine and Feizi, 2022). Of episodes of the policy with noise sigma and no
attack, let p be a lower confidence bound of P(R >= x). An adversary that moves the observations of
an episode by at most B in all (l2), also one that reacts to everything, leaves

    P(R >= x)  >=  Phi(Phi^-1(p) - B / sigma)
    E R        >=  R_0 + sum_i (R_i - R_{i-1}) Phi(Phi^-1(p_i) - B / sigma)

for thresholds R_0 < R_1 < ... and R_0 a return that no episode can go below. Bounds p_i that hold
together: those of Clopper and Pearson at alpha / K each, for K thresholds chosen beforehand, or the
band of Dvoretzky, Kiefer and Wolfowitz, p_i = share - sqrt(ln(2 / alpha) / 2n), at the returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, NonNegative, Number
from embodied.core.build import ConfigError
from embodied.evaluation.evaluate import Evaluation

NORMAL = NormalDist()
HALVINGS = 60  # of the interval in which a bound is looked for


@dataclass(frozen=True)
class Config:
    radii: tuple[NonNegative, ...] = ()  # l2 norms of an episode's attack (none: no certificate)
    alpha: Annotated[float, Bound(above=0.0, below=1.0)] = 0.05  # each may be wrong so often
    lowest: Number | None = None  # a return that no episode goes below (null: success alone)
    highest: Number = 0.0  # largest threshold of returns (method clopper_pearson)
    thresholds: Count = 200  # of returns, evenly spaced (method clopper_pearson)
    method: Literal["clopper_pearson", "dkw"] = "clopper_pearson"  # bounds of the returns


@dataclass(frozen=True)
class Certificate:
    """What holds under every attack of l2 norm `radius`: a lower bound of the mean return and of
    the share of successes; None where it is not known."""

    radius: float
    mean_return: float | None
    success: float | None


def certificates(result: Evaluation, sigma: float, config: Config) -> list[Certificate]:
    """The certificates of an evaluation of a policy with noise `sigma`, one for each radius.
    ConfigError."""
    if config.lowest is None and result.success is None:
        raise ConfigError("certify.lowest=R is needed, a return that no episode can go below")
    found: list[Certificate] = []
    for radius in config.radii:
        mean = None if config.lowest is None else mean_return(result.returns, radius, sigma, config)
        won = None if result.success is None else success(result.success, radius, sigma, config)
        found.append(Certificate(radius, mean, won))
    return found


def attacked(p: float, radius: float, sigma: float) -> float:
    """The least probability of an event under attack that has the probability `p` without."""
    if p <= 0 or p >= 1 or radius == 0:
        return p
    return NORMAL.cdf(NORMAL.inv_cdf(p) - radius / sigma)


def success(won: Tensor, radius: float, sigma: float, config: Config) -> float:
    """The certified share of successes, from those of episodes [n] (bool)."""
    return attacked(lower_bound(int(won.sum()), len(won), config.alpha), radius, sigma)


def mean_return(returns: Tensor, radius: float, sigma: float, config: Config) -> float:
    """The certified mean return, from those of episodes [n]. ConfigError."""
    lowest = config.lowest
    assert lowest is not None
    if returns.min() < lowest:
        raise ConfigError(f"certify.lowest={lowest:g}: a return was {returns.min().item():g}")
    levels, bounds = _bounds(returns.double(), lowest, config)
    steps = zip([lowest, *levels[:-1]], levels, bounds, strict=True)
    return lowest + math.fsum((b - a) * attacked(p, radius, sigma) for a, b, p in steps)


def _bounds(returns: Tensor, lowest: float, config: Config) -> tuple[list[float], list[float]]:
    """Thresholds above `lowest`, ascending, and lower bounds of P(R >= x) that hold together."""
    n = len(returns)
    if config.method == "dkw":
        levels = returns.unique()
        slack = math.sqrt(math.log(2 / config.alpha) / (2 * n))
        shares = (returns >= levels[:, None]).double().mean(1)
        return levels.tolist(), (shares - slack).clamp(min=0).tolist()
    if config.highest <= lowest:
        raise ConfigError("certify.highest should be above certify.lowest")
    count = config.thresholds
    levels = [lowest + (config.highest - lowest) * (i + 1) / count for i in range(count)]
    reached = [int((returns >= level).sum()) for level in levels]
    known = {k: lower_bound(k, n, config.alpha / count) for k in set(reached)}
    return levels, [known[k] for k in reached]


def lower_bound(successes: int, trials: int, alpha: float) -> float:
    """The one-sided lower bound of Clopper and Pearson (1934): the p at which as many successes or
    more have the probability `alpha`, rounded down."""
    if successes == 0:
        return 0.0
    if successes == trials:
        return alpha ** (1 / trials)
    k = torch.arange(successes, trials + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    low, high = 0.0, successes / trials
    for _ in range(HALVINGS):
        p = (low + high) / 2
        tail = torch.logsumexp(ways + k * math.log(p) + (n - k) * math.log1p(-p), 0)
        low, high = (p, high) if tail.item() <= math.log(alpha) else (low, p)
    return low


def lines(found: Sequence[Certificate], alpha: float) -> list[str]:
    """The certificates in words."""
    said: list[str] = []
    for each in found:
        parts = [] if each.mean_return is None else [f"mean return >= {each.mean_return:,.2f}"]
        parts += [] if each.success is None else [f"success >= {each.success:.1%}"]
        sure = f"each with confidence {1 - alpha:g}"
        said.append(f"attacks of l2 norm {each.radius:g}: {', '.join(parts)} ({sure})")
    return said


def certify(
    row: dict[str, Any], result: Evaluation, sigma: float, config: Config
) -> dict[str, float]:
    """Add the certificates of a result to its row and print them; their metrics."""
    found = certificates(result, sigma, config)
    row["certified"] = [vars(each) for each in found]
    print("\n".join(lines(found, config.alpha)), flush=True)
    known = {
        f"certified_{name}_{each.radius:g}": value
        for each in found
        for name, value in (("return", each.mean_return), ("success", each.success))
    }
    return {name: value for name, value in known.items() if value is not None}
