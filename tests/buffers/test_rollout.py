"""Segments: slots by row, room for more, exact state."""

from __future__ import annotations

import torch

from embodied.buffers.rollout import RolloutBuffer
from embodied.core.tensors import Tensors


def numbers(values: list[float]) -> Tensors:
    return {"reward": torch.tensor(values)}


def test_all_rows_at_once() -> None:
    segment = RolloutBuffer(2, 2)
    for t in range(3):  # one more than expected
        segment.add(numbers([t, 10.0 + t]), None)
    batch = segment.batch()
    assert batch["reward"].tolist() == [[0, 10], [1, 11], [2, 12]]
    assert batch["valid"].all() and batch["valid"].shape == (3, 2)


def test_rows_close_on_their_own() -> None:
    segment = RolloutBuffer(3, 1)
    segment.add(numbers([1.0, 2.0]), torch.tensor([0, 2]))
    segment.add(numbers([]), torch.empty(0, dtype=torch.int64))
    segment.add(numbers([3.0]), torch.tensor([2]))
    segment.add(numbers([4.0, 5.0]), torch.tensor([2, 0]))
    batch = segment.batch()
    assert batch["reward"].tolist() == [[1, 0, 2], [5, 0, 3], [0, 0, 4]]
    assert batch["valid"].tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 1]]
    segment.clear()
    segment.add(numbers([7.0, 8.0, 9.0]), torch.tensor([0, 1, 2]))
    segment.add(numbers([7.0]), torch.tensor([1]))
    assert segment.batch()["reward"].tolist() == [[7, 8, 9], [0, 7, 0]]


def test_kept_batches_are_side_by_side() -> None:
    """Two envs; three batches of 1, 2 and 1 decisions, of which the newest two are kept."""
    segment, resumed = (RolloutBuffer(2, 1, keep=2) for _ in range(2))
    carry = {"h": torch.tensor([[1.0], [2.0]])}
    segment.add(numbers([1.0, 2.0]), None)
    one = segment.batch(carry)
    assert one["reward"].tolist() == [[1, 2]] and one["carry/h"].shape == (2, 1)
    segment.clear()
    segment.add(numbers([3.0, 4.0]), None)
    segment.add(numbers([5.0]), torch.tensor([1]))
    two = segment.batch({"h": 10 * carry["h"]})
    assert two["reward"].tolist() == [[3, 4, 1, 2], [0, 5, 0, 0]]
    assert two["valid"].tolist() == [[1, 1, 1, 1], [0, 1, 0, 0]]
    assert two["carry/h"].flatten().tolist() == [10, 20, 1, 2]
    segment.clear()
    resumed.set_state(segment.get_state())
    for each in (segment, resumed):
        each.add(numbers([6.0, 7.0]), None)
        three = each.batch(carry)
        assert three["reward"].tolist() == [[6, 7, 3, 4], [0, 0, 0, 5]]
        assert three["carry/h"].flatten().tolist() == [1, 2, 10, 20]


def test_state_goes_on() -> None:
    for closed in (None, torch.tensor([0, 1])):
        one, other = RolloutBuffer(2, 2), RolloutBuffer(2, 2)
        one.add(numbers([1.0, 2.0]), closed)
        other.add(numbers([5.0, 5.0]), closed)
        other.set_state(one.get_state())
        for segment in (one, other):
            for t in range(3):
                segment.add(numbers([3.0 + t, 4.0]), closed)
        assert torch.equal(one.batch()["reward"], other.batch()["reward"])
        assert torch.equal(one.batch()["valid"], other.batch()["valid"])
