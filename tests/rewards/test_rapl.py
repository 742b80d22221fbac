"""RAPL's reward: the plan, its reward, and an encoder that is aligned by compared videos."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.datasets.transitions import transitions, with_observations
from embodied.reports.datasets import read_episodes
from embodied.rewards.preferences.rapl import (
    Config,
    frame_rewards,
    nearest_demo,
    plan,
    triplet_logit,
)
from tests.builders import node_of
from tests.rewards.rows import make

LABELLER = node_of("rewards.preferences.labellers.SimulatedLabeller")
SPEC = Spec({"state": Leaf((9,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def test_the_plan_of_two_frames_by_hand() -> None:
    """C = [[0, 1], [1, 0]]: on the diagonal e^k / (2 (e^k + 1)), elsewhere 1 / (2 (e^k + 1))."""
    near = math.exp(3) / (2 * (math.exp(3) + 1))
    expected = torch.tensor([[near, 0.5 - near], [0.5 - near, near]])
    torch.testing.assert_close(plan(1 - torch.eye(2), 3.0), expected)
    rewards = frame_rewards(torch.eye(2), torch.eye(2), 3.0)
    torch.testing.assert_close(rewards, torch.full((2,), near - 0.5))


def test_the_plan_has_uniform_marginals_and_is_sharp_or_flat() -> None:
    cost = torch.rand(3, 6, 4, generator=torch.Generator().manual_seed(0)).double()
    found = plan(cost, 10.0, iterations=300)
    torch.testing.assert_close(found.sum(2), torch.full((3, 6), 1 / 6).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.sum(1), torch.full((3, 4), 1 / 4).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(plan(cost, 1e-6), torch.full((3, 6, 4), 1 / 24).double())
    square = (torch.arange(4.0)[:, None] - torch.tensor([2.0, 0.0, 3.0, 1.0])).abs().sqrt().double()
    matched = torch.zeros(4, 4).double()
    matched[linear_sum_assignment(square.numpy())] = 0.25
    torch.testing.assert_close(plan(square, 100.0, iterations=300), matched, atol=1e-3, rtol=0)


def test_a_reversed_video_is_worse_only_where_order_counts() -> None:
    video = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    alike, reverse = (frame_rewards(one, video, 50.0).sum() for one in (video, video.flip(0)))
    torch.testing.assert_close(alike, reverse, atol=1e-5, rtol=0)
    alike, reverse = (frame_rewards(v, video, 50.0, 10.0).sum() for v in (video, video.flip(0)))
    assert alike > reverse + 0.1


def test_the_closest_demonstration_counts() -> None:
    one, other = torch.eye(4)[:2], torch.eye(4)[2:]
    found = nearest_demo(one[None], torch.stack([other, one]), Config(sharpness=3.0))
    torch.testing.assert_close(found[0], frame_rewards(one, one, 3.0))


def test_a_tie_wants_a_half_and_a_preference_the_likeness() -> None:
    anchor, other = torch.eye(4)[:2], torch.eye(4)[2:]
    logit = triplet_logit(torch.stack([anchor, other, anchor])[None], Config(temperature=0.5))
    apart = (frame_rewards(anchor, anchor, 10.0) - frame_rewards(other, anchor, 10.0)).sum()
    torch.testing.assert_close(logit, apart[None] / 0.5)
    same = triplet_logit(torch.stack([anchor, other, other])[None].requires_grad_(), Config())
    loss = torch.nn.functional.binary_cross_entropy_with_logits(same, torch.tensor([0.5]))
    assert loss.item() == pytest.approx(math.log(2))
    (slope,) = torch.autograd.grad(loss, same)
    assert slope.item() == pytest.approx(0, abs=1e-7)


def videos(path: Path, count: int, seed: int, liked: bool = False) -> str:
    """Eight elements of noise as large as can be, and one small one: what the reward is."""
    random = torch.Generator().manual_seed(seed)
    with EpisodeWriter(path, SPEC) as writer:
        for _ in range(count):
            level = 1.0 if liked else float(torch.rand((), generator=random))
            noise = 0.5 * torch.randn(8, generator=random).expand(7, 8)
            state = torch.cat([0.5 * torch.full((7, 1), level), noise], 1)
            end = torch.arange(6) == 5
            writer.add(
                {
                    **{"obs/state": state[:-1], "next_obs/state": state[-1]},
                    **{"action": torch.zeros(6, 1), "reward": torch.full((6,), level)},
                    **{"terminated": end, "truncated": torch.zeros(6, dtype=torch.bool)},
                }
            )
    return str(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Tensors | Any:
    folder = tmp_path_factory.mktemp("videos")
    return {
        "demos": videos(folder / "liked", 3, 1, liked=True),
        "data": videos(folder / "shown", 90, 2),
        "view": "state",
        "labeller": LABELLER,
    }


def made(recorded: Any, folder: Path | None = None, **more: Any) -> Any:
    node = node_of("rewards.preferences.rapl.Rapl", **(recorded | more))
    return make(node, SPEC, folder)


def test_a_hundred_comparisons_show_what_the_features_hide(recorded: Any, tmp_path: Path) -> None:
    reward = made(recorded, tmp_path, updates=500, frames=3)
    assert reward.found["labels"] == 100
    assert reward.found["aligned"] > 0.8 and reward.found["unaligned"] < 0.4
    again = made(recorded, tmp_path, updates=500, frames=3)  # from its file
    torch.testing.assert_close(again.preferred, reward.preferred)


def test_an_episode_is_rewarded_when_it_is_complete(recorded: Any) -> None:
    """Transitions of a running one get the mean so far; recorded ones theirs at once."""
    reward = made(recorded, updates=5, frames=3)
    episodes = read_episodes(Path(recorded["data"]), limit=2)
    rows = transitions(with_observations(episodes, reward.augment_episode), 0.9)
    paid = reward(rows)
    seen = torch.cat([episodes.steps["obs/state"][:6], episodes.final["state"][:1]])
    shown = reward.project(reward.features({"state": seen[[0, 3, 6]]}))
    at = 3 * nearest_demo(shown[None], reward.preferred, reward.config)[0]
    expected = torch.stack([at[0] + (at[1] - at[0]) * k / 3 for k in range(1, 4)])
    torch.testing.assert_close(paid[:3], expected)
    unknown = {**rows, "next_obs/privileged/video_index": rows["episode"] + 1000}
    torch.testing.assert_close(reward(unknown), torch.full_like(paid, reward.mean))
    other = made(recorded, updates=5, frames=3)
    other.set_state(reward.get_state())
    torch.testing.assert_close(other(rows), paid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: {"labeller": None}, "reward.labeller=NODE"),
        (lambda own: {"data": None}, "reward.data=DIR"),
        (lambda own: {"data": own["demos"]}, "3 episodes, and 6 are needed"),
        (
            lambda own: {
                "labeller": node_of("rewards.preferences.labellers.EmbeddingLabeller", goal="up")
            },
            "no video with an anchor",
        ),
        (
            lambda own: {
                "labeller": node_of("rewards.preferences.labellers.SimulatedLabeller", unsure=1.0)
            },
            "gave no label",
        ),
    ],
)
def test_what_is_missing_is_said(
    recorded: Any, change: Callable[[Any], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(recorded, **change(recorded))
