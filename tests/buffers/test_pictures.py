"""Pictures in replay: each frame is stored once and comes back exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from embodied.buffers import memmap, pictures, prioritized
from embodied.buffers.memmap import MemmapReplayBuffer
from embodied.buffers.pending import NStepBuffer
from embodied.buffers.prioritized import PrioritizedReplayBuffer
from embodied.buffers.replay import PICTURES, ReplayBuffer
from embodied.core import tensors as tt
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.wrappers.delays import stacked

SIDE, ENVS, CAPACITY = 24, 3, 40


def played(
    count: int, stack: int = 1, n_step: int = 1, depth: bool = False, ends: float = 0.15
) -> Iterator[Tensors]:
    """Transitions of `count` steps of 3 envs whose episodes end at random, with a camera `eye`:
    stacks of `stack` frames, oldest first, of which the first of an episode is repeated."""
    random = torch.Generator().manual_seed(0)
    channels = 1 if depth else 3

    def frames() -> torch.Tensor:
        shape = (ENVS, SIDE, SIDE, channels)
        if depth:
            return torch.rand(shape, generator=random)
        return torch.randint(256, shape, dtype=torch.uint8, generator=random)

    window = NStepBuffer(n_step, keep_single=True)
    obs = frames().repeat(1, 1, 1, stack)
    for time in range(count):
        after = torch.cat([obs[..., channels:], frames()], 3)
        ended = torch.rand(ENVS, generator=random) < ends
        rows = {
            "obs/eye": obs,
            "action": torch.full((ENVS, 1), float(time)),
            "reward": torch.arange(ENVS) + 10.0 * time,
            "discount": torch.ones(ENVS),
            "next_obs/eye": after,
        }
        rows = window.push(rows, None, ended) if n_step > 1 else rows
        if rows:
            yield rows
        obs = torch.where(ended.view(-1, 1, 1, 1), frames().repeat(1, 1, 1, stack), after)


def made(kind: str, folder: Path) -> ReplayBuffer:
    if kind == "prioritized":
        return PrioritizedReplayBuffer(prioritized.Config(), CAPACITY)
    if kind == "mapped":
        return MemmapReplayBuffer(memmap.Config(), CAPACITY, folder=folder)
    return ReplayBuffer(CAPACITY)


def distinct(rows: Tensors, channels: int) -> int:
    """The number of different frames in transitions."""
    eyes = [value for key, value in rows.items() if key.endswith("obs/eye")]
    parts = [part for picture in eyes for part in picture.split(channels, 3)]
    return len({frame.numpy().tobytes() for part in parts for frame in part})


def require_same(here: Tensors, there: Tensors) -> None:
    assert here.keys() == there.keys()
    for key, value in there.items():
        assert here[key].dtype == value.dtype and torch.equal(here[key], value), key


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
    settings = CASES[case]
    replay = made(kind, tmp_path)
    whole: list[Tensors] = []
    for rows in played(60, **settings):
        replay.add(rows)
        whole += [tt.take(rows, torch.tensor([row])) for row in range(tt.length(rows))]
        kept = tt.cat(whole[-CAPACITY:])
        order = torch.arange(len(whole))[-CAPACITY:] % CAPACITY
        require_same(replay.take(order), kept)
        require_same({"obs/eye": replay.leaf("obs/eye", order)}, {"obs/eye": kept["obs/eye"]})
        store = replay._stores["eye"]
        assert len(store) == distinct(kept, 1 if "depth" in settings else 3)
    assert len(whole) > 3 * CAPACITY
    if case in ("plain", "stack", "depth"):
        assert len(store) <= PICTURES * CAPACITY + 8 * ENVS


@pytest.mark.parametrize("case", ["stack", "n-step"])
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "mapped"])
def test_it_goes_on_exactly(kind: str, case: str, tmp_path: Path) -> None:
    """What goes on is the same to the last bit, states included; the frames are saved once."""
    steps = list(played(40, **CASES[case]))
    one, before = made(kind, tmp_path), 12 if kind == "mapped" else 30
    for rows in steps[:before]:
        one.add(rows)
    torch.save(one.get_state(), tmp_path / "state.pt")
    other = made(kind, tmp_path)
    other.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(other._stores["eye"]) == len(one._stores["eye"])
    for rows in steps[before:]:
        for replay in [other] if kind == "mapped" else [one, other]:
            replay.add(rows)
    if kind == "mapped":  # the same files
        one = made(kind, tmp_path)
    require_same(other.take(torch.arange(CAPACITY)), one.take(torch.arange(CAPACITY)))
    here, there = one.get_state(), other.get_state()
    if kind != "mapped":
        require_same(here.pop("rows"), there.pop("rows"))
        require_same(here.pop("frames"), there.pop("frames"))
        frames = len(one._stores["eye"])
        assert (tmp_path / "state.pt").stat().st_size < 1.3 * frames * SIDE * SIDE * 3


def test_frames_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "hash", lambda data: 7, raising=False)
    replay, plain = ReplayBuffer(CAPACITY), []
    for rows in played(30):
        replay.add(rows)
        plain.append(rows)
    order = torch.arange(30 * ENVS)[-CAPACITY:]
    require_same(replay.take(order % CAPACITY), tt.take(tt.cat(plain), order))


def test_a_replay_on_disk_of_another_format_is_refused(tmp_path: Path) -> None:
    made("mapped", tmp_path).add(next(played(1)))
    file = tmp_path / "layout.json"
    file.write_text(file.read_text().replace('"format": 2,', ""))
    with pytest.raises(ValueError, match="another version of embodied"):
        made("mapped", tmp_path)


def test_the_memory_of_a_transition_counts_a_picture_once() -> None:
    eye = Leaf((84, 84, 3), "uint8", 0, 255)
    spec = Spec({"eye": eye, "state": Leaf((5,))}, Leaf((2,), low=-1.0, high=1.0), 0.1)
    rest = 2 * 4 * 5 + 4 * 2 + 8
    assert spec.transition_bytes() == 2 * 84 * 84 * 3 + rest
    assert spec.transition_bytes(pictures=1.0) == 84 * 84 * 3 + rest
    stack = spec.with_obs(eye=stacked(eye, 3))
    assert stack.transition_bytes(pictures=1.0) == 84 * 84 * 3 + rest
