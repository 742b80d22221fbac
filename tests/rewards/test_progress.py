"""Progress from demonstrations: hops and windows by hand, pairs by quota, rewound videos, readouts
on a corridor, weights of imitation (RA-BC)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.buffers.weighted import Weighted
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.transitions import transitions, with_observations
from embodied.nn.statistics import spearman
from embodied.reports.datasets import labels
from embodied.rewards.demonstrations.progress import (
    StepwiseProgress,
    agreement,
    balanced,
    cells,
    compose,
    hop,
    pairs,
)
from embodied.rewards.demonstrations.rewind import (
    PROGRESS,
    Config,
    ProgressGain,
    Rewind,
    Window,
    draw,
    weights,
)
from embodied.rewards.fitted import linear_progress
from tests.builders import make_reward, node_of
from tests.rewards.rows import write_episodes
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

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


def test_hops_and_readouts_that_disagree_by_hand() -> None:
    before = torch.tensor([0.2, 0.6, 0.0, 1.0, 1.0, 0.0, 0.5])
    after = torch.tensor([0.6, 0.2, 1.0, 0.0, 1.0, 0.0, 0.5])
    expected = torch.tensor([0.5, -2 / 3, 1.0, -1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(hop(before, after), expected)
    torch.testing.assert_close(compose(before, expected), after)
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


REWIND = node_of(
    "rewards.demonstrations.rewind.Rewind", hidden=[32, 32], updates=400, batch_size=128, lr=0.003
)
HOW = Config(updates=1, batch_size=500, rewind=0.0, mismatch=0.0, noise=0.0)


def made_rewind(folder: Path, spec: Spec = SPEC, **settings: Any) -> Rewind:
    return make_reward(REWIND | settings, spec, folder)


@pytest.fixture(scope="module")
def six_shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("demos"), corridor(6, 20, seed=1))


@pytest.fixture(scope="module")
def rewind(tmp_path_factory: pytest.TempPathFactory, six_shown: str) -> Rewind:
    folder = tmp_path_factory.mktemp("run")
    return made_rewind(folder, demos=six_shown, mismatched=record(folder / "lost", far_off()))


def progress(reward: Rewind, walk: Tensor) -> Tensor:
    return reward.augment_episode({"state": walk})[PROGRESS]


def test_windows_by_hand() -> None:
    window = Window(history=3, stride=2)
    places = [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 3], [0, 5, 7, 9]]
    assert window.places(torch.tensor([0, 1, 3, 9])).tolist() == places
    assert window.reach == 5


def test_a_rewound_video_goes_back_from_where_it_turned() -> None:
    """Every window ends with a step back, begins at the first frame of its own demonstration, and
    its progress is that of its newest frame; without rewinding every video goes forward."""
    frames = linear_progress(torch.tensor([9, 6]))
    index, label = draw(frames, 2, Window(3, 1), replace(HOW, rewind=1.0))
    still = frames.place[index[:, 2]] == 0  # a video of one frame cannot go back
    back = index[:, 3] == index[:, 2] - 1
    assert (frames.place[index[:, 0]] == 0).all() and (back | still).all() and back.sum() > 300
    up = index[:, 2] == index[:, 1] + 1  # it went forward before
    assert (back & up).sum() > 50
    assert (frames.episode[index] == frames.episode[index[:, :1]]).all()
    torch.testing.assert_close(label, frames.progress[index[:, 3]])
    index, _ = draw(frames, 2, Window(2, 1), HOW)
    assert (index[:, 2] >= index[:, 1]).all() and (index[:, 2] == index[:, 1] + 1).sum() > 400


def test_mismatched_episodes_have_their_share_and_no_progress() -> None:
    failed = linear_progress(torch.tensor([6]), succeeds=False)
    frames = linear_progress(torch.tensor([9])).followed_by(failed)
    index, label = draw(frames, 1, Window(2, 1), replace(HOW, rewind=0.5, mismatch=0.3))
    other = frames.episode[index[:, -1]] == 1
    assert int(other.sum()) == 150 and not label[other].any() and label[~other].any()


def test_progress_rises_along_held_out_walks_and_falls_when_they_go_back(rewind: Rewind) -> None:
    for walk in corridor(4, 20, seed=2):
        there = progress(rewind, walk)
        assert spearman(there, torch.arange(21)) > 0.95
        assert there[0] < 0.2 and there[-1] > 0.8
        both = progress(rewind, torch.cat([walk, walk.flip(0)[1:]]))
        assert spearman(both[21:], torch.arange(20)) < -0.9
        assert both[-1] < 0.3
    assert progress(rewind, far_off()[0]).mean() < 0.1


@pytest.mark.parametrize(
    ("value", "paid"), [("level", [-1.0, 1.8]), ("gain", [0.6, 2.8]), ("potential", [0.5, 2.0])]
)
def test_the_reward_by_hand(tmp_path: Path, six_shown: str, value: str, paid: list[float]) -> None:
    """Progress 0.2 -> 0.5, and 0.5 -> 0.4 at a true end, where the world pays 1."""
    settings = {"value": value, "scale": 2.0, "env_weight": 3.0}
    reward = made_rewind(tmp_path, demos=six_shown, updates=1, **settings)
    rows = {
        f"obs/{PROGRESS}": torch.tensor([0.2, 0.5]),
        f"next_obs/{PROGRESS}": torch.tensor([0.5, 0.4]),
        "reward": torch.tensor([0.0, 1.0]),
        "discount": torch.tensor([0.9, 0.0]),
    }
    torch.testing.assert_close(reward(rows), torch.tensor(paid))


def test_running_episodes_have_the_progress_of_recorded_ones(tmp_path: Path) -> None:
    """Step for step, in two environments that end at different times, and on from a saved state."""
    spec = Spec({"state": Leaf((1,))}, SPEC.act, dt=0.1)
    counts = [{"state": torch.arange(start, start + 6.0)[:, None]} for start in range(4)]
    demos = write_episodes(tmp_path / "demos", spec, counts)
    reward = made_rewind(tmp_path / "run", spec, demos=demos, updates=20, history=2, stride=2)
    env, later = (reward.augment_env(Counter(CounterConfig(ends=(3, 5)))) for _ in range(2))
    later.reset(7)
    obs, began = env.reset(0), [0, 0]
    progress, states = [obs[PROGRESS]], [obs["state"]]
    for step in range(1, 9):
        if step == 5:  # another environment goes on from its state
            obs = later.set_state(env.get_state())
            torch.testing.assert_close(obs[PROGRESS], progress[-1])
            env = later
        done = env.step(torch.zeros(2, 1))
        progress.append(done.next_obs[PROGRESS])
        states.append(done.next_obs["state"])
        for i, first in enumerate(began):
            seen = torch.stack([state[i] for state in states[first:]])
            offline = reward.augment_episode({"state": seen})[PROGRESS]
            torch.testing.assert_close(progress[-1][i], offline[-1])
        for i in done.ended.nonzero().flatten().tolist():
            began[i] = step
            states[-1] = torch.where(done.ended[:, None], done.obs["state"], states[-1])


def test_demonstrations_and_datasets_get_the_same_reward(six_shown: str, rewind: Rewind) -> None:
    """As transitions of a learner, and as `embodied reward score` asks for them."""
    episodes = read_episodes(Path(six_shown))
    rows = transitions(with_observations(episodes, rewind.augment_episode), 0.9)
    scored = torch.cat([labels(rewind, episodes.episode(e), 0.9)[0] for e in range(len(episodes))])
    torch.testing.assert_close(rewind(rows), scored)
    per_episode = scored.view(len(episodes), -1)
    assert all(spearman(one, torch.arange(20)) > 0.9 for one in per_episode)


def test_images_are_seen_by_the_frozen_encoder(tmp_path: Path) -> None:
    """A square that fills with green, by the packaged encoder; the encoder is not saved."""
    spec = Spec({"front": Leaf((24, 24, 3), "uint8", 0, 255)}, SPEC.act, dt=0.1)

    def film(seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        front = torch.randint(40, 60, (13, 24, 24, 3), dtype=torch.uint8, generator=random)
        for t in range(13):
            front[t, : 2 * t, :, 1] = 220
        return {"front": front}

    films = [film(seed) for seed in range(5)]
    demos = write_episodes(tmp_path / "demos", spec, films, images="png")
    reward = made_rewind(tmp_path / "run", spec, demos=demos, views=["front"])
    assert spearman(reward.augment_episode(film(9))[PROGRESS], torch.arange(13)) > 0.9
    assert not any("eyes" in name for name in reward.state_dict())
    with pytest.raises(ConfigError, match="no observation front"):
        reward.augment_episode({"state": torch.zeros(3, 1)})


WEIGHTING = {"_target_": "embodied.rewards.demonstrations.rewind.ProgressGain"}


def test_weights_by_hand_and_without_any_gain() -> None:
    gain = torch.tensor([-0.5, -0.01, 0.0, 0.005, 0.02, 0.4], dtype=torch.float64)
    mean, std = gain.mean(), gain.std(correction=0)
    expected = (gain - (mean - 2 * std)) / (4 * std)
    expected[:2], expected[4:] = 0, 1
    assert 0 < expected[2] < expected[3] < 1
    torch.testing.assert_close(weights(gain, 0.01), expected)
    with pytest.raises(ConfigError, match=r"weighting\.rewind\.demos=DIR"):
        build(WEIGHTING, ProgressGain)
    with pytest.raises(ConfigError, match="gains progress"):
        weights(torch.tensor([-0.1, -0.2], dtype=torch.float64), 0.01)


def test_detours_are_not_sampled(tmp_path: Path, six_shown: str) -> None:
    """Walks that turn back in their middle: the steps back have little weight, those on much."""
    walks = corridor(4, 20, seed=2)
    detours = [torch.cat([walk[:13], walk[4:12].flip(0), walk[4:]]) for walk in walks]
    episodes = read_episodes(Path(record(tmp_path / "mixed", detours)))
    settings = {"demos": six_shown, "updates": 400, "hidden": [32, 32], "lr": 0.003}
    weight = build(WEIGHTING | {"horizon": 3, "rewind": settings}, ProgressGain)(episodes)
    each = weight.view(4, 37)
    back, onwards = torch.arange(12, 18), torch.cat([torch.arange(10), torch.arange(21, 36)])
    # What comes three steps later is still on the way back.
    assert each[:, back].mean() < 0.1 and each[:, onwards].mean() > 0.9
    drawn = Weighted({"x": torch.arange(4 * 37)}, weight).sample(2000)["x"] % 37
    assert float(torch.isin(drawn, back).float().mean()) < 0.05
