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


def world(seed: int, states: int = 6, actions: int = 3) -> tuple[Table, Table, Table]:
    """A random reward, random dynamics, and a random potential shaping of the world's gamma."""
    random = np.random.default_rng(seed)
    reward = random.normal(size=(states, actions, states))
    transition = random.dirichlet(np.ones(states), size=(states, actions))
    potential = random.normal(size=states)
    return reward, transition, GAMMA * potential[None, None, :] - potential[:, None, None]


def epic_canonical(reward: Table) -> Table:
    """EPIC's canonical form [S, A, S]; states and actions are uniform."""
    mean = reward.mean((1, 2))
    return reward + GAMMA * mean[None, None, :] - mean[:, None, None] - GAMMA * mean.mean()


def starc_canonical(reward: Table, transition: Table) -> Table:
    """Advantage [S, A] of every action under the uniform policy; zero where it is rounding."""
    expected = np.einsum("sat,sat->sa", transition, reward)
    value = np.linalg.solve(np.eye(len(reward)) - GAMMA * transition.mean(1), expected.mean(1))
    found = expected + GAMMA * transition @ value - value[:, None]
    return np.where(np.abs(found).max() > 1e-12 * np.abs(reward).max(), found, 0.0)


def distances(one: Table, other: Table, transition: Table) -> dict[str, float]:
    canonical = [starc_canonical(reward, transition) for reward in (one, other)]
    return {
        "epic": pearson_distance(epic_canonical(one), epic_canonical(other)),
        "half": half_distance(*canonical),
        "pearson": pearson_distance(*canonical),
    }


@pytest.mark.parametrize("seed", range(5))
def test_what_is_a_distance_and_what_is_none(seed: int) -> None:
    """A potential and a scale are none, a negation is one; what changes no expectation over
    successors moves EPIC only."""
    reward, transition, shaping = world(seed)
    for name, apart in distances(reward, 3.7 * reward + shaping, transition).items():
        assert apart < 1e-12, name
    for name, apart in distances(reward, shaping - 0.2 * reward, transition).items():
        assert apart == pytest.approx(1.0, abs=1e-12), name
    noise = np.random.default_rng(seed + 100).normal(size=reward.shape)
    mean = np.einsum("sat,sat->sa", transition, noise)
    apart = distances(reward, reward + noise - mean[:, :, None], transition)
    assert apart["epic"] > 0.1
    assert max(apart[name] for name in ("half", "pearson")) < 1e-12


def test_a_wrong_discount_is_a_distance() -> None:
    reward, transition, _ = world(0)
    potential = 5 * np.random.default_rng(1).normal(size=6)
    wrong = 0.99 * potential[None, None, :] - potential[:, None, None]
    for name, apart in distances(reward, reward + wrong, transition).items():
        assert apart > 0.01, name


def test_canonical_forms_by_hand() -> None:
    """Two states, one action, always on to the other state; R(0,1) = 1, R(1,0) = 3, else 0.
    EPIC: means 0.5 and 1.5, of both 1. C(0,1) = 1 + 0.9*1.5 - 0.5 - 0.9 = 0.95. STARC: one action
    has no advantage over itself."""
    reward = np.array([[[0.0, 1.0]], [[3.0, 0.0]]])
    transition = np.array([[[0.0, 1.0]], [[1.0, 0.0]]])
    assert epic_canonical(reward)[0, 0, 1] == pytest.approx(0.95)
    assert distances(reward, 2 - reward, transition)["half"] == 0.0


def test_starc_by_hand() -> None:
    """One state, two actions that pay 1 and 0: V = 5, advantages 0.5 and -0.5. Against an action 1
    that pays as well: none. Against the other way round: 1."""
    transition, one = np.ones((1, 2, 1)), np.array([[[1.0], [0.0]]])
    assert distances(one, np.ones_like(one), transition)["half"] == pytest.approx(0.5)
    assert distances(one, one[:, ::-1], transition)["half"] == pytest.approx(1.0)


def test_pearson_of_a_constant() -> None:
    values = np.array([1.0, 2.0, 4.0])
    assert pearson_distance(np.full(3, 2.0), np.full(3, 5.0)) == 0.0
    assert pearson_distance(np.full(3, 2.0), values) == pytest.approx(np.sqrt(0.5))


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
