"""Motion imitation: clips, references, similar frames, where episodes begin, and the reward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.envs.wrappers.mimic import buffer_steps, similarity
from embodied.policies.networks.history import CODE, HistoryEncoder
from tests.builders import node_of

PLAYER = node_of("policies.scripted.simple.TwoGapDemonstrator")


def made(num_envs: int = 4, **settings: Any) -> Any:
    usual = {"env": node_of("envs.toy.two_gap.TwoGap"), "player": PLAYER, "num_envs": num_envs}
    return build(node_of("envs.wrappers.mimic.Mimic", **(usual | settings)), VecEnv)


def test_buffer_steps_by_hand() -> None:
    sim = torch.tensor([1.0, 0.51, 0.5, 0.3, 0.1, 0.05, 1e-5, 1e-20, 0.0])
    assert buffer_steps(sim).tolist() == [0, 0, 1, 1, 1, 2, 5, 10, 10]


def test_the_reward_of_a_buffer_is_the_mean_of_following_that_clip() -> None:
    env = made(3, clips=2)
    env.memory["frame"] = torch.tensor([0, 0, int(env.clips.last[0]) + 1])
    env._paid(torch.tensor([0.2, 0.6, 0.9]), torch.tensor([False, False, True]))
    paid = env._paid(torch.tensor([0.4, 0.7, 0.5]), torch.tensor([False, True, True]))
    torch.testing.assert_close(paid, torch.tensor([0.4, 0.6, 0.5]))  # the last never followed
    paid = env._paid(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([True, True, False]))
    torch.testing.assert_close(paid, torch.tensor([0.3, 0.6, 0.0]))


def test_similarity_by_hand() -> None:
    found = similarity(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), 0.5)
    assert found.item() == pytest.approx(math.exp(-0.5 * 5))


def test_matches_are_of_another_clip_and_of_its_inner_frames() -> None:
    env = made()
    clip, last = env.clips.clip, env.clips.last
    number = torch.arange(len(clip))
    assert (clip[env.match] != clip).all()
    first = torch.searchsorted(clip, clip)
    assert (env.match >= first[env.match] + 2).all() and (env.match < last[env.match]).all()
    alike = similarity(env.clips.z[number], env.clips.z[env.match], 1.0).diagonal()
    torch.testing.assert_close(env.match_sim, alike)
    assert (clip[env.retimed] == clip).all()  # re-timed within the clip
    alone = made(clips=1)
    assert (alone.match == torch.arange(len(alone.clips.clip))).all()


def test_sparse_references_are_lines_between_kept_frames() -> None:
    env = made(every=4, clips=2)
    z, reference = env.clips.z, env.reference
    torch.testing.assert_close(reference[:9:4], z[:9:4])
    torch.testing.assert_close(reference[5], 0.75 * z[4] + 0.25 * z[8])
    last = int(env.clips.last[0])
    torch.testing.assert_close(reference[last], z[last])
    torch.testing.assert_close(made().reference, made().clips.z[: len(made().clips.clip)])
    noisy = made(noise=0.5, clips=8)
    error = noisy.reference - noisy.clips.z[: len(noisy.clips.clip)]
    assert error.std().item() == pytest.approx(0.5, rel=0.1)


def test_clips_do_not_depend_on_the_number_of_envs() -> None:
    torch.testing.assert_close(made(2).clips.z, made(5).clips.z)


def test_an_episode_begins_at_its_frame_and_is_paid_for_following() -> None:
    env = made(switch=0.0, stray=0.0, precision=2.0)
    obs = env.reset(3)
    frame = env.memory["frame"].clone()
    torch.testing.assert_close(env.frame_of(obs), env.clips.z[frame])
    torch.testing.assert_close(obs["reference"], env.reference[frame + 1] - env.clips.z[frame])
    step = env.step(torch.zeros(4, 2))
    assert (env.memory["frame"][~step.ended] == frame[~step.ended] + 1).all()
    error = (env.frame_of(step.next_obs) - env.reference[frame + 1]).square().mean(1)
    torch.testing.assert_close(step.reward, (-2 * error).exp())


def test_a_clips_end_ends_the_episode_without_terminating_it() -> None:
    env = made(switch=0.0, stray=0.0)
    env.reset(3)
    left = env.clips.last[env.memory["frame"]] - env.memory["frame"]
    for number in range(1, int(left.max()) + 1):
        step = env.step(torch.zeros(4, 2))
        over = left == number
        assert step.truncated[over].all() and not step.terminated.any()
        left = torch.where(over, 10**6, left)


@pytest.mark.parametrize("way", ["switch", "stray"])
def test_beginnings_off_the_clip_wait_before_they_follow(way: str) -> None:
    env = made(64, likeness=20.0, **({"switch": 0.0, "stray": 0.0} | {way: 1.0}))
    obs = env.reset(0)
    began = env.memory["began"]
    count = len(env.clips.clip)
    there = env.match[began] if way == "switch" else began + count
    torch.testing.assert_close(env.frame_of(obs), env.clips.z[there])
    sim = (env.match_sim if way == "switch" else env.retimed_sim)[began]
    assert (env.memory["wait"] == buffer_steps(sim)).all() and (sim < 0.5).any()
    frame = env.memory["frame"].clone()
    waits = env.memory["wait"] > 0
    step = env.step(torch.zeros(64, 2))
    assert (env.memory["frame"][waits & ~step.ended] == frame[waits & ~step.ended]).all()
    without = made(64, likeness=20.0, buffers=False, switch=1.0, stray=0.0)
    without.reset(0)
    assert not without.memory["wait"].any()


def test_hard_frames_are_taken_more_often() -> None:
    env = made(clips=2, adaptive=1.0)
    clip = env.clips.clip
    counts = torch.bincount(clip)
    env.memory["means"][:, clip == 0] = 1.0
    env.memory["means"][:, 0] = 0.0
    chances = env.chances()
    level = (int(counts[0]) - 2) / (int(counts[0]) - 1)  # the last frame is none to begin in
    first = math.exp(-5 * level) / (math.exp(-5 * level) + 1)
    assert chances[clip == 0].sum().item() == pytest.approx(first, rel=1e-4)
    assert (chances[0] / chances[1]).item() == pytest.approx(math.exp(10), rel=1e-3)
    env.config = replace(env.config, adaptive=0.0)
    uniform = env.chances()[clip == 1]
    expected = torch.full((len(uniform) - 1,), 0.5 / (len(uniform) - 1))
    torch.testing.assert_close(uniform[:-1], expected)
    assert uniform[-1] == 0


def test_the_mean_reward_of_an_episode_counts_for_its_first_frame() -> None:
    env = made(1, switch=0.0, stray=0.0)
    env.reset(3)
    began, total, steps = int(env.memory["began"][0]), 0.0, 0
    while True:
        step = env.step(torch.zeros(1, 2))
        total, steps = total + float(step.reward[0]), steps + 1
        if step.ended[0]:
            break
    assert env.memory["means"][0, began].item() == pytest.approx(total / steps / 2)


def test_the_past_is_relative_to_the_present_and_encoded() -> None:
    env = made(history=3)
    obs = env.reset(0)
    assert obs["history_frames"].shape == (4, 6) and not obs["history_frames"].any()
    before = env.frame_of(obs)
    step = env.step(torch.full((4, 2), 0.5))
    moved = before - env.frame_of(step.next_obs)
    torch.testing.assert_close(step.next_obs["history_frames"], moved.repeat(1, 3))
    encoder = HistoryEncoder(env.spec.obs)
    features = encoder(step.next_obs)
    assert features.shape == (4, encoder.size) and encoder.size == 4 + CODE
    with pytest.raises(ConfigError, match="history_frames"):
        HistoryEncoder(made().spec.obs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"switch": 0.6, "stray": 0.6}, "at most 1"),
        ({"leaf": "image"}, "no vector that is observed"),
        ({"elements": ["z"]}, "no element z"),
        ({"frames": 2}, "a clip has 2 frames"),
        ({"env": node_of("envs.toy.chain.Chain")}, "actions that are choices"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**settings)
