"""The MiniGrid planner: shortest ways counted by hand, in the package's levels, and when stuck."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.policies.scripted.minigrid import (
    DROP,
    FORWARD,
    PICK,
    RIGHT,
    TOGGLE,
    WAIT,
    Config,
    Planner,
    State,
)
from embodied.policies.scripted.minigrid import search as find

CODES = {"#": (2, 5, 0), ".": (1, 0, 0), "G": (8, 1, 0), "D": (4, 4, 2), "K": (5, 4, 0)}
CODES |= {"o": (6, 0, 0), "~": (9, 0, 0), "d": (4, 0, 1)}
LEVEL = Leaf((6, 3, 3), "uint8", 0, (10, 5, 3) * 18, unit="symbol")
AGENT = Leaf((5,), "int64", 0, (5, 2, 3, 10, 5), unit="symbol")
SPEC = Spec({"privileged/grid": LEVEL, "privileged/agent": AGENT}, Leaf((), "int64", 0, 6), dt=1.0)


def start(*lines: str, turn: int = 0) -> State:
    """A level drawn in letters; the agent `A` stands on an empty cell."""
    cells = {(x, y): letter for y, line in enumerate(lines) for x, letter in enumerate(line)}
    (place,) = [where for where, letter in cells.items() if letter == "A"]
    codes = np.array(
        [
            [CODES[cells[x, y].replace("A", ".")] for y in range(len(lines))]
            for x in range(len(lines[0]))
        ],
        np.uint8,
    )
    return State(*place, turn, (1, 0), codes.tobytes())


def actions(state: State, height: int = 3) -> list[int]:
    """The way as the planner takes it, in order."""
    way = find(state, height, False) or find(state, height, True)
    return list(way.values())[::-1]


def test_ways_counted_by_hand() -> None:
    assert actions(start("######", "#A..G#", "######")) == [FORWARD] * 3
    assert actions(start("######", "#A..G#", "######", turn=3)) == [RIGHT] + [FORWARD] * 3
    assert actions(start("######", "#A.d.G", "######")) == [FORWARD, TOGGLE] + [FORWARD] * 3
    key = start("#A####", "#KD.G#", "#.####", turn=1)
    # Take the key below, step down, turn to the door, open it and go through.
    assert actions(key) == [PICK, FORWARD, 0, TOGGLE, FORWARD, FORWARD, FORWARD]


def test_things_in_the_way_are_put_aside() -> None:
    assert actions(start("######", "#.Ao.G", "######")) == [PICK] + [FORWARD] * 3
    # Two of them: put the first one down behind, then carry the second.
    two = actions(start("#######", "#.AooG#", "#######"))
    assert two[0] == PICK and two.count(DROP) == 1 and two.count(PICK) == 2
    assert two.count(FORWARD) == 3 and len(two) == 10
    assert actions(start("######", "#A~.G#", "######")) == []  # lava is not walked on


def test_it_waits_where_there_is_no_way_and_refuses_other_missions() -> None:
    planner = Planner(Config(), SPEC)
    assert planner.best(start("######", "#A#.G#", "######")) == WAIT
    with pytest.raises(ValueError, match="no goal cell"):
        planner.best(start("######", "#A...#", "######"))
    with pytest.raises(ConfigError, match=r"set env\.privileged=true"):
        Planner(Config(), Spec({"x": Leaf((1,))}, SPEC.act, 1.0))


def test_mistakes_are_turns_or_safe_steps() -> None:
    planner = Planner(Config(mistakes=1.0), SPEC)
    state = start("######", "#A~.G#", "######")
    grid = torch.from_numpy(np.frombuffer(state.grid, np.uint8).reshape(1, 6, 3, 3).copy())
    obs = {
        "privileged/grid": grid.expand(300, 6, 3, 3),
        "privileged/agent": torch.tensor([[1, 1, 0, 1, 0]]).expand(300, 5),
    }
    torch.manual_seed(0)
    noise = planner.sample_noise(300)
    drawn, _ = planner.act(obs, {}, noise)
    assert drawn.shape == (300, 1) and set(drawn.flatten().tolist()) == {0, 1}
    again, _ = planner.act(obs, {}, noise)
    assert torch.equal(drawn, again)


@pytest.mark.parametrize(
    "level",
    ["DoorKey-8x8", "FourRooms", "LavaCrossingS9N3", "MultiRoom-N2-S4", "SimpleCrossingS11N5"],
)
def test_it_wins_in_the_packages_levels(level: str) -> None:
    pytest.importorskip("minigrid")
    from embodied.envs.minigrid.env import Config as WorldConfig
    from embodied.envs.minigrid.env import MiniGrid

    name = f"MiniGrid-{level}-v0"
    env = MiniGrid(WorldConfig(name, "gymnasium", num_envs=3, privileged=True))
    planner = Planner(Config(), env.spec)
    obs, over, count = env.reset(0), torch.zeros(3, dtype=torch.bool), 0
    while not over.all():
        step = env.step(planner.act(obs, {}, planner.sample_noise(3))[0][:, 0])
        assert step.log["success"][step.ended].all()
        obs, over, count = step.obs, over | step.ended, count + 1
        assert count < 100
