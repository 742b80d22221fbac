"""Toy worlds by hand: rooms, two gaps, the stump track."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.envs.maze.levels import distances
from embodied.envs.toy import stump_track as track
from embodied.envs.toy.craft import Config as CraftConfig
from embodied.envs.toy.craft import Craft
from embodied.envs.toy.rooms import DARK, EMPTY, NOISE, SWITCH, WALL, Rooms
from embodied.envs.toy.rooms import Config as RoomsConfig
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap, inside

LEFT, RIGHT, GO = (torch.full((1,), act) for act in range(3))


def made(**settings: Any) -> Rooms:
    return Rooms(RoomsConfig(**{"num_envs": 1, **settings}))


def test_the_plan() -> None:
    """Three rooms of three cells each way and the walls between: 13 cells, in 4 of padding."""
    env = made(noisy=0, dark=0)
    env.reset(0)
    assert env.side == 13 and env.width == 21 and (env.room >= 0).sum() == 81
    square = env.cells[0].reshape(21, 21)[4:17, 4:17]
    assert (square[0] == WALL).all() and (square[1:4, 1:4] == EMPTY).all()
    assert ((square == EMPTY).sum()) == 81 + 12  # twelve doors
    assert env.place[0] == (4 + 6) * 21 + 4 + 6  # the middle of the middle room


def test_every_room_can_be_reached() -> None:
    env = made(num_envs=50)
    env.reset(1)
    walls = env.cells.reshape(50, 21, 21) == WALL
    steps = distances(walls, env.place)
    assert (steps.reshape(50, -1)[:, env.room >= 0] >= 0).all()
    assert (env.loud.sum(1) == 2).all() and (env.unlit.sum(1) == 1).all()
    assert not (env.loud & env.unlit).any() and not (env.loud | env.unlit)[:, 4].any()
    assert ((env.cells == SWITCH).sum(1) == 2).all()


def test_a_room_pays_once() -> None:
    """Through a door and back: 1/9 on the first step into the next room."""
    env = made(noisy=0, dark=0)
    env.reset(0)
    env.facing[:] = 0
    env.cells[0, env.place[0] // 21 * 21 + 4 + 8] = EMPTY  # a door straight ahead
    rewards = [float(env.step(act).reward) for act in (GO, GO, GO, LEFT, LEFT, GO, GO, GO)]
    assert rewards == pytest.approx([0, 0, 1 / 9, 0, 0, 0, 0, 0])


def test_noise_is_on_floors_of_noisy_rooms_until_it_is_switched_off() -> None:
    env = made(noisy=1, dark=0, colours=3)
    env.reset(0)
    room = int(env.loud[0].argmax())
    (at,) = np.flatnonzero(env.cells[0] == SWITCH)
    assert env.room[at] == room
    beside = next(c for c in (at - 1, at + 1) if env.room[c] == room)
    env.place[:] = beside
    env.facing[:] = 0 if at > beside else 2
    turns = [env.step(act).obs["view"][0] for act in [LEFT, RIGHT] * 12]
    seen = torch.stack(turns[1::2])
    assert set(seen[:, 4, 2].tolist()) == set(range(NOISE, NOISE + 3)), "where the agent stands"
    assert (seen[:, 3, 2] == SWITCH).all(), "the cell ahead"
    step = env.step(GO)
    assert not env.loud.any() and step.obs["view"].max() <= WALL


def test_the_first_view_is_that_of_the_seed() -> None:
    """Not of the noise that an earlier episode ended with."""
    env = made(num_envs=20, noisy=8, dark=0)
    first = env.reset(3)["view"]
    env.step(LEFT.expand(20))
    assert torch.equal(env.reset(3)["view"], first) and (first >= NOISE).any()


def test_what_is_carried_at_the_start_pays_nothing() -> None:
    """The first step walks to the tree, or is not allowed: neither makes a thing."""
    env = Craft(CraftConfig(num_envs=50))
    carried = env.reset(0)["amounts"].sum()
    assert carried > 0 and env.step(torch.zeros(50, dtype=torch.int64)).reward.sum() == 0


def test_dark_rooms_show_nothing() -> None:
    env = made(noisy=0, dark=1)
    env.reset(0)
    room = int(env.unlit[0].argmax())
    env.place[:] = np.flatnonzero(env.room == room)[4]
    view = env.step(LEFT).obs["view"][0]
    assert (view[3:, 1:4] == DARK).all() and (view != DARK).any()


def test_success_is_all_rooms_and_time_ends_an_episode() -> None:
    env = made(horizon=3)
    env.reset(0)
    steps = [env.step(LEFT)]
    env.visited[:] = True
    steps += [env.step(LEFT) for _ in range(2)]
    assert [bool(step.log["success"]) for step in steps[:2]] == [False, True]
    assert [bool(step.truncated) for step in steps] == [False, False, True]
    assert not any(step.terminated for step in steps) and env.visited.sum() == 1


@pytest.mark.parametrize("settings", [{"view": 4}, {"noisy": 9}])
def test_settings_that_make_no_sense(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rooms"):
        made(**settings)


def test_a_closed_gap_is_wall() -> None:
    place = torch.tensor([[0.5, 0.25], [0.5, 0.75], [0.5, 0.5], [0.2, 0.25]])
    assert inside(place).tolist() == [False, False, True, False]
    assert inside(place, (0.75,)).tolist() == [True, False, True, False]


@pytest.mark.parametrize(("gaps", "x"), [((0.25, 0.75), 0.48), ((0.75,), 0.43)])
def test_the_point_stops_at_it(gaps: tuple[float, ...], x: float) -> None:
    """From x = 0.43 a step of 0.05 would end at 0.48, inside the closed lower gap."""
    env = TwoGap(GapConfig(num_envs=1, gaps=gaps))
    env.reset(0)
    env.place = torch.tensor([[0.43, 0.25]])
    seen = env.step(torch.tensor([[1.0, 0.0]])).next_obs["state"]
    assert seen[0, 0].item() == pytest.approx(x)


ROWS = np.arange(2)


def world(**settings: object) -> track.StumpTrack:
    return track.StumpTrack(track.Config(num_envs=2, **settings))  # type: ignore[arg-type]


def test_stumps_are_as_high_and_as_far_apart_as_the_task_says() -> None:
    env = world()
    env.reset(0, task=torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
    box = env.batch.mocap_pos
    left, top = box[..., 0] - track.STEP / 2, box[..., 2] + track.TALLEST * track.STEP / 2
    np.testing.assert_allclose(
        left[0], track.PAD + np.arange(track.SLOTS) * 4 * track.STEP, atol=1e-12
    )
    np.testing.assert_allclose(np.diff(left[1]), 1.01 * track.STEP, atol=1e-12)
    assert abs(top[0].mean() - 1.5 * track.STEP) < 0.05 and 0 < top[0].std() < 0.1
    assert top[1].min() == pytest.approx(0.05 * track.STEP)  # the floor of heights


def test_stumps_stay_where_they_are_while_the_walker_goes_on() -> None:
    env = world()
    env.reset(1)
    seen: dict[tuple[int, float], float] = {}
    for x in np.linspace(0, 27, 40):
        env.batch.qpos[:, 0] = x
        env.control(np.zeros((2, 4)))
        for row in ROWS:
            place = env.batch.mocap_pos[row]
            assert (place[:, 0].min() < x - 2.5) or place[:, 0].min() < track.PAD + track.STEP
            assert place[:, 0].max() > x + track.RANGE
            for left, top in zip(place[:, 0].round(6), place[:, 2], strict=True):
                assert seen.setdefault((int(row), float(left)), float(top)) == top


def test_rays_end_where_mujocos_do() -> None:
    env, random, hit = world(), np.random.default_rng(0), 0
    groups = np.array([1, 0, 0, 0, 0, 0], np.uint8)  # ground and stumps, not the walker
    angles = 1.5 * np.arange(track.BEAMS) / track.BEAMS
    along = np.stack([np.sin(angles), 0 * angles, -np.cos(angles)], 1)
    for seed in range(20):
        env.reset(seed)
        x, lift = random.uniform(0, 25, 2), random.uniform(-0.4, 1.0, 2)
        env.batch.qpos[:, :2] = np.stack([x, lift], 1)
        env._raise(ROWS)
        start = np.stack([x, 0 * x, lift + track.STAND], 1)
        inside = env.batch.ray(start[:, None], along, groups)[0]
        want = np.where(inside < 0, 1, np.minimum(inside / track.RANGE, 1))
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
    env.batch.qpos[0, 0] = -track.PAD - 0.1
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
