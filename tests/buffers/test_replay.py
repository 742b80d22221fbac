"""Replay: the ring by hand, packing, pictures, priorities, files, huge pages, exact resume."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.buffers import memmap, pictures, prioritized
from embodied.buffers.memmap import MemmapReplayBuffer
from embodied.buffers.pending import NStepBuffer, SuccessBuffer, TrajectoryColumns
from embodied.buffers.prioritized import PrioritizedReplayBuffer, SumTree
from embodied.buffers.replay import LEAST, PICTURES, ReplayBuffer, empty
from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.wrappers.delays import stacked
from embodied.evaluation.evaluate import EpisodeMeans


def rows(values: Sequence[float]) -> Tensors:
    """Rows whose every leaf tells which row it is."""
    v = torch.tensor(values, dtype=torch.float32)
    return {
        "reward": v,
        "obs/state": torch.stack([v, v + 0.25], 1),
        "action": v[:, None] + 0.5,
        "next_obs/state": torch.stack([v + 1, v + 1.25], 1),
        "obs/wrist": v.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 2, 3),
        "obs/grid": v[:, None, None].expand(-1, 2, 2),
        "episode": v.long(),
    }


def held(replay: ReplayBuffer) -> list[float]:
    return replay.take(torch.arange(len(replay)))["reward"].tolist()


def require_same(here: Tensors, there: Tensors) -> None:
    assert here.keys() == there.keys()
    for key, value in there.items():
        assert here[key].dtype == value.dtype and torch.equal(here[key], value), key


def test_ring_overwrites_the_oldest() -> None:
    replay = ReplayBuffer(5)
    for given, kept in (
        ([0, 1, 2], [0, 1, 2]),
        ([3, 4, 5, 6], [5, 6, 2, 3, 4]),  # 3, 4 to the end, then 5, 6 over 0, 1
        ([7], [5, 6, 7, 3, 4]),
        (range(8, 15), [10, 11, 12, 13, 14]),  # more than fit: the last ones
    ):
        replay.add(rows(given))
        found = held(replay)
        assert len(replay) == len(kept) and (found if len(given) < 5 else sorted(found)) == kept
    full = ReplayBuffer(3)
    full.add(rows([0, 1, 2]))
    full.add(rows([3]))
    assert held(full) == [3, 1, 2]


def test_sampled_rows_are_whole_copies_drawn_by_the_default_generator() -> None:
    replay, given = ReplayBuffer(50), rows(range(40))
    replay.add(given)
    torch.manual_seed(3)
    drawn, other = replay.sample(200), replay.sample(200)
    which = drawn["reward"].long()
    assert which.unique().numel() > 30  # all of the storage is drawn from
    require_same(drawn, tt.take(given, which))
    drawn["reward"].fill_(-1)
    torch.manual_seed(3)
    again = replay.sample(200)["reward"]
    assert torch.equal(again, which.float()) and not torch.equal(again, other["reward"])


def test_an_empty_buffer_is_saved_and_cannot_be_sampled() -> None:
    replay = ReplayBuffer(5)
    replay.set_state(ReplayBuffer(5).get_state())
    assert len(replay) == 0
    with pytest.raises(ValueError, match="is empty"):
        replay.sample(1)
    with pytest.raises(ValueError, match="capacity 5, this one 6"):
        ReplayBuffer(6).set_state(replay.get_state())


def test_rows_that_do_not_fit_are_named() -> None:
    replay, one = ReplayBuffer(5), rows([1])
    replay.add(rows([0]))
    less = {key: value for key, value in one.items() if key != "reward"}
    for wrong, says in (
        (one | {"action": torch.zeros(1, 2)}, r"action: stored \[1\], new \[2\]"),
        (one | {"cost": torch.zeros(1)}, "cost: stored missing"),
        (less, r"reward: stored \[\], new missing"),
    ):
        with pytest.raises(ValueError, match=says):
            replay.add(wrong)
    assert held(replay) == [0]


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


def test_changed_one_by_one_or_at_once() -> None:
    """The sums of three levels, and where the running sums pass, from the leaves alone; a place
    with nothing is never found."""
    one, other = SumTree(40_000), SumTree(40_000)
    torch.manual_seed(0)
    values = torch.randint(0, 5, (40_000,)).double()  # exact sums
    one.put(torch.arange(40_000), values)
    for part in torch.randperm(40_000).split(100):
        other.put(part, values[part])
    assert all(map(torch.equal, one.levels, other.levels))
    mass = torch.rand(1000, dtype=torch.float64) * one.total
    found = one.find(mass)
    assert torch.equal(found, torch.searchsorted(values.cumsum(0), mass, right=True))
    assert values[found].all()


def ranked(capacity: int, *priorities: float, **settings: float) -> PrioritizedReplayBuffer:
    """A buffer with a row of each of `priorities`."""
    config = prioritized.Config(**{"alpha": 1.0, "epsilon": 0.0, **settings})
    replay = PrioritizedReplayBuffer(config, capacity)
    replay.add(rows(range(len(priorities))))
    replay.settle(torch.arange(len(priorities)), torch.tensor(priorities))
    return replay


def test_the_priority_decides_how_often() -> None:
    """alpha 1, priorities 1 3 6 (of 10); weights (3 P)^-1 over the largest: 1/1, 1/3, 1/6."""
    batch = ranked(8, 1.0, 3.0, 6.0, beta=1.0).sample(10_000)
    assert torch.equal(batch["index"], batch["reward"].long())
    share = batch["index"].bincount() / 10_000
    torch.testing.assert_close(share, torch.tensor([0.1, 0.3, 0.6]), atol=1e-3, rtol=0)
    expected = torch.tensor([1.0, 1 / 3, 1 / 6])[batch["index"]]
    torch.testing.assert_close(batch["weight"], expected)


def test_slices_of_a_batch_are_of_all_ages() -> None:
    """As one sample per stratum in their order, the first half was of the older half alone."""
    torch.manual_seed(0)
    one, other = ranked(64, *[1.0] * 64).sample(64)["index"].chunk(2)
    assert (one < 32).any() and (one >= 32).any() and abs(one.sum() - other.sum()) < 400


def test_alpha_and_epsilon_by_hand() -> None:
    replay = ranked(4, 0.0, 8.0, alpha=0.5, epsilon=1.0)  # (8 + 1)^0.5
    assert replay.tree.leaves[:3].tolist() == [1.0, 3.0, 0.0]
    replay.add(rows([2]))  # as surprising as the most surprising so far
    assert replay.tree.leaves[2].item() == 3.0


def test_overwritten_rows_are_new_again() -> None:
    replay = ranked(3, 0.1, 0.2, 0.3)
    replay.add(rows([3, 4]))
    assert held(replay) == [3, 4, 2]
    assert replay.tree.leaves[:3].tolist() == pytest.approx([1, 1, 0.3])


def test_beta_reaches_one() -> None:
    replay = ranked(2, 1.0, 3.0, beta=0.0, anneal=1)
    assert replay.sample(100)["weight"].eq(1).all()
    later = replay.sample(100)
    assert later["weight"][later["index"] == 1].mean().item() == pytest.approx(1 / 3)


def on_disk(folder: Path, capacity: int = 5) -> MemmapReplayBuffer:
    return MemmapReplayBuffer(memmap.Config(), capacity, folder=folder)


def test_on_disk_it_is_the_same_ring(tmp_path: Path) -> None:
    both = on_disk(tmp_path), ReplayBuffer(5)
    for values in ([0, 1, 2], [3, 4, 5, 6], [7], range(8, 20)):
        for replay in both:
            replay.add(rows(values))
        assert held(both[0]) == held(both[1])
    drawn: list[Tensors] = []
    for replay in both:
        torch.manual_seed(0)
        drawn.append(replay.sample(30))
    require_same(*drawn)
    with pytest.raises(ValueError, match="new missing"):
        both[0].add({"reward": torch.zeros(1)})


def test_rows_survive_kill_9(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, '.')\n"
        "from tests.buffers.test_replay import *\n"
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
    file = tmp_path / "layout.json"
    file.write_text(file.read_text().replace('"format": 2,', ""))
    with pytest.raises(ValueError, match="another version of embodied"):
        on_disk(tmp_path, 100)


def steps(values: Sequence[float]) -> Tensors:
    return {"reward": torch.tensor(values)}


NO, BOTH = torch.tensor([False, False]), torch.tensor([True, True])
FIRST, SECOND = torch.tensor([True, False]), torch.tensor([False, True])


def test_only_episodes_that_succeed_are_kept() -> None:
    """Row 0 succeeds in its third step, row 1 fails, then succeeds in one step."""
    none = ReplayBuffer(4)
    none.add(steps([-1.0]))
    source = SuccessBuffer(10, none)
    assert source.sample(2)["reward"].tolist() == [-1, -1]
    for rewards, success, ended, kept in (
        ([1, 10], NO, NO, []),
        ([2, 11], NO, SECOND, []),
        ([3, 12], BOTH, BOTH, [1, 2, 3, 12]),
        ([4, 13], FIRST, NO, [1, 2, 3, 12]),  # reached, but the episode goes on
        ([5, 14], NO, FIRST, [1, 2, 3, 4, 5, 12]),
    ):
        source.push(steps(rewards), None, success, ended)
        assert len(source) == len(kept)
        assert not kept or sorted(held(source.kept)) == kept


def test_long_episodes_and_rows_that_close_at_different_times() -> None:
    source = SuccessBuffer(100, ReplayBuffer(1))
    for value in range(40):  # more than it first has room for; row 1 closes every second step
        who = torch.arange(1 + value % 2)
        source.push(steps([value, 100 + value][: len(who)]), who, NO, NO)
    source.push({}, torch.empty(0, dtype=torch.int64), SECOND, BOTH)
    assert sorted(held(source.kept)) == [100 + value for value in range(1, 40, 2)]


LOST = torch.tensor([1])


def paid(reward: float) -> Tensors:
    return {"reward": torch.full((2,), reward), "discount": torch.full((2,), 0.5)}


def test_returns_do_not_reach_back_into_a_lost_episode() -> None:
    columns = TrajectoryColumns(["returns"])
    columns.push(paid(8.0), None, NO)
    columns.forget(LOST)
    done = columns.push(paid(1.0) | {"discount": torch.zeros(2)}, None, BOTH)
    assert done["reward"].tolist() == [8, 1, 1] and done["returns"].tolist() == [8.5, 1, 1]


def test_a_lost_episode_is_no_success() -> None:
    buffer = SuccessBuffer(10, ReplayBuffer(10))
    buffer.push(paid(8.0), None, BOTH, NO)
    buffer.forget(LOST)
    buffer.push(paid(1.0), None, NO, BOTH)
    assert sorted(held(buffer.kept)) == [1, 8]


def test_a_lost_episode_is_not_in_the_means() -> None:
    means, obs = EpisodeMeans(), {"state": torch.zeros(2, 1)}
    means.add(Step(obs, obs, torch.full((2,), 5.0), NO, NO, {}))
    means.forget(LOST)
    means.add(Step(obs, obs, torch.full((2,), 1.0), NO, BOTH, {}))
    assert means.drain() == {"return": 3.5, "length": 1.5}


ROWS = LEAST // 4 // 16  # of 16 floats
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kb() -> int:
    """Memory of this process in huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages:\s+(\d+)", text)[1])  # type: ignore[index]


