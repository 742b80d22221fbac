"""Calibration of a success classifier: probabilities and the decision threshold.

The network is trained on balanced batches, so the log odds are corrected for the true fraction pi
of successes, then divided by a temperature (Guo et al., 2017):

    p = sigma((z + log(pi / (1 - pi))) / T),   T = argmin of the log loss on held-out EPISODES

A frame counts as success above the threshold that at most a given fraction of negatives exceeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

BINS = 10
LEAST = 0.5  # lowest threshold


@dataclass(frozen=True)
class Calibration:
    """`prior` log odds to add, `temperature`, `threshold`; and their quality on the held-out
    episodes: expected calibration error and log loss before and after, true and false positive
    rates (`found`, `mistaken`), and the numbers of positives and negatives."""

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

    def probability(self, logits: Tensor) -> Tensor:
        """The calibrated probability [N] of success for `logits` [N]."""
        return ((logits + self.prior) / self.temperature).sigmoid()


def calibrate(logits: Tensor, label: Tensor, prior: float, rate: float) -> Calibration:
    """Calibrate on held-out `logits` [N] and `label` [N]; `prior`: log odds of success; `rate`:
    allowed false positives."""
    logits = logits.double() + prior
    label = label.double()
    temperature = best_temperature(logits, label)
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


def best_temperature(logits: Tensor, label: Tensor) -> float:
    """The temperature in [0.25, 20] with the lowest log loss, to 0.1%, by golden-section search
    (the loss is convex in 1 / T)."""
    low, high = 1 / 20.0, 1 / 0.25
    ratio = (math.sqrt(5) - 1) / 2

    def loss(inverse: float) -> float:
        return float(binary_cross_entropy_with_logits(logits * inverse, label))

    while high - low > 1e-3 * low:
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, two) if loss(one) <= loss(two) else (one, high)
    return 2 / (low + high)


def reliability(p: Tensor, label: Tensor) -> float:
    """Expected calibration error over ten bins: sum of fraction x |mean p - fraction of
    successes|."""
    where = (p * BINS).long().clamp(max=BINS - 1)
    off = torch.zeros(BINS, dtype=p.dtype).index_add_(0, where, p - label)
    return float(off.abs().sum() / len(p))


def threshold_for(others: Tensor, rate: float) -> float:
    """The lowest threshold, at least 0.5, that at most a fraction `rate` of the negatives'
    probabilities `others` [N] exceeds."""
    if not len(others):
        return LEAST
    ordered = others.sort(descending=True).values
    allowed = min(int(rate * len(others) + 1e-9), len(others) - 1)
    return max(LEAST, float(ordered[allowed]))
