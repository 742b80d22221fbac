"""Replay: the ring by hand, packing, exact resume, and rows that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from embodied.buffers.replay import ReplayBuffer
from embodied.core.tensors import Tensors


def rows(values: Sequence[float]) -> Tensors:
    """Rows whose every leaf tells which row it is."""
    v = torch.tensor(values, dtype=torch.float32)
    return {
        "reward": v,
        "obs/state": torch.stack([v, v + 0.25], 1),
        "action": v[:, None] + 0.5,
        "next_obs/state": torch.stack([v + 1, v + 1.25], 1),
        "obs/wrist": v.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 2, 3),
        "obs/grid": torch.stack([v, v, v, v], 1).view(-1, 2, 2),
        "episode": v.long(),
    }


def held(replay: ReplayBuffer) -> list[float]:
    return replay.take(torch.arange(len(replay)))["reward"].tolist()


def test_ring_overwrites_the_oldest() -> None:
    replay = ReplayBuffer(5)
    replay.add(rows([0, 1, 2]))
    assert (len(replay), held(replay)) == (3, [0, 1, 2])
    replay.add(rows([3, 4, 5, 6]))  # 3, 4 to the end, then 5, 6 over 0, 1
    assert (len(replay), held(replay)) == (5, [5, 6, 2, 3, 4])
    replay.add(rows([7]))
    assert held(replay) == [5, 6, 7, 3, 4]


def test_exactly_full_starts_over() -> None:
    replay = ReplayBuffer(3)
    replay.add(rows([0, 1, 2]))
    replay.add(rows([3]))
    assert held(replay) == [3, 1, 2]


def test_more_rows_than_fit_keep_the_last() -> None:
    replay = ReplayBuffer(3)
    replay.add(rows([0]))
    replay.add(rows([1, 2, 3, 4, 5]))
    assert sorted(held(replay)) == [3, 4, 5]


def test_leaves_of_a_sampled_row_belong_together() -> None:
    replay = ReplayBuffer(50)
    given = rows(range(40))
    replay.add(given)
    drawn = replay.sample(200)
    assert drawn.keys() == given.keys()
    which = drawn["reward"].long()
    assert which.unique().numel() > 30  # all of the storage is drawn from
    for key, leaf in drawn.items():
        assert leaf.dtype == given[key].dtype
        assert torch.equal(leaf, given[key][which]), key


def test_samples_are_copies() -> None:
    replay = ReplayBuffer(4)
    replay.add(rows([1, 2]))
    replay.sample(8)["reward"].fill_(-1)
    assert held(replay) == [1, 2]


def test_sampling_follows_the_default_generator() -> None:
    replay = ReplayBuffer(100)
    replay.add(rows(range(100)))
    torch.manual_seed(3)
    one = replay.sample(10)["reward"]
    other = replay.sample(10)["reward"]
    torch.manual_seed(3)
    assert torch.equal(replay.sample(10)["reward"], one)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("count", [3, 7])
def test_state_round_trip(count: int, tmp_path) -> None:
    replay = ReplayBuffer(5)
    for value in range(count):
        replay.add(rows([value]))
    torch.save(replay.get_state(), tmp_path / "replay.pt")
    assert (tmp_path / "replay.pt").stat().st_size < 20_000  # what is stored, not the capacity
    other = ReplayBuffer(5)
    other.add(rows([99]))
    other.set_state(torch.load(tmp_path / "replay.pt", weights_only=True))
    for one in (replay, other):
        one.add(rows([50, 51]))
    assert held(other) == held(replay)
    assert len(other) == len(replay)
    torch.manual_seed(0)
    here = replay.sample(20)
    torch.manual_seed(0)
    there = other.sample(20)
    assert all(torch.equal(here[key], there[key]) for key in here)


def test_a_saved_small_replay_is_small(tmp_path) -> None:
    replay = ReplayBuffer(100_000)
    replay.add(rows(range(10)))
    torch.save(replay.get_state(), tmp_path / "replay.pt")
    assert (tmp_path / "replay.pt").stat().st_size < 20_000


def test_empty_round_trip_and_empty_sample() -> None:
    replay = ReplayBuffer(5)
    other = ReplayBuffer(5)
    other.set_state(replay.get_state())
    assert len(other) == 0
    with pytest.raises(ValueError, match="is empty"):
        other.sample(1)


def test_other_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity 5, this one 6"):
        ReplayBuffer(6).set_state(ReplayBuffer(5).get_state())


def test_rows_that_do_not_fit_are_named() -> None:
    replay = ReplayBuffer(5)
    replay.add(rows([0]))
    wide = rows([1]) | {"action": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match=r"action: stored \[1\], new \[2\]"):
        replay.add(wide)
    more = rows([1]) | {"cost": torch.zeros(1)}
    with pytest.raises(ValueError, match="cost: stored missing"):
        replay.add(more)
    less = rows([1])
    del less["reward"]
    with pytest.raises(ValueError, match=r"reward: stored \[\], new missing"):
        replay.add(less)
    assert held(replay) == [0]
