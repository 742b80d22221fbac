"""ReWiND: windows by hand, rewound videos, progress that falls; weights of imitation (RA-BC)."""

from __future__ import annotations

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
from tests.rewards.test_progress import SPEC, corridor, far_off, record
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

NODE = node_of(
    "rewards.demonstrations.rewind.Rewind", hidden=[32, 32], updates=400, batch_size=128, lr=0.003
)
HOW = Config(updates=1, batch_size=500, rewind=0.0, mismatch=0.0, noise=0.0)


def made(folder: Path, spec: Spec = SPEC, **settings: Any) -> Rewind:
    return make_reward(NODE | settings, spec, folder)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("demos"), corridor(6, 20, seed=1))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, shown: str) -> Rewind:
    folder = tmp_path_factory.mktemp("run")
    return made(folder, demos=shown, mismatched=record(folder / "lost", far_off()))


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


def test_progress_rises_along_held_out_walks_and_falls_when_they_go_back(fitted: Rewind) -> None:
    for walk in corridor(4, 20, seed=2):
        there = progress(fitted, walk)
        assert spearman(there, torch.arange(21)) > 0.95
        assert there[0] < 0.2 and there[-1] > 0.8
        both = progress(fitted, torch.cat([walk, walk.flip(0)[1:]]))
        assert spearman(both[21:], torch.arange(20)) < -0.9
        assert both[-1] < 0.3
    assert progress(fitted, far_off()[0]).mean() < 0.1


@pytest.mark.parametrize(
    ("value", "paid"), [("level", [-1.0, 1.8]), ("gain", [0.6, 2.8]), ("potential", [0.5, 2.0])]
)
def test_the_reward_by_hand(tmp_path: Path, shown: str, value: str, paid: list[float]) -> None:
    """Progress 0.2 -> 0.5, and 0.5 -> 0.4 at a true end, where the world pays 1."""
    reward = made(tmp_path, demos=shown, updates=1, value=value, scale=2.0, env_weight=3.0)
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
    reward = made(tmp_path / "run", spec, demos=demos, updates=20, history=2, stride=2)
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


def test_demonstrations_and_datasets_get_the_same_reward(shown: str, fitted: Rewind) -> None:
    """As transitions of a learner, and as `embodied reward score` asks for them."""
    episodes = read_episodes(Path(shown))
    rows = transitions(with_observations(episodes, fitted.augment_episode), 0.9)
    scored = torch.cat([labels(fitted, episodes.episode(e), 0.9) for e in range(len(episodes))])
    torch.testing.assert_close(fitted(rows), scored)
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
    reward = made(tmp_path / "run", spec, demos=demos, views=["front"])
    assert spearman(reward.augment_episode(film(9))[PROGRESS], torch.arange(13)) > 0.9
    assert not any("eyes" in name for name in reward.state_dict())
    with pytest.raises(ConfigError, match="no observation front"):
        reward.augment_episode({"state": torch.zeros(3, 1)})


WEIGHTING = {"_target_": "embodied.rewards.demonstrations.rewind.ProgressGain"}


def test_weights_by_hand() -> None:
    gain = torch.tensor([-0.5, -0.01, 0.0, 0.005, 0.02, 0.4], dtype=torch.float64)
    mean, std = gain.mean(), gain.std(correction=0)
    expected = (gain - (mean - 2 * std)) / (4 * std)
    expected[:2], expected[4:] = 0, 1
    assert 0 < expected[2] < expected[3] < 1
    torch.testing.assert_close(weights(gain, 0.01), expected)


def test_detours_are_not_sampled(tmp_path: Path, shown: str) -> None:
    """Walks that turn back in their middle: the steps back have little weight, those on much."""
    walks = corridor(4, 20, seed=2)
    detours = [torch.cat([walk[:13], walk[4:12].flip(0), walk[4:]]) for walk in walks]
    episodes = read_episodes(Path(record(tmp_path / "mixed", detours)))
    settings = {"demos": shown, "updates": 400, "hidden": [32, 32], "lr": 0.003}
    weight = build(WEIGHTING | {"horizon": 3, "rewind": settings}, ProgressGain)(episodes)
    each = weight.view(4, 37)
    back, onwards = torch.arange(12, 18), torch.cat([torch.arange(10), torch.arange(21, 36)])
    # What comes three steps later is still on the way back.
    assert each[:, back].mean() < 0.1 and each[:, onwards].mean() > 0.9
    drawn = Weighted({"x": torch.arange(4 * 37)}, weight).sample(2000)["x"] % 37
    assert float(torch.isin(drawn, back).float().mean()) < 0.05


def test_demonstrations_that_gain_progress_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"weighting\.rewind\.demos=DIR"):
        build(WEIGHTING, ProgressGain)
    with pytest.raises(ConfigError, match="gains progress"):
        weights(torch.tensor([-0.1, -0.2], dtype=torch.float64), 0.01)
