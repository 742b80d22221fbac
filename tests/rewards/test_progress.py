"""Progress: hops by hand, pairs by quota, readouts on a corridor, shaping that moves no optimum."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.nn.statistics import spearman
from embodied.rewards.demonstrations.progress import (
    StepwiseProgress,
    agreement,
    balanced,
    cells,
    compose,
    hop,
    pairs,
)
from embodied.rewards.fitted import linear_progress
from tests.builders import make_reward, node_of
from tests.rewards.rows import write_episodes

SPEC = Spec({"state": Leaf((3,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
SMALL = {"hidden": [32, 32], "updates": 150, "batch_size": 128, "lr": 0.003, "noise": 0.02}
NODE = node_of("rewards.demonstrations.progress.StepwiseProgress", **SMALL)


def corridor(count: int, steps: int, seed: int) -> list[Tensor]:
    """States [steps + 1, 3] from about 0 to about 1 with wavering, a number that says nothing but
    which episode it is, and one that goes there and back."""
    random = torch.Generator().manual_seed(seed)
    walks = []
    for _ in range(count):
        start, end = 0.03 * torch.rand(2, generator=random)
        x = torch.linspace(float(start), 1 - float(end), steps + 1)
        x = x + 0.005 * torch.randn(steps + 1, generator=random)
        own = 0.2 * torch.randn((), generator=random).expand(steps + 1)
        walks.append(torch.stack([x, own, torch.sin(3 * x)], 1))
    return walks


def record(path: Path, walks: list[Tensor], spec: Spec = SPEC) -> str:
    return write_episodes(path, spec, [{"state": walk} for walk in walks])


def made(folder: Path, spec: Spec = SPEC, **settings: Any) -> StepwiseProgress:
    return make_reward(NODE | settings, spec, folder)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("demos"), corridor(3, 20, seed=1))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, shown: str) -> StepwiseProgress:
    folder = tmp_path_factory.mktemp("run")
    lost = record(folder / "lost", far_off())
    return made(folder, demos=shown, failures=lost, hidden=[64, 64], updates=500)


def far_off() -> list[Tensor]:
    """Walks where nothing but failed episodes says what they are."""
    return [walk + torch.tensor([0.0, 6.0, 0.0]) for walk in corridor(4, 20, seed=5)]


def with_time(values: Tensor) -> float:
    """Rank correlation with time."""
    return spearman(values, torch.arange(len(values)))


def test_hops_by_hand() -> None:
    before = torch.tensor([0.2, 0.6, 0.0, 1.0, 1.0, 0.0, 0.5])
    after = torch.tensor([0.6, 0.2, 1.0, 0.0, 1.0, 0.0, 0.5])
    expected = torch.tensor([0.5, -2 / 3, 1.0, -1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(hop(before, after), expected)
    torch.testing.assert_close(compose(before, expected), after)


def test_readouts_that_disagree_count_less() -> None:
    forward, backward = torch.tensor([0.4, 0.9]), torch.tensor([0.4, 0.4])
    torch.testing.assert_close(agreement(forward, backward, 0.5), torch.tensor([1.0, math.exp(-1)]))


def test_every_bin_gets_its_quota_and_the_centre_the_remainder() -> None:
    """25 scores of width 0.08 from -1, by 4 gaps of width 0.25."""
    label = torch.tensor([-1.0, 1.0, 0.0, -0.9, 0.5])
    gap = torch.tensor([1.0, 0.99, 0.0, 0.25, 0.5])
    assert cells(label, gap).tolist() == [3, 24 * 4 + 3, 12 * 4, 1 * 4 + 1, 18 * 4 + 2]
    cell = torch.tensor([0, 12 * 4, 24 * 4]).repeat_interleave(torch.tensor([50, 3, 7]))
    chosen = cell[balanced(cell, 32, torch.Generator().manual_seed(0))]
    assert chosen.unique(return_counts=True)[1].tolist() == [11, 11, 10]


def test_progress_of_moments_and_labels_of_pairs() -> None:
    frames = linear_progress(torch.tensor([3, 5]))
    assert frames.progress.tolist() == [0.0, 0.5, 1.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    failed = linear_progress(torch.tensor([4]), succeeds=False)
    assert not failed.progress.any() and failed.place[-1] == 1
    random = torch.Generator().manual_seed(0)
    for cross in (0.0, 1.0):
        before, after, label = pairs(frames, 100, zero=0.05, cross=cross, random=random)
        assert len(label) == 100
        assert torch.equal(before[95:], after[95:]) and not label[95:].any()
        other = frames.episode[before[:95]] != frames.episode[after[:95]]
        assert other.all() if cross else not other.any()
        torch.testing.assert_close(label, hop(frames.progress[before], frames.progress[after]))


def test_held_out_walks_are_in_order_and_failures_are_no_progress(fitted: StepwiseProgress) -> None:
    """The targets of the method card: VOC above 0.95, gap below 0.1."""
    for walk in corridor(4, 20, seed=2):
        forward, _, backward = fitted.readouts({"state": walk})
        phi = fitted.potential({"state": walk})
        assert with_time(phi) > 0.95
        assert (forward - backward).abs().mean() < 0.1
        assert phi.min() >= 0 and phi.max() <= 1
        assert phi[0] < 0.2 and phi[-1] > 0.7
    assert fitted.potential({"state": torch.cat(far_off())}).mean() < 0.1


def test_a_moment_is_read_from_anchors_of_known_progress(fitted: StepwiseProgress) -> None:
    """Forward is the hop from a demonstration's start, clipped; backward 1 + the hop from its end;
    both the mean over the three demonstrations."""
    walk = corridor(1, 6, seed=3)[0]
    seen = fitted.net.encoder({"state": walk})
    anchors = fitted.net.encoder(fitted.anchors()).view(3, 3, -1)
    forward, backward = torch.zeros(7), torch.zeros(7)
    for demo in anchors:
        start, goal = demo[:1].expand_as(seen), demo[-1:].expand_as(seen)
        forward += fitted.net(start, seen, start, goal).clamp(0, 1) / 3
        backward += (1 + fitted.net(goal, seen, start, goal)).clamp(0, 1) / 3
    read = fitted.readouts({"state": walk})
    torch.testing.assert_close(read[0], forward)
    torch.testing.assert_close(read[2], backward)
    fused = (forward + backward + read[1]) / 3
    phi = fused * torch.exp(-(((forward - backward) / 0.5) ** 2))
    torch.testing.assert_close(fitted.potential({"state": walk}), phi)


def test_rows_are_paid_by_the_potential_of_both_ends(fitted: StepwiseProgress) -> None:
    """gamma^k as the row has it: at least two steps, a chunk of three, a true end (0)."""
    walk = corridor(1, 3, seed=3)[0]
    rows = {"obs/state": walk[:3], "next_obs/state": walk[1:]}
    rows |= {"reward": torch.tensor([0.0, 0.5, 1.0]), "discount": torch.tensor([0.99, 0.97, 0.0])}
    phi = fitted.potential({"state": walk})
    expected = rows["reward"] + rows["discount"] * phi[1:] - phi[:3]
    torch.testing.assert_close(fitted(rows), expected)


def test_it_is_fitted_once_a_folder_and_by_its_seed_alone(tmp_path: Path, shown: str) -> None:
    walk, card = {"state": corridor(1, 5, seed=4)[0]}, tmp_path / "a" / "progress.json"
    first = made(tmp_path / "a", demos=shown, updates=5)
    assert json.loads(card.read_text())["error"] > 0
    written = card.stat().st_mtime_ns
    torch.manual_seed(7)  # the run's own random numbers do not matter
    for name in "ab":
        again = made(tmp_path / name, demos=shown, updates=5)
        assert torch.equal(first.potential(walk), again.potential(walk))
    assert card.stat().st_mtime_ns == written
    other = made(tmp_path / "a", demos=shown, updates=1)
    assert card.stat().st_mtime_ns != written
    assert not torch.equal(first.potential(walk), other.potential(walk))
    other.set_state(first.get_state())
    assert torch.equal(first.potential(walk), other.potential(walk))


def test_what_is_missing_or_does_not_fit_is_said(tmp_path: Path, shown: str) -> None:
    short = record(tmp_path / "short", corridor(2, 1, seed=0))
    wide = Spec({"state": Leaf((4,))}, SPEC.act, dt=0.1)
    for settings, message in (
        ({}, "reward.demos=DIR"),
        ({"demos": shown, "views": ["stat"]}, 'has no observation stat \\(did you mean "state"'),
        ({"demos": shown, "views": []}, "is empty"),
        ({"demos": short}, "at least two steps"),
        ({"demos": shown, "spec": wide}, "state is float32\\[4\\] in the environment"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(tmp_path / "run", **settings)


def test_two_pictures_of_a_moment_are_seen_together(tmp_path: Path) -> None:
    """A bright column that moves along one view; the other view is noise."""
    leaf = Leaf((16, 16, 3), "uint8", 0, 255)
    spec = Spec({"front": leaf, "wrist": leaf}, SPEC.act, dt=0.1)

    def film(seed: int) -> dict[str, Tensor]:
        front = torch.zeros(15, 16, 16, 3, dtype=torch.uint8)
        for t in range(15):
            front[t, :, t : t + 2] = 255
        random = torch.Generator().manual_seed(seed)
        wrist = torch.randint(256, front.shape, dtype=torch.uint8, generator=random)
        return {"front": front, "wrist": wrist}

    settings = {"views": ["front", "wrist"], "channels": [8, 8], "shift": 0, "updates": 60}
    demos = write_episodes(tmp_path / "demos", spec, [film(0), film(1)], images="png")
    reward = made(tmp_path / "run", spec, demos=demos, **settings)
    assert with_time(reward.potential(film(7))) > 0.9