def test_a_large_array_has_shape_and_type_and_can_be_written() -> None:
    made = empty((ROWS, 4, 16), torch.uint8, "cpu")
    assert made.shape == (ROWS, 4, 16) and made.dtype == torch.uint8 and made.is_contiguous()
    made[3] = 7
    other = copy.deepcopy(made[2:5])
    del made
    assert int(other[1].sum()) == 7 * 64


@pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="no huge pages on this system"
)
def test_a_large_array_is_in_huge_pages_and_goes_with_its_tensor() -> None:
    before = huge_kb()
    made = empty((ROWS, 16), torch.float32, "cpu")
    made.fill_(1.0)
    assert huge_kb() - before > LEAST // 1024 // 2
    del made
    assert huge_kb() - before < LEAST // 1024 // 2


SIDE, ENVS, CAPACITY = 24, 3, 40


def played(
    count: int, stack: int = 1, n_step: int = 1, depth: bool = False, ends: float = 0.15
) -> Iterator[Tensors]:
    """Transitions of `count` steps of 3 envs whose episodes end at random, with a camera `eye`:
    stacks of `stack` frames, oldest first, of which the first of an episode is repeated."""
    random = torch.Generator().manual_seed(0)
    channels = 1 if depth else 3

    def frames() -> Tensor:
        shape = (ENVS, SIDE, SIDE, channels)
        if depth:
            return torch.rand(shape, generator=random)
        return torch.randint(256, shape, dtype=torch.uint8, generator=random)

    window = NStepBuffer(n_step, keep_single=True)
    obs = frames().repeat(1, 1, 1, stack)
    for time in range(count):
        after = torch.cat([obs[..., channels:], frames()], 3)
        ended = torch.rand(ENVS, generator=random) < ends
        made = {
            "obs/eye": obs,
            "action": torch.full((ENVS, 1), float(time)),
            "reward": torch.arange(ENVS) + 10.0 * time,
            "discount": torch.ones(ENVS),
            "next_obs/eye": after,
        }
        made = window.push(made, None, ended) if n_step > 1 else made
        if made:
            yield made
        obs = torch.where(ended.view(-1, 1, 1, 1), frames().repeat(1, 1, 1, stack), after)


