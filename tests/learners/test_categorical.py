"""Categorical returns: every projection by hand."""

from __future__ import annotations

import math

import pytest
import torch

from embodied.learners.critics import Support, cross_entropy

SMALL = Support(-1.0, 2.0, 4)  # atoms -1, 0, 1, 2


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).clamp(min=1e-30).log()


def back_up(logits: torch.Tensor, reward: float, discount: float) -> list[float]:
    found = SMALL.back_up(logits, torch.tensor([reward]), torch.tensor([discount]))
    assert found.shape == (1, 4)
    return found[0].tolist()


def test_values_on_atoms_stay_there() -> None:
    assert SMALL.atoms().tolist() == [-1, 0, 1, 2]
    assert back_up(logits_of(0.1, 0.2, 0.3, 0.4), 0.0, 1.0) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # moved by one atom: what was at 2 and at 1 meets at the end of the support
    assert back_up(logits_of(0.1, 0.2, 0.3, 0.4), 1.0, 1.0) == pytest.approx([0, 0.1, 0.2, 0.7])


def test_values_between_atoms_are_shared() -> None:
    # -1, 0, 1, 2 become 0.25 + 0.5 z = -0.25, 0.25, 0.75, 1.25
    found = back_up(logits_of(0.4, 0.3, 0.2, 0.1), 0.25, 0.5)
    by_hand = [
        0.4 * 0.25,
        0.4 * 0.75 + 0.3 * 0.75 + 0.2 * 0.25,
        0.3 * 0.25 + 0.2 * 0.75 + 0.1 * 0.75,
        0.1 * 0.25,
    ]
    assert found == pytest.approx(by_hand)
    mean = sum(p * z for p, z in zip(found, (-1, 0, 1, 2), strict=True))
    assert mean == pytest.approx(0.25 + 0.5 * (-0.4 + 0.2 + 0.2))


def test_values_beyond_the_support_are_cut_off() -> None:
    assert back_up(logits_of(0.1, 0.2, 0.3, 0.4), 50.0, 0.9) == pytest.approx([0, 0, 0, 1])
    assert back_up(logits_of(0.1, 0.2, 0.3, 0.4), -50.0, 0.9) == pytest.approx([1, 0, 0, 0])


def test_where_the_world_ended_only_the_reward_counts() -> None:
    assert back_up(logits_of(0.1, 0.2, 0.3, 0.4), 0.7, 0.0) == pytest.approx([0, 0.3, 0.7, 0])
    assert back_up(logits_of(0.1, 0.2, 0.3, 0.4), 2.0, 0.0) == pytest.approx([0, 0, 0, 1])


def test_probability_is_kept_and_so_is_the_mean() -> None:
    torch.manual_seed(0)
    wide = Support(-5.0, 5.0, 101)
    logits, reward = torch.randn(64, 101), torch.randn(64)
    discount = torch.rand(64) * 0.5
    found = wide.back_up(logits, reward, discount)
    torch.testing.assert_close(found.sum(1), torch.ones(64))
    mean = found @ wide.atoms()
    torch.testing.assert_close(mean, reward + discount * wide.mean(logits), atol=1e-4, rtol=0)


def test_the_lowest_distribution_is_taken_row_by_row() -> None:
    one = torch.stack([logits_of(1, 0, 0, 0)[0], logits_of(0, 0, 0, 1)[0]])
    two = torch.stack([logits_of(0, 1, 0, 0)[0], logits_of(0, 0.5, 0.5, 0)[0]])
    both = torch.stack([one, two])
    torch.testing.assert_close(SMALL.mean(both), torch.tensor([[-1.0, 2.0], [0.0, 0.5]]))
    assert torch.equal(SMALL.lowest(both), torch.stack([one[0], two[1]]))


def test_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)]], [[0.0, 0.0]]])  # (1/4, 3/4) and (1/2, 1/2)
    target = torch.tensor([[0.5, 0.5]])
    by_hand = -(0.5 * math.log(1 / 4) + 0.5 * math.log(3 / 4)) + math.log(2)
    assert cross_entropy(logits, target).item() == pytest.approx(by_hand)


def test_a_support_needs_a_width() -> None:
    with pytest.raises(ValueError, match="low < high"):
        Support(1.0, 1.0, 5)
    with pytest.raises(ValueError, match="2 atoms"):
        Support(0.0, 1.0, 1)
