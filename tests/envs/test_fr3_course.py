"""An FR3 among boxes, whose level is what stands on the table; and pushing there and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import yaml

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.envs.fr3.env import CourseConfig, Fr3Course
from embodied.envs.fr3.shuttle import HOME
from embodied.envs.fr3.tasks.goal import BOXES, HALF, LAYER, LID, SIDE, boxes, ends, middle
from embodied.envs.maze.levels import Plans, distances


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
    names, seen = world.spec.obs["state"].names, world._observe(np.arange(8))["state"][0]
    boxes_seen = [n for n, v in zip(names, seen, strict=True) if n.startswith("box") and v]
    assert boxes_seen == ["box_1_1", "box_1_2"]
    vectors = world.levels.random(50, np.random.default_rng(0))
    param, plans = (
        dict(zip(world.levels.names, vectors.T, strict=True)),
        world.levels.decode(vectors),
    )
    assert np.array_equal(boxes(param), plans.walls.reshape(50, -1))
    assert np.array_equal(ends(param), (plans.start, plans.goal))


def follow(env: Fr3Course, seed: int) -> torch.Tensor:
    """Success [B] of following the shortest way, cell by cell."""
    env.reset(seed)
    plans, n = env.levels.decode(env.task), env.num_envs
    back, at = distances(plans.walls, plans.goal), plans.start.copy()
    won, over = torch.zeros(2, n, dtype=torch.bool)
    for _ in range(env.horizon - 1):
        tool = env.view(np.arange(n)).tool
        near = np.linalg.norm(tool[:, :2] - middle(at.astype(float))[:, :2], axis=1) < 0.012
        for row in np.flatnonzero(near & (at != plans.goal)):
            y, x = divmod(int(at[row]), SIDE)
            ways = [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
            inside = [cell for cell in ways if min(cell) >= 0 and max(cell) < SIDE]
            nearer = [cell for cell in inside if back[row][cell] == back[row][y, x] - 1]
            at[row] = nearer[0][0] * SIDE + nearer[0][1]
        push = torch.from_numpy((middle(at.astype(float)) - tool) * 25).clamp(-1, 1)
        step = env.step(torch.cat([push, -torch.ones(n, 1)], 1).float())
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
    world.reset(0, level(world, [12, 13, 14, 15, 16], start=2, goal=32))
    for _ in range(60):
        step = world.step(torch.tensor([[1.0, 0.0, 0.0, -1.0]] * 8))
        assert not step.log["success"].any()
    assert (world.view(np.arange(8)).tool[:, 0] < 0.375 + 2 * 0.05).all()


def test_who_rises_has_lost(world: Fr3Course) -> None:
    world.reset(0, level(world, [], start=0, goal=35))
    for _ in range(20):
        high = world.view(np.arange(8)).tool[:, 2]
        step = world.step(torch.tensor([[0.0, 0.0, 1.0, -1.0]] * 8))
        if step.ended.any():
            break
    assert step.terminated.any() and step.log["lost"].any() and not step.reward.ge(1).any()
    assert high.max() < LID + 0.03


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="task must be course"):
        made(task="reach")


PUSH = {"_target_": "embodied.policies.scripted.fr3.Scripted", "task": "push", "quality": 1.0}


def shuttle(n: int = 1, **more: object) -> Any:
    with open("configs/env/fr3_push_shuttle.yaml") as file:
        node = yaml.safe_load(file)
    node["wrappers"][0] |= more
    return build(node | {"num_envs": n}, VecEnv)


def goals(obs: dict[str, torch.Tensor], names: tuple[str, ...]) -> list[float]:
    at = names.index("goal_x")
    return obs["state"][0, at : at + 2].tolist()


def test_a_script_pushes_there_and_back_and_the_cube_stays_where_it_is() -> None:
    env = shuttle()
    names = env.spec.obs["state"].names
    cube, tool = names.index("cube_x"), names.index("tool_x")
    torch.manual_seed(0)
    actor = Actor(build(PUSH, Policy, spec=env.spec), 1)
    obs, first = env.reset(0), torch.tensor([True])
    seen = [goals(obs, names)]
    for _ in range(900):
        step = env.step(actor(obs, first))
        assert not step.log["manual"].any()
        if step.terminated.any():
            before, after = step.next_obs["state"][0], step.obs["state"][0]
            assert step.reward.item() == 1 and step.log["success"].item()
            assert goals(step.next_obs, names) == seen[-1], "the goal that it had"
            assert torch.equal(before[cube : cube + 3], after[cube : cube + 3])
            assert np.allclose(after[tool : tool + 3], HOME, atol=0.01), "the arm is home"
            seen.append(goals(step.obs, names))
        obs, first = step.obs, step.ended
        if len(seen) == 4:
            break
    there, back = [0.44, -0.08], [0.54, 0.08]
    assert np.allclose(seen, [there, back, there, back], atol=1e-6)


def test_a_cube_that_is_out_of_reach_is_put_back() -> None:
    env = shuttle()
    env.reset(0)
    world = env.env.env
    world.batch.qpos[0, world._free["cube"]] = 0.8
    step = env.step(torch.zeros(1, 4))
    assert step.truncated.item() and step.log["manual"].item()
    at = env.spec.obs["state"].names.index("cube_x")
    assert step.next_obs["state"][0, at] > 0.75 and step.obs["state"][0, at] < 0.6