def made(kind: str, folder: Path) -> ReplayBuffer:
    if kind == "prioritized":
        return PrioritizedReplayBuffer(prioritized.Config(), CAPACITY)
    return on_disk(folder, CAPACITY) if kind == "mapped" else ReplayBuffer(CAPACITY)


def distinct(rows: Tensors, channels: int) -> int:
    """The number of different frames in transitions."""
    eyes = [value for key, value in rows.items() if key.endswith("obs/eye")]
    parts = [part for picture in eyes for part in picture.split(channels, 3)]
    return len({frame.numpy().tobytes() for part in parts for frame in part})


CASES = {
    "plain": {},
    "stack": {"stack": 4},
    "n-step": {"n_step": 3, "stack": 2},
    "depth": {"depth": True},
    "short": {"ends": 0.9},  # more frames than there is room for at first
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "mapped"])
def test_each_frame_is_stored_once_and_exactly(kind: str, case: str, tmp_path: Path) -> None:
    """Beside a ring of whole transitions, past its end several times."""
    replay, whole = made(kind, tmp_path), list[Tensors]()
    for given in played(60, **CASES[case]):
        replay.add(given)
        whole += [tt.take(given, torch.tensor([row])) for row in range(tt.length(given))]
        kept = tt.cat(whole[-CAPACITY:])
        order = torch.arange(len(whole))[-CAPACITY:] % CAPACITY
        require_same(replay.take(order), kept)
        assert torch.equal(replay.leaf("obs/eye", order), kept["obs/eye"])
        store = replay._stores["eye"]
        assert len(store) == distinct(kept, 1 if case == "depth" else 3)
    assert len(whole) > 3 * CAPACITY
    if case in ("plain", "stack", "depth"):
        assert len(store) <= PICTURES * CAPACITY + 8 * ENVS


