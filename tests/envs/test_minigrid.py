"""MiniGrid: equal to the package step for step; words, levels by task vector, subgoals."""

from __future__ import annotations

from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.env import NotSavable
from embodied.core.tensors import Tensors

pytest.importorskip("minigrid")

from minigrid.envs.babyai.core.levelgen import LevelGen

from embodied.envs.minigrid.describe import described, described_whole
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.envs.minigrid.settings import WORDS, tokens
from embodied.envs.minigrid.subgoals import parsed, possible, reached, told_by_planner
from embodied.envs.row_rng import row_seed
from embodied.policies.scripted.grids import State, search

IDS = (
    "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-Dynamic-Obstacles-5x5-v0",
    "MiniGrid-KeyCorridorS3R1-v0",
    "MiniGrid-MemoryS7-v0",
    "MiniGrid-ObstructedMaze-1Dlhb-v0",
    "MiniGrid-PutNear-6x6-N2-v0",
    "MiniGrid-RedBlueDoors-6x6-v0",
    "MiniGrid-Unlock-v0",
    "MiniGrid-FourRooms-v0",
    "MiniGrid-LockedRoom-v0",
    "BabyAI-GoToLocal-v0",
    "BabyAI-UnlockPickup-v0",
)
LEVELS = "embodied.envs.minigrid.levels:Levels-v0"
LEFT, RIGHT, FORWARD = 0, 1, 2


def made(level: str, rows: int = 2, **settings: object) -> MiniGrid:
    return MiniGrid(Config(level, "gymnasium", num_envs=rows, **settings))  # pyright: ignore[reportArgumentType]


def plan(env: MiniGrid, steps: int) -> list[torch.Tensor]:
    """Random actions, half of them forward."""
    high, random = env.spec.act.high, torch.Generator().manual_seed(0)
    assert isinstance(high, int | float)
    drawn = torch.randint(int(high) + 1, (steps, env.num_envs), generator=random)
    ahead = torch.rand(drawn.shape, generator=random) < 0.5
    return list(torch.where(ahead, FORWARD, drawn))


@pytest.mark.parametrize("level", IDS)
def test_rows_are_the_packages_own_environments(level: str) -> None:
    """Our view, rewards and ends against `gymnasium.make`, resets included."""
    env = made(level)
    raws = [gymnasium.make(level, disable_env_checker=True) for _ in range(2)]
    obs = env.reset(4)
    first = [raw.reset(seed=row_seed(4, row))[0] for row, raw in enumerate(raws)]
    assert all(np.array_equal(obs["cells"][row], first[row]["image"]) for row in range(2))
    ended = 0
    for action in plan(env, 300):
        step = env.step(action)
        for row, raw in enumerate(raws):
            seen, reward, over, late, _ = raw.step(int(action[row]))
            assert np.array_equal(step.next_obs["cells"][row], seen["image"])
            assert step.next_obs["direction"][row] == seen["direction"]
            assert step.reward[row] == np.float32(reward)
            ends = [step.terminated, step.truncated, step.log["success"]]
            wanted = [over, late and not over, over and reward > 0]
            assert [bool(each[row]) for each in ends] == wanted
            if over or late:
                ended += 1
                seen, _ = raw.reset()
            assert np.array_equal(step.obs["cells"][row], seen["image"])
            assert env.missions()[row] == seen["mission"]
    assert ended >= 1 or level == "MiniGrid-FourRooms-v0"


def test_what_cannot_be_saved_says_so() -> None:
    for env in (made("BabyAI-GoToObj-v0"), made(IDS[0], wrappers=("PositionBonus",))):
        env.reset(0)
        with pytest.raises(NotSavable, match="cannot save its state"):
            env.get_state()


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_success_at_the_last_step_is_an_end_and_not_a_time_out(backend: str) -> None:
    """Empty-5x5: forward, forward, right, forward, forward is the way."""
    pytest.importorskip(backend)
    env = MiniGrid(Config("MiniGrid-Empty-5x5-v0", backend, num_envs=1, horizon=5))  # pyright: ignore[reportArgumentType]
    env.reset(0)
    way = [FORWARD, FORWARD, RIGHT, FORWARD, FORWARD, *[LEFT] * 5]
    steps = [env.step(torch.tensor([action])) for action in way]
    for step, won in ((steps[4], True), (steps[9], False)):
        ends = (step.terminated, step.truncated, step.log["success"])
        assert [bool(end) for end in ends] == [won, not won, won]
    assert steps[4].reward.item() == pytest.approx(1 - 0.9)
    env.close()


