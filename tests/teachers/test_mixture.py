"""Mixtures: the criterion by hand, components that are there are found, coinciding rows do not
break the fit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied.teachers.tasks.learning_progress import best, draw, fit, price


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def test_the_criterion_by_hand() -> None:
    """K = 2, D = 3: 1 + 6 + 12 = 19 free numbers; AIC = 38 - 2 log L."""
    assert price(2, 3, 50, -10.0, "aic") == 58.0
    assert price(2, 3, 50, -10.0, "aicc") == pytest.approx(58 + 2 * 19 * 20 / 30)
    assert price(2, 3, 20, -10.0, "aicc") == math.inf  # 19 numbers from 20 rows


def test_one_component_is_the_sample_mean_and_covariance() -> None:
    rows = rng().normal(size=(200, 2)) @ np.array([[1.0, 0.4], [0.0, 0.5]]) + 3
    ((mixture, likelihood),) = fit(rows, [1], rng())
    assert mixture["mean"][0] == pytest.approx(rows.mean(0))
    cov = np.cov(rows.T, bias=True) + 1e-6 * np.eye(2)
    assert mixture["cov"][0] == pytest.approx(cov)
    off = rows - rows.mean(0)
    each = -0.5 * np.einsum("ni,ij,nj->n", off, np.linalg.inv(cov), off)
    total = each.sum() - 100 * math.log(np.linalg.det(2 * math.pi * cov))
    assert likelihood == pytest.approx(total)


def test_three_clusters_are_three() -> None:
    centres = np.array([[0.1, 0.1], [0.9, 0.1], [0.5, 0.9]])
    rows = np.concatenate([c + 0.03 * rng(i).normal(size=(80, 2)) for i, c in enumerate(centres)])
    found = best(rows, range(1, 7), rng())
    assert found is not None and len(found["weight"]) == 3
    order = np.argsort(found["mean"] @ [1.0, 10.0])
    assert found["mean"][order] == pytest.approx(centres, abs=0.02)
    assert found["weight"].sum() == pytest.approx(1)


def test_more_components_are_never_less_likely_than_chance() -> None:
    """Each size climbs by itself: the same result alone as beside others of the same start."""
    rows = rng().random((120, 3))
    values = [likelihood for _, likelihood in fit(rows, [1, 2, 4, 8], rng())]
    assert values == sorted(values)


def test_rows_that_coincide_and_too_few_rows() -> None:
    found = best(np.full((40, 2), 0.5), range(2, 6), rng())
    assert found is not None and np.isfinite(found["cov"]).all()
    assert draw(found, 0, 2, rng()) == pytest.approx([0.5, 0.5], abs=0.01)
    assert best(np.zeros((3, 2)), range(2, 6), rng()) is None


def test_a_component_without_a_row_is_no_component() -> None:
    rows = np.repeat([[0.4, 0.6], [0.8, 0.2]], 10, axis=0)
    for mixture, likelihood in fit(rows, [2, 5], rng()):
        assert np.isfinite(likelihood) and (mixture["weight"] > 0).all()
        gap = np.abs(mixture["mean"][:, None] - rows[[0, 10]]).sum(2).min(1)
        assert gap.max() < 1e-6, "each lies where rows are"


def test_draws_are_of_the_component() -> None:
    cov = np.array([[[0.04, 0.03, 0.0], [0.03, 0.09, 0.0], [0.0, 0.0, 1.0]]])
    mixture = {"weight": np.ones(1), "mean": np.array([[1.0, 2.0, 3.0]]), "cov": cov}
    random = rng()
    drawn = np.stack([draw(mixture, 0, 2, random) for _ in range(4000)])
    assert drawn.mean(0) == pytest.approx([1, 2], abs=0.02)
    assert np.cov(drawn.T) == pytest.approx(cov[0, :2, :2], abs=0.006)
