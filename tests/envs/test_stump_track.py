"""The stump track: its stumps, rays and reward by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.envs.toy.stump_track import (
    BEAMS,
    PAD,
    RANGE,
    SLOTS,
    STAND,
    STEP,
    TALLEST,
    Config,
    StumpTrack,
)

ROWS = np.arange(2)


def world(**settings: object) -> StumpTrack:
    return StumpTrack(Config(num_envs=2, **settings))  # type: ignore[arg-type]


def test_stumps_are_as_high_and_as_far_apart_as_the_task_says() -> None:
    env = world()
    env.reset(0, task=torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
    box = env.batch.mocap_pos
    left, top = box[..., 0] - STEP / 2, box[..., 2] + TALLEST * STEP / 2
    np.testing.assert_allclose(left[0], PAD + np.arange(SLOTS) * 4 * STEP, atol=1e-12)
    np.testing.assert_allclose(np.diff(left[1]), 1.01 * STEP, atol=1e-12)
    assert abs(top[0].mean() - 1.5 * STEP) < 0.05 and 0 < top[0].std() < 0.1
    assert top[1].min() == pytest.approx(0.05 * STEP)  # the floor of heights


def test_stumps_stay_where_they_are_while_the_walker_goes_on() -> None:
    env = world()
    env.reset(1)
    seen: dict[tuple[int, float], float] = {}
    for x in np.linspace(0, 27, 40):
        env.batch.qpos[:, 0] = x
        env.control(np.zeros((2, 4)))
        for row in ROWS:
            place = env.batch.mocap_pos[row]
            assert (place[:, 0].min() < x - 2.5) or place[:, 0].min() < PAD + STEP
            assert place[:, 0].max() > x + RANGE
            for left, top in zip(place[:, 0].round(6), place[:, 2], strict=True):
                assert seen.setdefault((int(row), float(left)), float(top)) == top


def test_rays_end_where_mujocos_do() -> None:
    env, random, hit = world(), np.random.default_rng(0), 0
    groups = np.array([1, 0, 0, 0, 0, 0], np.uint8)  # ground and stumps, not the walker
    angles = 1.5 * np.arange(BEAMS) / BEAMS
    along = np.stack([np.sin(angles), 0 * angles, -np.cos(angles)], 1)
    for seed in range(20):
        env.reset(seed)
        x, lift = random.uniform(0, 25, 2), random.uniform(-0.4, 1.0, 2)
        env.batch.qpos[:, :2] = np.stack([x, lift], 1)
        env._raise(ROWS)
        start = np.stack([x, 0 * x, lift + STAND], 1)
        inside = env.batch.ray(start[:, None], along, groups)[0]
        want = np.where(inside < 0, 1, np.minimum(inside / RANGE, 1))
        got = env.beams(ROWS)
        buried = (env._near(ROWS)[1] > start[:, 2:]).any(1)  # rays from within a stump
        np.testing.assert_allclose(got[~buried], want[~buried], atol=1e-6)
        hit += int((got < 1).sum())
    assert hit > 100


def test_reward_is_progress_less_pitch_and_effort() -> None:
    env = world()
    env.reset(0)
    before = env.batch.qpos[:, [0, 2]].copy()
    step = env.step(torch.tensor([[0.5, -1.0, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0]]))
    after = env.batch.qpos[:, [0, 2]]
    forward, pitch = (after - before)[:, 0], (np.abs(after) - np.abs(before))[:, 1]
    paid = 130 / 30 * forward - 5 * pitch - 0.028 * np.array([1.75, 0])
    np.testing.assert_allclose(step.reward, paid, atol=1e-5)


def test_a_fall_ends_the_episode_and_pays_for_itself() -> None:
    """A walker that does nothing sinks to its knees and tips over."""
    env = world(fall=-33.0)
    env.reset(0)
    for _ in range(150):
        step = env.step(torch.zeros(2, 4))
        assert not step.truncated.any() and not step.log["success"].any()
        if step.terminated[0]:
            break
        assert abs(step.reward[0]) < 2
    assert step.terminated[0] and step.reward[0] == -33
    env.reset(0)
    env.batch.qpos[0, 0] = -PAD - 0.1
    step = env.step(torch.zeros(2, 4))
    assert step.terminated.tolist() == [True, False] and step.reward[0] == -33


def test_success_is_a_return_above_the_bar_at_the_end() -> None:
    env = world(distance=28.0, horizon=3)
    assert env.bar == pytest.approx(230 / 364 * 130 / 30 * 28)
    env.reset(0)
    env.memory["return"][:] = [env.bar + 5, env.bar - 5]
    steps = [env.step(torch.zeros(2, 4)) for _ in range(3)]
    assert not steps[1].log["success"].any()
    assert steps[2].truncated.all() and steps[2].log["success"].tolist() == [True, False]
    env.reset(0, task=torch.zeros(2, 2))
    env.batch.qpos[0, 0] = 28.01
    assert env.step(torch.zeros(2, 4)).terminated.tolist() == [True, False]


@pytest.mark.parametrize("settings", [{"height": (2, 1)}, {"height": (0, 10)}, {"spacing": (1, 0)}])
def test_settings_that_make_no_track(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="env"):
        world(**settings)