def test_a_view_in_words() -> None:
    view = np.zeros((7, 7, 3), np.uint8)
    view[3, 6] = (5, 4, 0)  # a yellow key in the hand
    view[3, 5] = view[3, 4] = (1, 0, 0)
    view[3, 3] = (2, 5, 0)
    view[1, 4] = (4, 4, 2)
    view[5, 6] = (8, 1, 0)
    assert described(view, 3, "get to the goal") == (
        "Mission: get to the goal. You face north and carry a yellow key. "
        "A wall is 3 steps ahead. You see the goal 2 steps to the right; "
        "a locked yellow door 2 steps ahead and 2 steps to the left."
    )


def test_a_level_in_words_and_pictures() -> None:
    env = made("MiniGrid-Empty-5x5-v0", 1)
    env.reset(0)
    assert env.describe(0).startswith("Mission: get to the green goal square. You face east")
    whole = env.whole()
    assert described_whole(whole["grid"][0].numpy(), whole["agent"][0].numpy()) == (
        "A level of 5 x 5 cells; the agent is at (1, 1) and faces east; "
        "there is the goal at (3, 3)."
    )
    picture = env.render(0, 200, 100)
    assert picture.shape == (100, 200, 3) and picture.dtype == torch.uint8
    red, green, blue = picture[65, 125].tolist()  # in the fourth of five rows of 20 pixels
    assert green > red + 100 and green > blue + 100  # the goal
    assert (picture[:, :50] == 24).all() and (picture[:, 150:] == 24).all()


@pytest.mark.parametrize(
    ("id", "most"),
    [
        *(("BabyAI-GoToLocal-v0", 8), ("BabyAI-GoToSeqS5R2-v0", 24), ("BabyAI-SynthLoc-v0", 17)),
        *(
            ("BabyAI-MiniBossLevel-v0", 72),
            ("BabyAI-PickupLoc-v0", 9),
            ("MiniGrid-LockedRoom-v0", 18),
        ),
    ],
)
def test_a_mission_of_any_length_has_room(id: str, most: int) -> None:
    """The longest one by the grammar of the package's generators, and as 20 levels show."""
    env = made(id, 4, mission_words="longest")
    assert env.spec.obs["mission"].shape == (most,)
    for seed in range(5):
        obs = env.reset(seed)
        said = [mission.replace(",", " ,").split() for mission in env.missions()]
        assert (obs["mission"] > 0).sum(1).tolist() == [len(words) for words in said]
    world = gymnasium.make(id).unwrapped
    if isinstance(world, LevelGen):
        thing = 3 + 4 * world.locations
        words = {"putnext": 3 + 2 * thing, "open": 1 + thing}
        action = max(words.get(kind, 2 + thing) for kind in world.action_kinds)
        sequence, pair = "seq" in world.instr_kinds, "and" in world.instr_kinds
        assert most == (4 * action + 4 if sequence else 2 * action + 1 if pair else action)


def test_a_mission_that_has_no_room_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"up to 72 words; set env\.mission_words=longest"):
        made("BabyAI-BossLevel-v0", mission_words=8)


def test_missions_are_symbols() -> None:
    mission = "put the red ball next to the yellow box, then open a door on your left"
    row = tokens(mission, 20)
    assert (row[:17] != 0).all() and (row[17:] == 0).all()
    with pytest.raises(ConfigError, match="mission_words=3 is too small"):
        tokens(mission, 3)
    with pytest.raises(ValueError, match="'dance'"):
        tokens("dance", 3)
    env = made("MiniGrid-Fetch-5x5-N2-v0", mission_words=8)
    obs = env.reset(2)
    assert env.spec.obs["mission"].is_symbol
    said = [" ".join(WORDS[at - 1] for at in row if at) for row in [row, *obs["mission"].tolist()]]
    assert [text.replace(" ,", ",") for text in said] == [mission, *env.missions()]


