"""Bradley-Terry: the loss by hand, and scores that come out of comparisons alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from embodied.core.spec import Leaf
from embodied.rewards.preferences.bradley_terry import (
    FitConfig,
    Pictures,
    Ranker,
    loss_of,
    scores_of,
)

CPU = torch.device("cpu")


def test_the_loss_by_hand() -> None:
    first, second = torch.tensor([[0.2, 0.0]]), torch.tensor([[0.7, 0.0]])
    target = torch.tensor([[1.0, 0.5]])
    # -log sigmoid(0.5) and log 2, in mean over the pairs.
    expected = (math.log(1 + math.exp(-0.5)) + math.log(2)) / 2
    assert float(loss_of(first, second, target)) == pytest.approx(expected)
    two = loss_of(first.expand(2, -1), second.expand(2, -1), target.expand(2, -1))
    assert float(two) == pytest.approx(2 * expected)  # members are summed: each learns by itself


def labels(n: int, seed: int, error: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Points on a plane of which the one with the larger sum is preferred."""
    random = torch.Generator().manual_seed(seed)
    first, second = torch.rand(2, n, 2, generator=random)
    wrong = torch.rand(n, generator=random) < error
    return first, second, ((second.sum(1) > first.sum(1)) ^ wrong).float()


def test_scores_order_what_was_never_compared() -> None:
    ranker = Ranker(Leaf((2,)), FitConfig(hidden=(32,), rate=1e-2), CPU, 0)
    metrics = ranker.learn(labels(200, 0))
    assert float(metrics["train_accuracy"]) > 0.97
    assert ranker.accuracy(labels(1000, 1)) > 0.95
    assert ranker.score(torch.rand(50, 2)).abs().max() <= 1


def test_labels_that_are_often_wrong_still_teach() -> None:
    ranker = Ranker(Leaf((2,)), FitConfig(hidden=(32,), rate=1e-3, epochs=30), CPU, 0)
    ranker.learn(labels(600, 0, error=0.3))
    assert ranker.accuracy(labels(1000, 1)) > 0.85


def test_beginning_anew_keeps_wrong_labels_from_being_learned_by_heart() -> None:
    parts = [labels(60, seed, error=0.3) for seed in range(6)]
    held_out = labels(1000, 99)
    told = {}
    for fresh in (True, False):
        fit = FitConfig(hidden=(64,), rate=3e-3, epochs=20, fresh=fresh)
        ranker = Ranker(Leaf((2,)), fit, CPU, 0)
        for part in parts:
            ranker.learn(part)
        told[fresh] = ranker.accuracy(held_out)
    assert told[True] > told[False] + 0.02


def test_new_accuracy_is_foretold_not_fitted() -> None:
    ranker = Ranker(Leaf((2,)), FitConfig(hidden=(32,), rate=1e-2), CPU, 0)
    assert "new_accuracy" not in ranker.learn(labels(200, 0))
    first, second, target = labels(100, 1)
    metrics = ranker.learn((first, second, 1 - target))  # everything the other way round
    assert float(metrics["new_accuracy"]) < 0.1
    assert len(ranker) == 300


def test_ties_are_a_half_and_not_counted_as_told() -> None:
    ranker = Ranker(Leaf((2,)), FitConfig(hidden=(16,), epochs=1), CPU, 0)
    first, second, target = labels(10, 0)
    told = ranker.accuracy((first, second, target))
    half = torch.full((10,), 0.5)
    both = (torch.cat([first, first]), torch.cat([second, second]), torch.cat([target, half]))
    assert ranker.accuracy(both) == told
    assert math.isnan(ranker.accuracy((first, second, half)))


def test_members_are_apart() -> None:
    """The groups of the convolutions, and the two ways to show pictures, are one computation."""
    net = scores_of(Leaf((40, 40, 3), "uint8", 0, 255), FitConfig(members=3), 0)
    assert isinstance(net, Pictures)
    pictures = torch.randint(0, 256, (5, 40, 40, 3), dtype=torch.uint8)
    shared = net(pictures)
    own = net(pictures.expand(3, -1, -1, -1, -1), per_member=True)
    assert shared.shape == (3, 5)
    torch.testing.assert_close(shared, own)
    assert not torch.allclose(shared[0], shared[1])
    other = pictures.expand(3, -1, -1, -1, -1).clone()
    other[1] = 0
    changed = net(other, per_member=True)
    torch.testing.assert_close(changed[[0, 2]], own[[0, 2]])
    assert not torch.allclose(changed[1], own[1])


def test_pictures_are_ranked() -> None:
    random = torch.Generator().manual_seed(0)
    place = torch.randint(0, 20, (2, 200), generator=random)

    def drawn(places: Tensor) -> Tensor:
        pictures = torch.zeros(len(places), 24, 24, 3, dtype=torch.uint8)
        for picture, x in zip(pictures, places.tolist(), strict=True):
            picture[10:14, x : x + 4] = 255
        return pictures

    target = torch.where(place[0] == place[1], 0.5, (place[1] > place[0]).float())
    ranker = Ranker(Leaf((24, 24, 3), "uint8", 0, 255), FitConfig(epochs=8, rate=1e-3), CPU, 0)
    ranker.learn((drawn(place[0]), drawn(place[1]), target))
    scores = ranker.score(drawn(torch.arange(20)))
    assert torch.corrcoef(torch.stack([scores, torch.arange(20.0)]))[0, 1] > 0.9


def test_the_same_seed_learns_the_same_whatever_else_is_drawn() -> None:
    one = Ranker(Leaf((2,)), FitConfig(hidden=(16,), epochs=3), CPU, 5)
    torch.rand(7)
    two = Ranker(Leaf((2,)), FitConfig(hidden=(16,), epochs=3), CPU, 5)
    one.learn(labels(100, 0))
    two.set_state(copy.deepcopy(one.get_state()))
    one.learn(labels(50, 1))
    two.learn(labels(50, 1))
    sights = torch.rand(9, 2)
    assert one.score(sights).equal(two.score(sights))
