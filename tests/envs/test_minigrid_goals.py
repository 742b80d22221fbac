"""Subgoals on levels written out by hand, as numbers, and in a played episode; errands in order."""

from __future__ import annotations

import pytest
import torch

from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import COLOURS
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.envs.minigrid.subgoal_sentences import FORMS, goal, possible
from embodied.envs.minigrid.subgoals import parsed, reached, told_by_planner

KEY, DOOR, BALL, BOX, GOAL = 5, 4, 6, 7, 8
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
THERE = whole((3, 1, 0), (KEY, YELLOW), c21=(DOOR, YELLOW, 0), c31=LEVEL["c31"])
DROPPED = whole((1, 0, 0), NONE, **LEVEL)
BOXED = whole((0, 0, 0), NONE, c10=(BOX, RED, 0))
UNBOXED = whole((0, 0, 0), NONE, c10=(KEY, RED, 0))
CARRIED = whole((0, 0, 0), (BOX, RED))
STAGES = [START, NEAR, HELD, OPENED, SHUT, THERE]


@pytest.mark.parametrize(
    ("text", "before", "after", "not_before", "not_after"),
    [
        ("reach (1, 0)", START, NEAR, NEAR, HELD),
        ("go to the yellow key", START, NEAR, NEAR, NEAR),
        ("pick up the yellow key", NEAR, HELD, HELD, OPENED),
        ("drop the yellow key", HELD, DROPPED, NEAR, HELD),
        ("go to the yellow door", HELD, OPENED, OPENED, SHUT),
        ("unlock the yellow door", HELD, OPENED, SHUT, OPENED),
        ("open the yellow door", SHUT, OPENED, OPENED, SHUT),
        ("close the yellow door", OPENED, SHUT, SHUT, OPENED),
        ("get to the goal", OPENED, THERE, THERE, THERE),
        ("open the red box", BOXED, UNBOXED, BOXED, CARRIED),
        ("pick up the red box", BOXED, CARRIED, BOXED, UNBOXED),
    ],
)
def test_it_holds_in_the_step_in_which_it_happens(
    text: str, before: Tensors, after: Tensors, not_before: Tensors, not_after: Tensors
) -> None:
    assert goal(text).holds(before, after).tolist() == [True]
    assert goal(text).holds(not_before, not_after).tolist() == [False]
    assert goal(text).text == text


def test_other_colours_and_kinds_are_other_goals() -> None:
    for text in ("pick up the red key", "pick up the yellow ball", "go to the yellow box"):
        assert not goal(text).holds(NEAR, HELD).any()
    assert not goal("unlock the red door").holds(HELD, OPENED).any()


def test_rows_at_once() -> None:
    before = {key: torch.cat([START[key], NEAR[key], OPENED[key]]) for key in START}
    after = {key: torch.cat([NEAR[key], HELD[key], OPENED[key]]) for key in START}
    assert goal("pick up the yellow key").holds(before, after).tolist() == [False, True, False]


def test_what_is_possible() -> None:
    assert possible(START) == (
        "get to the goal",
        "go to the yellow door",
        "go to the yellow key",
        "pick up the yellow key",
        "unlock the yellow door",
    )
    assert "drop the yellow key" in possible(HELD) and "unlock the yellow door" in possible(HELD)
    assert "close the yellow door" in possible(OPENED)
    no_key = whole((0, 0, 0), NONE, c21=(DOOR, YELLOW, 2), c20=(KEY, RED, 0))
    assert "unlock the yellow door" not in possible(no_key)
    assert possible(BOXED) == ("go to the red box", "open the red box", "pick up the red box")
    for stage in STAGES:
        assert all(goal(text).text == text for text in possible(stage))


@pytest.mark.parametrize("text", ["fly", "pick up the pink key", "reach (1 0)", "open the door"])
def test_a_sentence_without_meaning_lists_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="forms: get to the goal; ") as error:
        goal(text)
    assert "\n" not in str(error.value) and all(form in str(error.value) for form in FORMS)


def test_an_episode_of_doorkey_passes_its_subgoals_in_order() -> None:
    """Played by the planner: key, door, goal, each exactly once."""
    pytest.importorskip("minigrid")
    from embodied.envs.minigrid.env import Config, MiniGrid
    from embodied.policies.scripted.grids import Planner, PlannerConfig

    level = "MiniGrid-DoorKey-6x6-v0"
    env = MiniGrid(Config(level, "gymnasium", num_envs=3, privileged=True))
    planner = Planner(PlannerConfig(), env.spec)
    obs, happened = env.reset(1), [[] for _ in range(3)]
    wanted = ["pick up the yellow key", "unlock the yellow door", "get to the goal"]
    over = torch.zeros(3, dtype=torch.bool)
    while not over.all():
        action, _ = planner.act(obs, {}, planner.sample_noise(3))
        step = env.step(action[:, 0])
        for text in wanted:
            held = goal(text).holds(
                {key: obs[f"privileged/{key}"] for key in ("grid", "agent")},
                {key: step.next_obs[f"privileged/{key}"] for key in ("grid", "agent")},
            )
            for row in (held & ~over).nonzero().flatten().tolist():
                happened[row].append(text)
        assert step.log["success"][step.ended].all()
        obs, over = step.obs, over | step.ended
    assert happened == [wanted] * 3


TEXTS = [
    *[f"pick up the {colour} key" for colour in COLOURS],
    *[f"drop the {colour} key" for colour in COLOURS],
    *[f"open the {colour} door" for colour in COLOURS],
    *[f"unlock the {colour} door" for colour in COLOURS],
    *[f"close the {colour} door" for colour in COLOURS],
]


@pytest.mark.parametrize("id", ["MiniGrid-KeyCorridorS3R2-v0", "MiniGrid-Unlock-v0"])
def test_numbers_and_sentences_agree(id: str) -> None:
    env = MiniGrid(Config(id, "gymnasium", num_envs=16, privileged=True))
    env.reset(0)
    codes, happened = {text: parsed(text) for text in TEXTS}, 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        before = env.whole()
        move = torch.randint(0, 6, (16,), generator=generator)
        obs = env.step(move).next_obs
        after = {"grid": obs["privileged/grid"], "agent": obs["privileged/agent"]}
        for text, code in codes.items():
            by_number = reached(torch.tensor([code] * 16), before, after)
            assert torch.equal(by_number, goal(text).holds(before, after))
            happened += int(by_number.sum())
    assert happened > 5


def test_errands_of_a_corridor() -> None:
    """The key is behind a closed door, the ball behind the locked one."""
    env = MiniGrid(Config("MiniGrid-KeyCorridorS3R3-v0", "gymnasium", num_envs=20))
    env.reset(0)
    for row, mission in enumerate(env.missions()):
        plan = told_by_planner("language", env.whole(), row, mission)
        words = [text.split(" the ")[0] for text in plan]
        assert words[-4:] == ["pick up", "unlock", "drop", "pick up"]
        assert set(words[:-4]) <= {"open"} and plan[-1] == mission
        assert plan[-4].split()[3] == plan[-3].split()[2]  # the key of that door


def test_a_mission_beyond_the_planner_has_no_errands() -> None:
    env = MiniGrid(Config("MiniGrid-DoorKey-5x5-v0", "gymnasium", num_envs=1))
    env.reset(0)
    assert told_by_planner("language", env.whole(), 0, "put the ball near the box") == []
