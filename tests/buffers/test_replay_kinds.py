"""Prioritised, mapped and successful rows: sums by hand, frequencies, rings, exact resume."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.buffers import memmap, prioritized
from embodied.buffers.memmap import MemmapReplayBuffer
from embodied.buffers.prioritized import PrioritizedReplayBuffer, SumTree
from embodied.buffers.replay import ReplayBuffer
from embodied.buffers.success import SuccessBuffer
from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from tests.buffers.test_replay import held, rows


def test_sums_by_hand() -> None:
    """Leaves 1 2 3 4: the running sums pass 0, 1, 3, 6, 10."""
    tree = SumTree(5)
    tree.put(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert tree.total.item() == 10
    mass = torch.tensor([0.0, 0.99, 1.0, 2.99, 3.0, 5.99, 6.0, 9.99])
    assert tree.find(mass).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    tree.put(torch.tensor([3, 0]), torch.tensor([0.5, 0.0]))
    assert tree.total.item() == 5.5
    assert tree.find(torch.tensor([0.0, 5.4, 5.4999, 5.5, 6.0])).tolist() == [1, 3, 3, 3, 3]


def test_a_place_with_nothing_is_never_found() -> None:
    tree = SumTree(40_000)  # three levels
    some = torch.arange(0, 40_000, 7)
    tree.put(some, torch.rand(len(some)))
    found = tree.find(torch.rand(10_000, dtype=torch.float64) * tree.total)
    assert set(found.tolist()) <= set(some.tolist())


def test_changed_one_by_one_or_at_once() -> None:
    """The sums of three levels, and where the running sums pass, from the leaves alone."""
    one, other = SumTree(40_000), SumTree(40_000)
    torch.manual_seed(0)
    values = torch.randint(0, 5, (40_000,)).double()  # exact sums
    one.put(torch.arange(40_000), values)
    for part in torch.randperm(40_000).split(100):
        other.put(part, values[part])
    assert all(map(torch.equal, one.levels, other.levels))
    mass = torch.rand(1000, dtype=torch.float64) * one.total
    assert torch.equal(one.find(mass), torch.searchsorted(values.cumsum(0), mass, right=True))


def test_the_priority_decides_how_often() -> None:
    """alpha 1, priorities 1 3 6 (of 10); weights (3 P)^-1 over the largest: 1/1, 1/3, 1/6."""
    replay = PrioritizedReplayBuffer(prioritized.Config(alpha=1.0, beta=1.0, epsilon=0.0), 8)
    replay.add(rows([0, 1, 2]))
    replay.settle(torch.arange(3), torch.tensor([1.0, 3.0, 6.0]))
    batch = replay.sample(10_000)
    assert torch.equal(batch["index"], batch["reward"].long())
    share = batch["index"].bincount() / 10_000
    torch.testing.assert_close(share, torch.tensor([0.1, 0.3, 0.6]), atol=1e-3, rtol=0)
    expected = torch.tensor([1.0, 1 / 3, 1 / 6])[batch["index"]]
    torch.testing.assert_close(batch["weight"], expected)


def test_alpha_and_epsilon_by_hand() -> None:
    replay = PrioritizedReplayBuffer(prioritized.Config(alpha=0.5, epsilon=1.0), 4)
    replay.add(rows([0, 1]))
    replay.settle(torch.tensor([1]), torch.tensor([8.0]))  # (8 + 1)^0.5
    assert replay.tree.leaves[:3].tolist() == [1.0, 3.0, 0.0]
    replay.add(rows([2]))  # as surprising as the most surprising so far
    assert replay.tree.leaves[2].item() == 3.0


def test_overwritten_rows_are_new_again() -> None:
    replay = PrioritizedReplayBuffer(prioritized.Config(alpha=1.0, epsilon=0.0), 3)
    replay.add(rows([0, 1, 2]))
    replay.settle(torch.arange(3), torch.tensor([0.1, 0.2, 0.3]))
    replay.add(rows([3, 4]))
    assert held(replay) == [3, 4, 2]
    assert replay.tree.leaves[:3].tolist() == pytest.approx([1, 1, 0.3])


def test_beta_reaches_one() -> None:
    replay = PrioritizedReplayBuffer(
        prioritized.Config(alpha=1.0, beta=0.0, anneal=1, epsilon=0.0), 2
    )
    replay.add(rows([0, 1]))
    replay.settle(torch.arange(2), torch.tensor([1.0, 3.0]))
    assert replay.sample(100)["weight"].eq(1).all()
    later = replay.sample(100)
    assert later["weight"][later["index"] == 1].mean().item() == pytest.approx(1 / 3)


def test_prioritised_resumes_exactly(tmp_path: Path) -> None:
    one, other = (PrioritizedReplayBuffer(prioritized.Config(), 5) for _ in range(2))
    one.add(rows(range(7)))
    one.settle(torch.tensor([0, 3]), torch.tensor([5.0, 0.0]))
    one.sample(4)
    torch.save(one.get_state(), tmp_path / "replay.pt")
    other.add(rows([9]))
    other.set_state(torch.load(tmp_path / "replay.pt", weights_only=True))
    for replay in (one, other):
        replay.add(rows([50]))
    assert torch.equal(one.tree.leaves, other.tree.leaves)
    torch.manual_seed(0)
    here = one.sample(50)
    torch.manual_seed(0)
    there = other.sample(50)
    assert all(torch.equal(here[key], there[key]) for key in here)


def on_disk(folder: Path, capacity: int = 5) -> MemmapReplayBuffer:
    return MemmapReplayBuffer(memmap.Config(), capacity, folder=folder)


def test_on_disk_it_is_the_same_ring(tmp_path: Path) -> None:
    disk, memory = on_disk(tmp_path), ReplayBuffer(5)
    for values in ([0, 1, 2], [3, 4, 5, 6], [7], range(8, 20)):
        for replay in (disk, memory):
            replay.add(rows(values))
        assert held(disk) == held(memory)
    torch.manual_seed(0)
    here = disk.sample(30)
    torch.manual_seed(0)
    there = memory.sample(30)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) for key in here)
    with pytest.raises(ValueError, match="new missing"):
        disk.add({"reward": torch.zeros(1)})


def test_rows_survive_kill_9(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, '.')\n"
        "from tests.buffers.test_replay_kinds import *\n"
        f"replay = on_disk(Path({str(tmp_path)!r}))\n"
        "replay.add(rows(range(7)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    replay = on_disk(tmp_path)
    assert (len(replay), held(replay)) == (5, [2, 3, 4, 5, 6])
    replay.add(rows([9]))
    assert held(replay) == [9, 3, 4, 5, 6]


def test_a_checkpoint_of_a_replay_on_disk_is_small_and_exact(tmp_path: Path) -> None:
    replay = on_disk(tmp_path, 100)
    replay.add(rows(range(30)))
    state = replay.get_state()
    replay.add(rows(range(70, 90)))  # after the checkpoint, to be done again
    again = on_disk(tmp_path, 100)
    again.set_state(state)
    assert held(again) == list(range(30))
    again.add(rows([30]))
    assert held(again) == list(range(31))
    with pytest.raises(ConfigError, match="holds 0 transitions"):
        on_disk(tmp_path / "elsewhere", 100).set_state(state)
    with pytest.raises(ConfigError, match="capacity 100"):
        on_disk(tmp_path, 50)


def steps(values: Sequence[float]) -> Tensors:
    return {"reward": torch.tensor(values)}


def flags(*values: bool) -> Tensor:
    return torch.tensor(values)


def test_only_episodes_that_succeed_are_kept() -> None:
    """Row 0 succeeds in its third step, row 1 fails, then succeeds in one step."""
    none = ReplayBuffer(4)
    none.add(steps([-1.0]))
    source = SuccessBuffer(10, none)
    assert source.sample(2)["reward"].tolist() == [-1, -1]
    no, yes = flags(False, False), flags(True, False)
    source.push(steps([1, 10]), None, no, no)
    source.push(steps([2, 11]), None, no, flags(False, True))
    assert len(source) == 0
    source.push(steps([3, 12]), None, flags(True, True), flags(True, True))
    assert sorted(held(source.kept)) == [1, 2, 3, 12]
    source.push(steps([4, 13]), None, yes, no)  # reached, but the episode goes on
    assert len(source) == 4
    source.push(steps([5, 14]), None, no, yes)
    assert sorted(held(source.kept)) == [1, 2, 3, 4, 5, 12]


def test_long_episodes_and_rows_that_close_at_different_times() -> None:
    source = SuccessBuffer(100, ReplayBuffer(1))
    no = flags(False, False)
    for value in range(40):  # more than it first has room for; row 1 closes every second step
        who = torch.tensor([0, 1]) if value % 2 else torch.tensor([0])
        source.push(steps([value, 100 + value][: len(who)]), who, no, no)
    source.push({}, torch.empty(0, dtype=torch.int64), flags(False, True), flags(True, True))
    assert sorted(held(source.kept)) == [100 + value for value in range(1, 40, 2)]


def test_successes_resume_exactly() -> None:
    one, other = SuccessBuffer(10, ReplayBuffer(1)), SuccessBuffer(10, ReplayBuffer(1))
    no = flags(False, False)
    one.push(steps([1, 2]), None, no, no)
    other.set_state(one.get_state())
    for source in (one, other):
        source.push(steps([3, 4]), None, flags(False, True), flags(True, True))
    assert held(one.kept) == held(other.kept) == [2, 4]
