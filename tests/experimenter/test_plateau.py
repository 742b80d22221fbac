"""The plateau test: by hand on a line, and against ten labelled curves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied.experimenter.plateau import plateau

EPISODES = 50
X = np.linspace(0.0, 1.0, 20)
# Twenty evaluations each; the label: whether the curve no longer changes at its end.
CURVES = {
    "never learns": (0.0 * X, True),
    "learned at once": (0.0 * X + 0.95, True),
    "exponential, settled": (0.9 * (1 - np.exp(-12 * X)), True),
    "sigmoid, early": (0.95 / (1 + np.exp(-25 * (X - 0.25))), True),
    "settled halfway": (0.0 * X + 0.5, True),
    "step, early": (np.where(X > 0.3, 0.8, 0.1), True),
    "line": (0.9 * X, False),
    "exponential, rising": (1 - np.exp(-1.2 * X), False),
    "sigmoid, late": (0.9 / (1 + np.exp(-12 * (X - 0.85))), False),
    "collapsing": (np.where(X < 0.5, 0.9, 0.9 - 1.4 * (X - 0.5)), False),
}


def right(seed: int) -> int:
    random = np.random.default_rng(seed)
    return sum(
        plateau(random.binomial(EPISODES, rates) / EPISODES, EPISODES).flat == label
        for rates, label in CURVES.values()
    )


def test_by_hand() -> None:
    """0, 0.1, ..., 0.4: the line changes by 0.4 and has no residual, so its error is that of the
    binomial of p = 0.2, n = 100: sqrt(0.0016 / 10) per evaluation, times 4."""
    found = plateau([0.0, 0.1, 0.2, 0.3, 0.4], 100)
    assert not found.flat and found.since is None
    assert found.change == pytest.approx(0.4)
    assert found.noise == pytest.approx(4 * math.sqrt(0.0016 / 10))
    found = plateau([0.0, 0.2, 0.6, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 100)
    assert found.flat and found.since == 3 and found.change == pytest.approx(0.0)


def test_few_evaluations_decide_nothing() -> None:
    assert not plateau([1.0] * 4, 50).flat


def test_nine_of_ten_labelled_curves() -> None:
    counts = [right(seed) for seed in range(100)]
    assert np.mean(counts) >= 9.0 and np.mean([count >= 9 for count in counts]) >= 0.9
