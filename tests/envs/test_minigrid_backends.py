"""EnvPool's MiniGrid and the package's: the same level, the same actions, the same of all else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.env import NotSavable

pytest.importorskip("minigrid")
pytest.importorskip("envpool")

from embodied.envs.minigrid import gym_rows as minigrid_state
from embodied.envs.minigrid.describe import COLOURS, KINDS
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.envs.minigrid.envpool_rows import symbols_of

# Together: goals, keys, doors, lava, picking up, going to, dropping near, doors of one colour.
IDS = (
    "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-Empty-Random-6x6-v0",
    "MiniGrid-Fetch-5x5-N2-v0",
    "MiniGrid-FourRooms-v0",
    "MiniGrid-GoToDoor-5x5-v0",
    "MiniGrid-LavaGapS5-v0",
    "MiniGrid-MemoryS7-v0",
    "MiniGrid-PutNear-6x6-N2-v0",
    "MiniGrid-RedBlueDoors-6x6-v0",
    "MiniGrid-SimpleCrossingS9N2-v0",
)
ROWS, HORIZON = 6, 50


def pair(level: str, **settings: Any) -> tuple[MiniGrid, MiniGrid]:
    ours = [
        MiniGrid(Config(level, backend, num_envs=ROWS, threads=1, **settings))
        for backend in ("gymnasium", "envpool")
    ]
    return ours[0], ours[1]


def copy_level(pool: Any, row: int, world: Any) -> None:
    """Put the level of a pool's row, and what its mission is about, into a world of the package."""
    state = pool._states(np.array([row], np.int32))[0]
    clock = {"clock": np.array([0, world.max_steps])}
    things = minigrid_state.load(world, symbols_of(state) | clock)
    world.mission = state.mission
    for key in ("target_pos", "success_pos", "failure_pos"):
        if hasattr(world, key):
            setattr(world, key, tuple(getattr(state, key)))
    kind, colour = KINDS[state.target_type], COLOURS[state.target_color]
    move = KINDS[state.move_type], COLOURS[state.move_color]
    named = {"target_color": colour, "targetColor": colour, "target_type": kind}
    named |= {"targetType": kind, "move_type": move[0], "moveColor": move[1]}
    for key in (key for key in named if hasattr(world, key)):
        setattr(world, key, named[key])
    doors = {thing.color: thing for thing in things if thing is not None and thing.type == "door"}
    for key in (key for key in ("red_door", "blue_door") if hasattr(world, key)):
        setattr(world, key, doors[key.removesuffix("_door")])


@pytest.mark.parametrize("level", IDS)
def test_on_the_same_level_everything_is_bit_equal(level: str) -> None:
    package, pool = pair(level, privileged=True, horizon=HORIZON, mission_words=20)
    assert package.spec == pool.spec
    package.reset(0)
    pool.reset(0)
    random = torch.Generator().manual_seed(1)
    ends, todo = 0, list(range(ROWS))
    for count in range(250):
        for row in todo:
            copy_level(pool.world, row, package.world.worlds[row])  # pyright: ignore[reportAttributeAccessIssue]
        action = torch.randint(7, (ROWS,), generator=random)
        action = torch.where(torch.rand(ROWS, generator=random) < 0.4, 2, action)
        one, two = package.step(action), pool.step(action)
        for name in package.spec.obs:
            assert torch.equal(one.next_obs[name], two.next_obs[name]), (count, name)
        for name in ("reward", "ended", "terminated"):
            assert torch.equal(getattr(one, name), getattr(two, name)), (count, name)
        assert torch.equal(one.log["success"], two.log["success"])
        todo = one.ended.nonzero().flatten().tolist()
        ends += len(todo)
    assert ends >= 25
    pool.close()


def test_the_last_successor_is_the_true_one_and_the_next_level_is_new() -> None:
    env = MiniGrid(Config("MiniGrid-Empty-5x5-v0", "envpool", num_envs=3, privileged=True))
    env.reset(0)
    for action in (2, 2, 1, 2, 2):
        step = env.step(torch.tensor([action, 0, action]))
    assert step.terminated.tolist() == [True, False, True]
    assert step.next_obs["privileged/agent"][:, :3].tolist() == [[3, 3, 1], [1, 1, 3], [3, 3, 1]]
    assert step.obs["privileged/agent"][:, :3].tolist() == [[1, 1, 0], [1, 1, 3], [1, 1, 0]]
    assert "You face east" in env.describe(0) and env.render(1).shape == (240, 320, 3)
    with pytest.raises(NotSavable):
        env.get_state()
    env.close()


LEVELS = "embodied.envs.minigrid.levels:Levels-v0"


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({}, "envpool"),
        ({"wrappers": ("FullyObsWrapper",)}, "gymnasium"),
        ({"kwargs": {"size": 7}}, "gymnasium"),
        ({"id": LEVELS}, "gymnasium"),
    ],
)
def test_auto_takes_the_pool_where_it_can(settings: dict[str, Any], backend: str) -> None:
    env = MiniGrid(Config(**{"id": "MiniGrid-Empty-5x5-v0", "num_envs": 1, **settings}))
    assert env.backend == backend
    env.close()


def test_what_the_pool_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="need backend=gymnasium"):
        MiniGrid(Config("MiniGrid-Empty-5x5-v0", "envpool", kwargs={"size": 7}))
    with pytest.raises(ValueError, match="did you mean MiniGrid-Empty-5x5-v0"):
        MiniGrid(Config("MiniGrid-Empty-5x5", "envpool"))
