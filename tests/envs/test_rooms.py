"""Rooms: what is seen, noise and its switch, darkness, a room's worth. Two gaps: what is wall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.envs.maze.levels import distances
from embodied.envs.toy.rooms import DARK, EMPTY, NOISE, SWITCH, WALL, Config, Rooms
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap, inside

LEFT, RIGHT, GO = (torch.full((1,), act) for act in range(3))


def made(**settings: Any) -> Rooms:
    return Rooms(Config(**{"num_envs": 1, **settings}))


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
