"""An FR3 among boxes: the level is what stands on the table, and what has a way can be done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.envs.fr3.env import CourseConfig, Fr3Course
from embodied.envs.fr3.tasks.goal import BOXES, HALF, LAYER, LID, SIDE, boxes, ends, middle
from embodied.envs.maze.batch_levels import distances
from embodied.envs.maze.levels import Plans


def made(**settings: Any) -> Fr3Course:
    return Fr3Course(CourseConfig(**{"num_envs": 4, "threads": 1, **settings}))


@pytest.fixture(scope="module")
def world() -> Fr3Course:
    return made(num_envs=8)


def level(env: Fr3Course, walls: list[int], start: int, goal: int) -> torch.Tensor:
    plan = np.zeros(SIDE * SIDE, bool)
    plan[walls] = True
    at = (np.array([value]) for value in (start, goal, 0))
    one = env.levels.encode(Plans(plan.reshape(1, SIDE, SIDE), *at))
    return torch.from_numpy(np.repeat(one, env.num_envs, 0)).float()


def test_cells_by_hand() -> None:
    """Cell 8 is row 1, column 2: one cell further away, two further to the left."""
    place = middle(np.array([0.0, 8.0, 35.0]))
    wanted = [[0.375, -0.125, LAYER], [0.425, -0.025, LAYER], [0.625, 0.125, LAYER]]
    assert np.allclose(place, wanted)


def test_what_stands_is_the_level(world: Fr3Course) -> None:
    """The same reading of a vector as the level space's own, start and goal left free."""
    world.reset(0, level(world, [0, 7, 8, 35], start=0, goal=35))
    height = np.stack([world.batch.mocap_pos[0, world._markers[name], 2] for name in BOXES])
    assert np.flatnonzero(height > 0).tolist() == [7, 8]
    assert np.allclose(height[[7, 8]], HALF[2])
    vectors = world.levels.random(50, np.random.default_rng(0))
    param = dict(zip(world.levels.names, vectors.T, strict=True))
    plans = world.levels.decode(vectors)
    assert np.array_equal(boxes(param), plans.walls.reshape(50, -1))
    assert all(
        np.array_equal(a, b) for a, b in zip(ends(param), (plans.start, plans.goal), strict=True)
    )
    names = world.spec.obs["state"].names
    seen = world._observe(np.arange(8))["state"][0]
    assert [n for n, v in zip(names, seen, strict=True) if n.startswith("box") and v] == [
        "box_1_1",
        "box_1_2",
    ]


def test_drawn_levels_have_a_way_and_follow_the_seed(world: Fr3Course) -> None:
    world.reset(5)
    first = world.task.copy()
    assert world.levels.fit(first.astype(float)).all() and len(np.unique(first, axis=0)) == 8
    world.reset(5)
    assert np.array_equal(world.task, first)
    assert world.spec.task is not None and world.spec.task.unit == "level"
    assert len(world.held_out) == 50


def follow(env: Fr3Course, seed: int) -> torch.Tensor:
    """Success [B] of following the shortest way, cell by cell."""
    env.reset(seed)
    plans = env.levels.decode(env.task)
    back = distances(plans.walls, plans.goal)
    rows, won, over = np.arange(env.num_envs), torch.zeros(env.num_envs).bool(), None
    at = plans.start.copy()
    steps = ((1, 0), (-1, 0), (0, 1), (0, -1))
    over = torch.zeros(env.num_envs).bool()
    for _ in range(env.horizon - 1):
        tool = env.view(rows).tool
        near = np.linalg.norm(tool[:, :2] - middle(at.astype(float))[:, :2], axis=1) < 0.012
        for row in np.flatnonzero(near & (at != plans.goal)):
            y, x = divmod(int(at[row]), SIDE)
            ways = [(y + dy, x + dx) for dy, dx in steps]
            inside = [(a, b) for a, b in ways if 0 <= a < SIDE and 0 <= b < SIDE]
            nearer = [c for c in inside if back[row][c] == back[row][y, x] - 1]
            at[row] = nearer[0][0] * SIDE + nearer[0][1]
        push = torch.from_numpy((middle(at.astype(float)) - tool) * 25).clamp(-1, 1)
        action = torch.cat([push, -torch.ones(env.num_envs, 1)], 1).float()
        step = env.step(action)
        won |= step.log["success"] & ~over
        over |= step.ended
        if over.all():
            break
    return won


def test_what_has_a_way_can_be_done() -> None:
    """Fingers that follow the shortest way get through."""
    won = follow(made(num_envs=16, horizon=200), 3)
    assert won.float().mean() >= 0.9


def test_straight_ahead_does_not_go_through_boxes(world: Fr3Course) -> None:
    """A wall of boxes right across, but for its far end."""
    obs = world.reset(0, level(world, [12, 13, 14, 15, 16], start=2, goal=32))
    wanted = torch.tensor([[1.0, 0.0, 0.0, -1.0]]).repeat(8, 1)
    for _ in range(60):
        step = world.step(wanted)
        assert not step.log["success"].any()
    tool = world.view(np.arange(8)).tool
    assert (tool[:, 0] < 0.375 + 2 * 0.05).all() and obs["state"].isfinite().all()


def test_who_rises_has_lost(world: Fr3Course) -> None:
    world.reset(0, level(world, [], start=0, goal=35))
    up = torch.tensor([[0.0, 0.0, 1.0, -1.0]]).repeat(8, 1)
    for _ in range(20):
        high = world.view(np.arange(8)).tool[:, 2]
        step = world.step(up)
        if step.ended.any():
            break
    assert step.terminated.any() and step.log["lost"].any() and not step.reward.ge(1).any()
    assert high.max() < LID + 0.03


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="task must be course"):
        made(task="reach")
