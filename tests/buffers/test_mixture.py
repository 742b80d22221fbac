"""Mix and Relabel: exact shares in every slice, rewards that change while they are learned."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.source import Mixture, Relabel
from embodied.core.tensors import Tensors


def filled(value: float, count: int = 20) -> ReplayBuffer:
    replay = ReplayBuffer(count)
    replay.add({"reward": torch.full((count,), value), "obs/state": torch.full((count, 2), value)})
    return replay


@pytest.mark.parametrize(
    ("fractions", "size", "expected"),
    [((0.5, 0.5), 4, [2, 2]), ((0.75, 0.25), 8, [6, 2]), ((0.5, 0.3, 0.2), 10, [5, 3, 2])],
)
def test_every_slice_has_exact_shares(
    fractions: Sequence[float], size: int, expected: list[int]
) -> None:
    mix = Mixture([filled(float(i)) for i in range(len(fractions))], fractions)
    batch = mix.sample(6 * size)
    for part in batch["reward"].split(size):
        assert torch.bincount(part.long(), minlength=len(fractions)).tolist() == expected
    assert torch.equal(batch["obs/state"][:, 1], batch["reward"])  # rows stay whole


def test_length_is_of_all() -> None:
    assert len(Mixture([filled(0, 20), filled(1, 30)], (0.5, 0.5))) == 50


def test_nothing_is_drawn_from_a_source_without_a_share() -> None:
    mix = Mixture([filled(1), ReplayBuffer(5)], (1.0, 0.0))
    assert mix.sample(5)["reward"].tolist() == [1] * 5


def test_refusals() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        Mixture([filled(0), filled(1)], (0.5, 0.6))
    with pytest.raises(ValueError, match="multiple of"):
        Mixture([filled(0), filled(1)], (0.5, 0.5)).sample(7)
    other = ReplayBuffer(4)
    other.add({"reward": torch.zeros(2), "obs/image": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="obs/image"):
        Mixture([filled(0), other], (0.5, 0.5)).sample(4)


class Scale:
    """A reward that learns one number."""

    frozen = False

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, rows: Tensors) -> Tensor:
        return self.factor * rows["obs/state"][:, 0]

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        self.factor += 1
        return {}


def test_relabel_uses_what_the_reward_has_learned_by_now() -> None:
    replay, reward = filled(3.0), Scale()
    source = Relabel(replay, reward)
    assert source.sample(2)["reward"].tolist() == [3, 3]
    reward.update({})
    assert source.sample(2)["reward"].tolist() == [6, 6]
    assert replay.sample(2)["reward"].tolist() == [3, 3]  # what is stored does not change
