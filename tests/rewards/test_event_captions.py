"""Captions of steps: what MiniGrid says, ends of episodes, counts, an exact resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import happened
from embodied.envs.minigrid.env import Config, MiniGrid
from embodied.policies.scripted.minigrid import Config as PlannerConfig
from embodied.policies.scripted.minigrid import Planner
from embodied.rewards.wrappers.event_captions import TIMES, with_event_captions
from embodied.rewards.wrappers.render_caption import CAPTION, CaptionVocabulary

KEY, DOOR, BOX, EMPTY, YELLOW, RED = 5, 4, 7, 1, 4, 0


def view(hand: list[int], ahead: list[int], turn: int = 0) -> Tensors:
    cells = torch.ones(1, 7, 7, 3, dtype=torch.uint8)
    cells[0, 3, 6], cells[0, 3, 5] = torch.tensor(hand), torch.tensor(ahead)
    return {"cells": cells, "direction": torch.tensor([turn])}


NOTHING, HELD = [EMPTY, 0, 0], [KEY, YELLOW, 0]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (view(NOTHING, HELD), view(HELD, NOTHING), "you picked up the yellow key"),
        (view(HELD, NOTHING), view(NOTHING, HELD), "you put down the yellow key"),
        (
            view(HELD, [DOOR, YELLOW, 2]),
            view(HELD, [DOOR, YELLOW, 0]),
            "you unlocked the yellow door",
        ),
        (view(NOTHING, [DOOR, RED, 1]), view(NOTHING, [DOOR, RED, 0]), "you opened the red door"),
        (view(NOTHING, [DOOR, RED, 0]), view(NOTHING, [DOOR, RED, 1]), "you closed the red door"),
        (
            view(NOTHING, [DOOR, RED, 0]),
            view(NOTHING, NOTHING),
            "you stepped into the doorway of the red door",
        ),
        (
            view(NOTHING, [BOX, RED, 0]),
            view(NOTHING, HELD),
            "you opened the red box and found the yellow key in it",
        ),
        (view(NOTHING, NOTHING), view(NOTHING, HELD, 1), "you face the yellow key"),
        (view(NOTHING, [DOOR, RED, 1]), view(NOTHING, NOTHING, 1), ""),
        (view(NOTHING, HELD), view(NOTHING, HELD), ""),
    ],
)
def test_what_happened(before: Tensors, after: Tensors, said: str) -> None:
    assert happened(before, after) == [said]


def test_pictures_of_cells_are_needed() -> None:
    with pytest.raises(ConfigError, match="remove the wrappers"):
        happened({"image": torch.zeros(1)}, {"image": torch.zeros(1)})


def actions(world: MiniGrid, planner: Planner, obs: Tensors) -> Tensor:
    return planner.act(obs, {}, planner.sample_noise(world.num_envs))[0][:, 0]


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_a_way_to_the_goal_is_told(backend: Any) -> None:
    """Each row says that it took the key and opened the door, in this order, in each episode."""
    if backend == "envpool":
        pytest.importorskip("envpool")
    config = Config("MiniGrid-DoorKey-5x5-v0", backend, num_envs=4, privileged=True)
    captions = CaptionVocabulary()
    env = with_event_captions(world := MiniGrid(config), captions)
    planner = Planner(PlannerConfig(), world.spec)
    obs = env.reset(0)
    assert obs[CAPTION].tolist() == [0] * 4 and captions.texts == [""]
    said: list[list[str]] = [[] for _ in range(4)]
    ended = 0
    for _ in range(60):
        step = env.step(actions(world, planner, obs))
        obs = step.obs
        for row in range(4):
            text = captions.texts[int(step.next_obs[CAPTION][row])]
            if text and "face" not in text:
                said[row].append(text)
            if step.ended[row]:
                way = ["you picked up the yellow key", "you unlocked the yellow door"]
                assert said[row] == [*way, "you stepped into the doorway of the yellow door"]
                assert int(obs[CAPTION][row]) == 0 and int(obs[TIMES][row]) == 0
                said[row], ended = [], ended + 1
    assert ended >= 8


def test_counts_begin_again_with_an_episode() -> None:
    """Picking up and putting down: the first time, the second, the third; anew after a reset."""
    config = Config("MiniGrid-DoorKey-5x5-v0", "gymnasium", num_envs=1, privileged=True)
    captions = CaptionVocabulary()
    env = with_event_captions(world := MiniGrid(config), captions)
    planner = Planner(PlannerConfig(), world.spec)
    obs = env.reset(0)
    while obs["privileged/agent"][0, 3] == EMPTY:
        obs = env.step(actions(world, planner, obs)).obs
    counted = []
    for action in (4, 3, 4, 3):
        step = env.step(torch.tensor([action]))
        text = captions.texts[int(step.next_obs[CAPTION])]
        counted.append((text.split()[1], int(step.next_obs[TIMES])))
    assert counted == [("put", 1), ("picked", 2), ("put", 2), ("picked", 3)]
    assert int(env.reset(0)[TIMES]) == 0
    assert not env.memory["counts"].any()  # pyright: ignore[reportAttributeAccessIssue]


def test_going_on_from_a_saved_row_counts_on() -> None:
    config = Config("MiniGrid-Unlock-v0", "gymnasium", num_envs=3)
    captions = CaptionVocabulary()
    env = with_event_captions(MiniGrid(config), captions)
    env.reset(0)
    generator = torch.Generator().manual_seed(0)
    moves = torch.randint(0, 6, (80, 3), generator=generator)
    for move in moves[:40]:
        env.step(move)
    state = env.get_state()
    before = [env.step(move).next_obs for move in moves[40:]]
    env.set_state(state)
    after = [env.step(move).next_obs for move in moves[40:]]
    assert max(int(obs[TIMES].max()) for obs in before) > 1
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[CAPTION], other[CAPTION]) and torch.equal(one[TIMES], other[TIMES])


class Silent(MiniGrid):
    """An environment without event captions."""

    event_captions = None  # pyright: ignore[reportAssignmentType]


def test_a_world_without_events_is_described() -> None:
    captions = CaptionVocabulary()
    env = with_event_captions(
        Silent(Config("MiniGrid-DoorKey-5x5-v0", "gymnasium", num_envs=2)), captions
    )
    step = (env.reset(0), env.step(torch.tensor([0, 6])))[1]
    assert captions.texts[0] == "" and int(step.next_obs[CAPTION].min()) > 0
    assert "You face" in captions.texts[int(step.next_obs[CAPTION][0])]
    assert step.next_obs[TIMES].tolist() == [1, 1]