@pytest.mark.parametrize(
    ("wrappers", "name", "shape", "symbols"),
    [
        (("FullyObsWrapper",), "cells", (5, 5, 3), True),
        (("ImgObsWrapper",), "cells", (7, 7, 3), True),
        (({"ViewSizeWrapper": {"agent_view_size": 5}},), "cells", (5, 5, 3), True),
        (({"RGBImgPartialObsWrapper": {"tile_size": 4}},), "image", (28, 28, 3), False),
        (("FlatObsWrapper",), "state", (2835,), False),
    ],
)
def test_wrappers(
    wrappers: tuple[str, ...], name: str, shape: tuple[int, ...], symbols: bool
) -> None:
    env = made("MiniGrid-DoorKey-5x5-v0", wrappers=wrappers)
    assert env.backend == "gymnasium"
    obs = env.reset(0)
    assert obs[name].shape == (2, *shape) and env.spec.obs[name].is_symbol == symbols
    assert env.step(torch.tensor([0, 1])).next_obs[name].shape == (2, *shape)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"level": "MiniGrid-Doorkey-8x8-v0"}, "MiniGrid environment"),
        ({"level": "CartPole-v1"}, "not a MiniGrid environment"),
        ({"wrappers": ("FullObs",)}, "no wrapper 'FullObs'"),
        ({"wrappers": ({"ViewSizeWrapper": {"size": 3}},)}, "does not accept"),
        ({"kwargs": {"colour": 3}}, "does not accept kwargs"),
        ({"level": LEVELS, "kwargs": {"size": 4}}, "at least 5"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        made(**{"level": IDS[0], **settings})
    assert "\n" not in str(error.value)


NAMES = ("size", "walls", "lava", "door", "distance", "layout")
WALL, DOOR, KEY, BALL, BOX, GOAL, LAVA = 2, 4, 5, 6, 7, 8, 9


@pytest.fixture(scope="module")
def env() -> MiniGrid:
    return made(LEVELS, 8, privileged=True)


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


@pytest.mark.parametrize(
    ("door", "doors", "keys", "states"),
    [(0.2, 0, 0, []), (0.5, 1, 0, [1] * 8), (0.9, 1, 1, [2] * 8)],
)
def test_the_door_is_none_closed_or_locked_with_its_key(
    env: MiniGrid, door: float, doors: int, keys: int, states: list[int]
) -> None:
    assert all((c[DOOR], c[KEY]) == (doors, keys) for c in kinds(env, size=1, door=door))
    grid = env.whole()["grid"]
    assert grid[grid[..., 0] == DOOR][:, 2].tolist() == states
    mission = "use the key to open the door and then get to the goal"
    assert (env.missions() == [mission] * 8) == bool(keys)


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
    other = env.reset(2, task=(wanted + 0.01).clamp(max=1))["privileged/grid"]
    assert not torch.equal(two["privileged/grid"], other)
    mask = torch.arange(8) == 3
    part = env.reset(task=wanted, mask=mask)["privileged/grid"]
    assert torch.equal(part, torch.where(mask[:, None, None, None], one["privileged/grid"], other))


def test_a_wrong_vector_is_refused(env: MiniGrid) -> None:
    with pytest.raises(ValueError, match=r"a task of Levels must be 6 numbers in \[0, 1\] \(size"):
        env.reset(0, task=torch.full((8, 6), 1.5))
    with pytest.raises(ValueError, match="no task vector"):
        made("MiniGrid-Empty-5x5-v0", 1).reset(0, task=torch.zeros(1, 6))


RED, GREEN, YELLOW = 0, 1, 4
NONE = (1, 0)  # an empty hand


def whole(
    agent: tuple[int, int, int], hand: tuple[int, int], **cells: tuple[int, int, int]
) -> Tensors:
    """A level of 4 x 3 empty cells with things at `c<x><y>`."""
    grid = torch.tensor([1, 0, 0], dtype=torch.uint8).expand(1, 4, 3, 3).clone()
    for place, code in cells.items():
        grid[0, int(place[1]), int(place[2])] = torch.tensor(code, dtype=torch.uint8)
    return {"grid": grid, "agent": torch.tensor([[*agent, *hand]])}


LEVEL = {"c20": (KEY, YELLOW, 0), "c21": (DOOR, YELLOW, 2), "c31": (GOAL, GREEN, 0)}
START = whole((0, 0, 0), NONE, **LEVEL)
NEAR = whole((1, 0, 0), NONE, **LEVEL)
HELD = whole((1, 0, 0), (KEY, YELLOW), c21=LEVEL["c21"], c31=LEVEL["c31"])
OPENED = whole((1, 1, 0), (KEY, YELLOW), c21=(DOOR, YELLOW, 0), c31=LEVEL["c31"])
SHUT = whole((1, 1, 0), (KEY, YELLOW), c21=(DOOR, YELLOW, 1), c31=LEVEL["c31"])
THERE = whole((3, 1, 3), (KEY, YELLOW), c21=(DOOR, YELLOW, 0), c31=LEVEL["c31"])
BOXED = whole((0, 0, 0), NONE, c10=(BOX, RED, 0))
UNBOXED = whole((0, 0, 0), NONE, c10=(KEY, RED, 0))
CARRIED = whole((0, 0, 0), (BOX, RED))


def holds(text: str, before: Tensors, after: Tensors) -> list[bool]:
    code = parsed(text)
    assert code is not None
    return reached(torch.tensor([code] * len(before["grid"])), before, after).tolist()


@pytest.mark.parametrize(
    ("text", "before", "after", "not_before", "not_after"),
    [
        ("reach (1, 0)", START, NEAR, START, START),
        ("go to the yellow key", START, NEAR, START, START),
        ("the yellow key", NEAR, HELD, START, NEAR),
        ("pick up the yellow key", NEAR, HELD, HELD, OPENED),
        ("drop the yellow key", HELD, NEAR, NEAR, HELD),
        ("go to the yellow door", HELD, OPENED, START, NEAR),
        ("unlock the yellow door", HELD, OPENED, SHUT, OPENED),
        ("open the yellow door", SHUT, OPENED, OPENED, SHUT),
        ("close the yellow door", OPENED, SHUT, SHUT, OPENED),
        ("get to the goal", OPENED, THERE, HELD, OPENED),
        ("pick up the red box", BOXED, CARRIED, BOXED, UNBOXED),
        ("pick up the yellow key", NEAR, HELD, START, NEAR),
    ],
)
def test_it_is_reached_in_the_step_in_which_it_happens(
    text: str, before: Tensors, after: Tensors, not_before: Tensors, not_after: Tensors
) -> None:
    """Both transitions are rows of one batch."""
    olds = {key: torch.cat([before[key], not_before[key]]) for key in before}
    news = {key: torch.cat([after[key], not_after[key]]) for key in after}
    assert holds(text, olds, news) == [True, False]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("pick up the red key", HELD),
        ("pick up the yellow ball", HELD),
        ("go to the yellow box", HELD),
        ("unlock the red door", OPENED),
    ],
)
def test_other_colours_and_kinds_are_other_goals(text: str, after: Tensors) -> None:
    assert holds(text, NEAR if after is HELD else HELD, after) == [False]


