"""Distances between rewards against closed forms on small worlds; agreement by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from embodied.nn import statistics
from embodied.rewards.analysis.distances import (
    fourier,
    half_distance,
    interval,
    pearson_distance,
    plateau,
    sampled_epic,
    sampled_starc,
    violations,
    within,
)

GAMMA = 0.9
Table = NDArray[np.float64]


def test_distances_by_hand() -> None:
    """Advantages of two actions that pay 1 and 0, against none at all, against the other way round
    and against themselves twice as large."""
    one, none = np.array([[0.5, -0.5]]), np.zeros((1, 2))
    found = [half_distance(one, other) for other in (none, -one, 2 * one)]
    assert found == pytest.approx([0.5, 1.0, 0.0]) and half_distance(none, none) == 0
    values, constant = np.array([1.0, 2.0, 4.0]), np.full(3, 2.0)
    found = [pearson_distance(values, other) for other in (constant, -values, 3 * values + 1)]
    assert found == pytest.approx([np.sqrt(0.5), 1.0, 0.0], abs=1e-7)
    assert pearson_distance(constant, np.full(3, 5.0)) == 0.0


Rows = dict[str, torch.Tensor]


def coverage() -> Rows:
    """600 random states and actions of s' = 0.9 s + 0.3 a, paid by the state that is reached."""
    state, action = torch.randn(2, 600, 2, generator=torch.Generator().manual_seed(0))
    following = 0.9 * state + 0.3 * action
    rows = {"obs/state": state, "action": action, "next_obs/state": following}
    return rows | {"reward": own(rows), "discount": torch.full((600,), GAMMA)}


def own(rows: Rows) -> torch.Tensor:
    return -rows["next_obs/state"].square().sum(-1)


def shaped(rows: Rows) -> torch.Tensor:
    potential = [3 * rows[key][..., 0] + rows[key][..., 1].square() for key in STATES]
    return 2 * own(rows) + rows["discount"] * potential[1] - potential[0]


STATES = ("obs/state", "next_obs/state")


def test_sampled_distances_of_a_world_of_numbers() -> None:
    """Of a reward to itself as recorded, with a potential, negated, and to another one."""
    rows = coverage()
    rewards = [
        own,
        lambda rows: rows["reward"],
        shaped,
        lambda rows: -own(rows),
        lambda rows: -rows["action"].square().sum(-1),
    ]
    states = fourier(rows["obs/state"], 32), fourier(rows["next_obs/state"], 32)
    tables = {
        "epic": sampled_epic(rewards, rows, GAMMA, 64),
        "half": sampled_starc(rewards, rows, states),
        "pearson": sampled_starc(rewards, rows, states, measure="pearson"),
    }
    for name, table in tables.items():
        assert table[0, 1] < 1e-3 and table[0, 2] < 0.02, name
        assert table[0, 3] > 0.99 and 0.2 < table[0, 4] < 0.95, name
        np.testing.assert_allclose(table, table.T, atol=1e-9)
        np.testing.assert_allclose(np.diag(table), 0, atol=1e-6)


def test_area_under_the_curve_by_hand() -> None:
    """Positives 3, 2 against 2, 1: 3 > both, 2 > 1, 2 = 2: 3.5 of 4."""
    assert statistics.auc([3, 2, 2, 1], [True, True, False, False]) == pytest.approx(3.5 / 4)
    assert np.isnan(statistics.auc([1, 2], [True, True]))


def test_ranks_and_their_correlation_by_hand() -> None:
    np.testing.assert_allclose(statistics.ranks([10, 30, 30, 5]), [2, 3.5, 3.5, 1])
    assert statistics.spearman([1, 2, 3], [1, 8, 27]) == pytest.approx(1.0)
    assert statistics.spearman([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert np.isnan(statistics.spearman([1, 1, 1], [1, 2, 3]))
    both = within([[1, 2, 3], [1, 1, 1]], [[3, 2, 1], [1, 2, 3]])
    np.testing.assert_allclose(both, [-1.0])


def test_falls_and_plateaus_by_hand() -> None:
    assert violations([0, 1, 0.5, 2, 1.9]) == pytest.approx(0.5)
    assert violations([0, 1, 0.5, 2, 1.9], slack=0.2) == pytest.approx(0.25)
    assert plateau([0, 0, 1, 1.0005, 2]) == pytest.approx(0.5)


def test_an_interval_holds_its_statistic() -> None:
    values = np.random.default_rng(0).normal(1.0, 1.0, 200)
    low, high = interval(lambda index: float(values[index].mean()), 200)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(200), rel=0.2)