@pytest.mark.parametrize("case", ["stack", "n-step"])
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "mapped"])
def test_it_goes_on_exactly(kind: str, case: str, tmp_path: Path) -> None:
    """What goes on is the same to the last bit, states included; the frames are saved once."""
    steps, mapped = list(played(40, **CASES[case])), kind == "mapped"
    one, before = made(kind, tmp_path), 12 if mapped else 30
    for given in steps[:before]:
        one.add(given)
    torch.save(one.get_state(), tmp_path / "state.pt")
    other = made(kind, tmp_path)
    other.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(other._stores["eye"]) == len(one._stores["eye"])
    for given in steps[before:]:
        for replay in [other] if mapped else [one, other]:
            replay.add(given)
    one = made(kind, tmp_path) if mapped else one  # the same files
    require_same(other.take(torch.arange(CAPACITY)), one.take(torch.arange(CAPACITY)))
    if not mapped:
        here, there = one.get_state(), other.get_state()
        require_same(here["rows"], there["rows"])
        require_same(here["frames"], there["frames"])
        frames = len(one._stores["eye"])
        assert (tmp_path / "state.pt").stat().st_size < 1.3 * frames * SIDE * SIDE * 3


def test_frames_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "hash", lambda data: 7, raising=False)
    replay, plain = ReplayBuffer(CAPACITY), list(played(30))
    for given in plain:
        replay.add(given)
    order = torch.arange(30 * ENVS)[-CAPACITY:]
    require_same(replay.take(order % CAPACITY), tt.take(tt.cat(plain), order))


def test_the_memory_of_a_transition_counts_a_picture_once() -> None:
    eye = Leaf((84, 84, 3), "uint8", 0, 255)
    spec = Spec({"eye": eye, "state": Leaf((5,))}, Leaf((2,), low=-1.0, high=1.0), 0.1)
    rest = 2 * 4 * 5 + 4 * 2 + 8
    assert spec.transition_bytes() == 2 * 84 * 84 * 3 + rest
    assert spec.transition_bytes(pictures=1.0) == 84 * 84 * 3 + rest
    stack = spec.with_obs(eye=stacked(eye, 3))
    assert stack.transition_bytes(pictures=1.0) == 84 * 84 * 3 + rest
