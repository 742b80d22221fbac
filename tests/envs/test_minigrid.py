"""MiniGrid through us: equal to the package step for step, exact state, words, wrappers."""

from __future__ import annotations

import pytest
import torch

from embodied.core.env import NotSavable

gymnasium = pytest.importorskip("gymnasium")
minigrid = pytest.importorskip("minigrid")

import numpy as np  # noqa: E402

from embodied.envs.minigrid.describe import described, described_whole  # noqa: E402
from embodied.envs.minigrid.env import Config, MiniGrid  # noqa: E402
from embodied.envs.minigrid.settings import WORDS, tokens  # noqa: E402
from embodied.envs.row_rng import row_seed  # noqa: E402

IDS = (
    "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-Dynamic-Obstacles-5x5-v0",
    "MiniGrid-KeyCorridorS3R1-v0",
    "MiniGrid-MemoryS7-v0",
    "MiniGrid-ObstructedMaze-1Dlhb-v0",
    "MiniGrid-PutNear-6x6-N2-v0",
    "MiniGrid-RedBlueDoors-6x6-v0",
    "MiniGrid-Unlock-v0",
)
QUIET = ("MiniGrid-FourRooms-v0",)
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


@pytest.mark.parametrize(
    "level",
    [
        *IDS,
        *("MiniGrid-FourRooms-v0", "MiniGrid-LockedRoom-v0"),
        *("BabyAI-GoToLocal-v0", "BabyAI-UnlockPickup-v0"),
    ],
)
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
    assert ended >= 1 or level in QUIET


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


def test_missions_are_symbols() -> None:
    mission = "put the red ball next to the yellow box, then open a door on your left"
    row = tokens(mission, 20)
    assert (row[:17] != 0).all() and (row[17:] == 0).all()
    with pytest.raises(ValueError, match="mission_words=3 is too small"):
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
        ({"id": "MiniGrid-Doorkey-8x8-v0"}, "MiniGrid environment"),
        ({"id": "CartPole-v1"}, "not a MiniGrid environment"),
        ({"wrappers": ("FullObs",)}, "no wrapper 'FullObs'"),
        ({"wrappers": ({"ViewSizeWrapper": {"size": 3}},)}, "does not accept"),
        ({"kwargs": {"colour": 3}}, "does not accept kwargs"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        MiniGrid(Config(**{"id": IDS[0], "backend": "gymnasium", **settings}))  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(error.value)