@pytest.mark.parametrize("text", ["fly", "pick up the pink key", "reach (1 0)", "open the door"])
def test_what_is_no_subgoal_is_not_understood(text: str) -> None:
    assert parsed(text) is None


def test_what_is_possible() -> None:
    near = ["get to the goal", "go to the yellow door", "go to the yellow key"]
    assert [*possible(START)] == [*near, "pick up the yellow key", "unlock the yellow door"]
    assert possible(BOXED) == ("go to the red box", "open the red box", "pick up the red box")
    assert {"drop the yellow key", "unlock the yellow door"} < {*possible(HELD)}
    assert "close the yellow door" in possible(OPENED)
    no_key = whole((0, 0, 0), NONE, c21=(DOOR, YELLOW, 2), c20=(KEY, RED, 0))
    assert "unlock the yellow door" not in possible(no_key)
    for stage in (START, NEAR, HELD, OPENED, SHUT, THERE):
        assert all(parsed(text) for text in possible(stage))


def test_errands_of_a_corridor() -> None:
    """The key is behind a closed door, the ball behind the locked one."""
    env = made("MiniGrid-KeyCorridorS3R3-v0", 20)
    env.reset(0)
    for row, mission in enumerate(env.missions()):
        plan = told_by_planner("language", env.whole(), row, mission)
        words = [text.split(" the ")[0] for text in plan]
        assert words[-4:] == ["pick up", "unlock", "drop", "pick up"]
        assert set(words[:-4]) <= {"open"} and plan[-1] == mission
        assert plan[-4].split()[3] == plan[-3].split()[2]  # the key of that door
    assert told_by_planner("language", env.whole(), 0, "put the ball near the box") == []
