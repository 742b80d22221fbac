"""Calibration: how far to believe a network that tells successes from other moments.

It was trained on batches with as many successes as others, so the odds are put right for the share
pi of successes that there really are, then cooled by one temperature (Guo et al., 2017):

    p = sigma((z + log(pi / (1 - pi))) / T),   T = argmin of the log loss on held-out EPISODES;

a moment counts as success above a threshold that at most a stated share of the others pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

BINS = 10
LEAST = 0.5  # no threshold below even odds, however well the held-out moments are told apart


@dataclass(frozen=True)
class Calibration:
    """`prior` log odds to add, `temperature` to divide by, `threshold` to pass; the rest says how
    good that was on the held-out episodes: errors of calibration (ECE) and log losses before and
    after, the shares of successes and of others that pass, and how many of both there were."""

    prior: float
    temperature: float
    threshold: float
    error_before: float
    error: float
    loss_before: float
    loss: float
    found: float
    mistaken: float
    successes: int
    others: int


def calibrate(logits: Tensor, label: Tensor, prior: float, rate: float) -> Calibration:
    """From held-out `logits` [N] and `label` [N]; `prior` are the log odds of success."""
    logits = logits.double() + prior
    label = label.double()
    temperature = coolest(logits, label)
    before, after = logits.sigmoid(), (logits / temperature).sigmoid()
    threshold = threshold_for(after[label == 0], rate)
    passed = after > threshold
    return Calibration(
        prior,
        temperature,
        threshold,
        reliability(before, label),
        reliability(after, label),
        float(binary_cross_entropy_with_logits(logits, label)),
        float(binary_cross_entropy_with_logits(logits / temperature, label)),
        float(passed[label > 0].double().mean()),
        float(passed[label == 0].double().mean()),
        int((label > 0).sum()),
        int((label == 0).sum()),
    )


def coolest(logits: Tensor, label: Tensor) -> float:
    """The temperature in [0.25, 20] of the least log loss, to a part in a thousand. (The loss is
    convex in 1 / T: a golden-section search finds it.)"""
    low, high = 1 / 20.0, 1 / 0.25
    ratio = (math.sqrt(5) - 1) / 2

    def loss(inverse: float) -> float:
        return float(binary_cross_entropy_with_logits(logits * inverse, label))

    while high - low > 1e-3 * low:
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, two) if loss(one) <= loss(two) else (one, high)
    return 2 / (low + high)


def reliability(p: Tensor, label: Tensor) -> float:
    """Expected calibration error: over ten bins, the sum of share x |mean p - successes' share|."""
    where = (p * BINS).long().clamp(max=BINS - 1)
    off = torch.zeros(BINS, dtype=p.dtype).index_add_(0, where, p - label)
    return float(off.abs().sum() / len(p))


def threshold_for(others: Tensor, rate: float) -> float:
    """The lowest threshold, at least even odds, that at most a share `rate` of the probabilities
    `others` [N] of moments without success exceeds."""
    if not len(others):
        return LEAST
    ordered = others.sort(descending=True).values
    allowed = min(int(rate * len(others) + 1e-9), len(others) - 1)
    return max(LEAST, float(ordered[allowed]))
