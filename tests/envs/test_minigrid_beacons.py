"""Subgoals as numbers mean what the sentences mean; errands come in an order that works."""

from __future__ import annotations

import pytest
import torch

from embodied.envs.minigrid.describe import COLOURS
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.envs.minigrid.subgoal_sentences import goal
from embodied.envs.minigrid.subgoals import parsed, reached, told_by_planner

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
