"""MPTS: divergence, risk and acquisition by hand; it predicts risks that it has not seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.teachers.tasks.networks import correlated, divergence, standard
from tests.teachers.place import ended, made

TARGET = "tasks.networks.Mpts"


def test_divergence_by_hand() -> None:
    """(N(1, 2) || N(0, 1)): (4 + 1 - 1) / 2 - log 2; nothing to itself."""
    p = (torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]))
    q = (torch.zeros(2), torch.ones(2))
    assert divergence(p, q).item() == pytest.approx(2 - np.log(2), abs=1e-6)
    assert divergence(p, p).item() == pytest.approx(0, abs=1e-6)


def test_risk_is_standard_in_its_batch() -> None:
    assert standard(np.array([1.0, 3.0])).tolist() == [-1, 1]
    assert standard(np.full(3, 0.7)).tolist() == [0, 0, 0]


def test_correlation_of_those_that_were_predicted() -> None:
    predicted = np.array([np.nan, 1.0, 2.0, 3.0])
    assert correlated(predicted, np.array([9.0, 2.0, 4.0, 6.0]), 0.0) == pytest.approx(1)
    assert correlated(predicted, np.array([9.0, 6.0, 4.0, 2.0]), 0.0) == pytest.approx(-1)
    assert correlated(predicted, np.array([9.0, 4.0, 4.0, 4.0]), 0.3) == 0.3


def test_the_posterior_is_the_next_prior() -> None:
    teacher = made(TARGET, batch=4)
    assert teacher.posterior[0].tolist() == [0] * 10 and teacher.posterior[1].tolist() == [1] * 10
    teacher.update(teacher.sample(3)[1], ended(0.0, 0.5, 1.0))
    assert teacher.learned == 0
    teacher.update(teacher.sample(2)[1], ended(0.2, 0.9))
    assert teacher.learned == 1 and len(teacher.rows) == 1
    first = [each.clone() for each in teacher.posterior]
    assert (first[1] > 0.1).all() and (first[1] < 1).all()
    teacher.update(teacher.sample(3)[1], ended(0.0, 0.5, 1.0))
    assert teacher.learned == 2 and not torch.equal(first[0], teacher.posterior[0])


def test_the_hardest_by_mean_and_deviation_and_others_at_random() -> None:
    """A model that says: mean x, deviation y. With weights (1, 5) those with x + 5 y highest."""
    teacher = made(TARGET, batch=10, candidates=4.0, hardest=0.5, warmup=0)
    teacher.learned, asked = 1, []
    assert teacher.plan == [] and teacher.drawn == 0

    def predicted(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(points)
        return points[:, 0], points[:, 1]

    teacher.predicted = predicted
    rows = np.array(teacher.planned())
    assert asked[0].shape == (40, 2) and rows.shape == (10, 3)
    assert np.array_equal(rows[:, 2], rows[:, 0])  # the predicted mean goes with the ticket
    score = asked[0] @ [1.0, 5.0]
    top = {tuple(point) for point in asked[0][np.argsort(-score)[:5]]}
    played = {tuple(row[:2]) for row in rows}
    assert top <= played and len(played) == 10
    assert {tuple(row[:2]) for row in rows[:5]} != top  # shuffled


def test_it_is_uniform_before_it_knows() -> None:
    teacher = made(TARGET, batch=8, warmup=20)
    predicted = []
    for _ in range(5):
        _, tickets = teacher.sample(8)
        predicted += [teacher.pending[ticket][1] for ticket in tickets.tolist()]
        teacher.update(tickets, ended(*[0.0, 1.0] * 4))
    known = np.isfinite(predicted)
    assert not known[:24].any() and known[24:].all()


def test_it_learns_where_it_goes_wrong() -> None:
    """Risk rises with x: predictions of tasks not yet played follow it, and those are played."""
    teacher = made(TARGET, warmup=64, weights=[1.0, 0.0])
    for _ in range(60):
        tasks, tickets = teacher.sample(16)
        teacher.update(tickets, ended(*(1 - tasks[:, 0]).tolist()))
    points = np.random.default_rng(1).random((200, 2))
    mean, _ = teacher.predicted(points)
    assert np.corrcoef(mean, points[:, 0])[0, 1] > 0.8
    assert teacher.metrics()["correlation"] > 0.5
    hardest = set(np.argsort(-points[:, 0])[:50])
    assert len(hardest & set(np.argsort(-mean)[:50])) > 25  # 12.5 by chance
    assert float(teacher.sample(160)[0][:, 0].mean()) > 0.55
