"""Levels by task vector: what each number does, and that each level can be solved."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("minigrid")

from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.policies.scripted.grids import Planner, PlannerConfig, State, search

ID = "embodied.envs.minigrid.levels:Levels-v0"
NAMES = ("size", "walls", "lava", "door", "distance", "layout")
WALL, DOOR, KEY, GOAL, LAVA = 2, 4, 5, 8, 9


@pytest.fixture(scope="module")
def env() -> MiniGrid:
    return MiniGrid(Config(ID, "gymnasium", num_envs=8, privileged=True))


def task(**numbers: float) -> torch.Tensor:
    """[8, 6]: 0 but for what is given, with eight layouts."""
    rows = torch.zeros(8, 6)
    for name, number in numbers.items():
        rows[:, NAMES.index(name)] = number
    rows[:, 5] = torch.linspace(0.05, 0.95, 8)
    return rows


def kinds(env: MiniGrid, **numbers: float) -> list[Counter[int]]:
    """How many cells of each kind there are, per row."""
    grid = env.reset(0, task=task(**numbers))["privileged/grid"]
    return [Counter(row[..., 0].flatten().tolist()) for row in grid]


def ways(env: MiniGrid) -> list[int]:
    """The planner's shortest ways in actions; fails where there is none."""
    whole, found = env.whole(), []
    for row, (x, y, turn, kind, colour) in enumerate(whole["agent"].tolist()):
        state = State(x, y, turn, (kind, colour), whole["grid"][row].numpy().tobytes())
        way = search(state, whole["grid"].shape[2], everything=False)
        assert way, row
        found.append(len(way))
    return found


def test_the_vector_is_in_the_spec(env: MiniGrid) -> None:
    leaf = env.spec.task
    assert leaf is not None and leaf.names == NAMES and (leaf.low, leaf.high) == (0, 1)


def test_every_level_can_be_solved(env: MiniGrid) -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(8):
        env.reset(0, task=torch.rand(8, 6, generator=random))
        ways(env)
    env.reset(0, task=task(size=1, walls=1, lava=1, door=1, distance=1))
    assert min(ways(env)) > 5


def test_size_walls_and_lava_count_cells(env: MiniGrid) -> None:
    plain = kinds(env)
    assert all(c[WALL] == 121 - 9 and not c[LAVA] and c[GOAL] == 1 for c in plain)
    assert all(c[WALL] == 121 - 81 for c in kinds(env, size=1))
    # 80 cells are free besides the start: 40% of them, as far as the level stays solvable.
    assert all(c[WALL] == 121 - 81 + 32 for c in kinds(env, size=1, walls=1))
    assert all(c[LAVA] == 20 and c[WALL] == 40 for c in kinds(env, size=1, lava=1))


def test_the_door_is_none_closed_or_locked_with_its_key(env: MiniGrid) -> None:
    assert all(not c[DOOR] and not c[KEY] for c in kinds(env, size=1, door=0.2))
    assert all(c[DOOR] == 1 and not c[KEY] for c in kinds(env, size=1, door=0.5))
    closed = env.whole()["grid"]
    assert all(c[DOOR] == c[KEY] == 1 for c in kinds(env, size=1, door=0.9))
    locked = env.whole()["grid"]
    for grid, state in ((closed, 1), (locked, 2)):
        assert (grid[grid[..., 0] == DOOR][:, 2] == state).all()
    assert env.missions() == ["use the key to open the door and then get to the goal"] * 8


def test_distance_makes_the_way_longer(env: MiniGrid) -> None:
    mean = []
    for distance in (0.0, 0.5, 1.0):
        env.reset(0, task=task(size=1, distance=distance))
        mean.append(sum(ways(env)) / 8)
    assert mean[0] < 5 and mean[0] + 3 < mean[1] and mean[1] + 3 < mean[2]


def test_the_vector_alone_decides(env: MiniGrid) -> None:
    wanted = torch.rand(8, 6, generator=torch.Generator().manual_seed(4))
    one = env.reset(1, task=wanted)
    two = env.reset(2, task=wanted)
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = env.reset(2, task=(wanted + 0.01).clamp(max=1))
    assert not torch.equal(two["privileged/grid"], other["privileged/grid"])
    mask = torch.arange(8) == 3
    part = env.reset(task=wanted, mask=mask)
    changed = (part["privileged/grid"] != other["privileged/grid"]).flatten(1).any(1)
    assert not changed[~mask].any() and torch.equal(
        part["privileged/grid"][3], one["privileged/grid"][3]
    )


def test_without_a_vector_the_seed_decides(env: MiniGrid) -> None:
    one, two, three = (env.reset(seed)["privileged/grid"].clone() for seed in (5, 5, 6))
    assert torch.equal(one, two) and not torch.equal(one, three)
    assert len({row.numpy().tobytes() for row in one}) == 8


def test_a_wrong_vector_is_refused(env: MiniGrid) -> None:
    with pytest.raises(ValueError, match=r"a task of Levels must be 6 numbers in \[0, 1\] \(size"):
        env.reset(0, task=torch.full((8, 6), 1.5))
    plain = MiniGrid(Config("MiniGrid-Empty-5x5-v0", "gymnasium", num_envs=1))
    with pytest.raises(ValueError, match="no task vector"):
        plain.reset(0, task=torch.zeros(1, 6))
    with pytest.raises(ValueError, match="at least 5"):
        MiniGrid(Config(ID, "gymnasium", num_envs=1, kwargs={"size": 4}))


def test_the_planner_wins_them_all(env: MiniGrid) -> None:
    planner = Planner(PlannerConfig(), env.spec)
    obs, won = env.reset(3), 0
    for _ in range(120):
        action, _ = planner.act(obs, {}, planner.sample_noise(8))
        step = env.step(action[:, 0])
        assert torch.equal(step.ended, step.log["success"])
        won, obs = won + int(step.ended.sum()), step.obs
    assert won > 20
