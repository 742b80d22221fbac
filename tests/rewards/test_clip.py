"""Sentences and goals as rewards: by hand, by a real encoder, what is hidden, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.simclip.captions import fact, fill_templates, ladder
from embodied.core.build import ConfigError, build
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import nest
from embodied.datasets.lerobot.video import encode_png
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.rewards.vision_language.clip import Config, Ladders, Projected, readout_of
from embodied.rewards.vision_language.goal import Goal
from embodied.rewards.wrappers.success_detector import NoTerminationWrapper
from embodied.vision import simclip
from tests.builders import node_of
from tests.rewards.rows import write_episodes

REACH = "the hand is touching the green ball"
CPU = torch.device("cpu")
SPEC = Spec({"state": Leaf((2,)), "front": Leaf((8, 8, 3), "uint8", 0, 255)}, Leaf((1,)), dt=0.1)


def unit(rows: int, seed: int, size: int = 16) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(rows, size, generator=random), dim=1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_only_the_way_to_the_goal_counts_as_far_as_it_is_projected(alpha: float) -> None:
    """By the matrix of the paper; without projection or a baseline it is the cosine."""
    seen, goal, away = unit(20, 0), unit(1, 1)[0], unit(1, 2)[0]
    way = goal - away
    matrix = alpha * torch.outer(way, way) / way.square().sum() + (1 - alpha) * torch.eye(16)
    expected = 1 - 0.5 * ((seen - goal) @ matrix).square().sum(1)
    torch.testing.assert_close(Projected(goal, away, alpha)(seen), expected)
    torch.testing.assert_close(Projected(goal, None, alpha)(seen), seen @ goal)


def test_a_ladder_is_the_expected_place() -> None:
    """On the rungs; between two of them, half of each; and on two ladders, the mean of both."""
    rungs = torch.eye(3)
    seen = functional.normalize(torch.cat([rungs, torch.tensor([[0.0, 1.0, 1.0]])]), dim=1)
    torch.testing.assert_close(Ladders([rungs], 100.0)(seen), torch.tensor([0.0, 0.5, 1.0, 0.75]))
    both = Ladders([rungs, rungs.flip(0)], 100.0)
    torch.testing.assert_close(both(rungs), torch.full((3,), 0.5))


class Words:
    """An encoder whose texts are known vectors and whose pictures are their first pixel's hue."""

    name, size, side = "words", 3, 8

    def texts(self, sentences: Sequence[str]) -> Tensor:
        place = {"bad": 0, "fair": 1, "good": 2}
        return torch.eye(3)[[place[text] for text in sentences]]

    def images(self, pictures: Tensor) -> Tensor:
        return functional.normalize(pictures[:, 0, 0].float(), dim=1)


def test_given_sentences_are_used_as_they_are() -> None:
    picture = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    picture[0, 0, 0, 1] = 200
    model = Words()
    steps = readout_of(Config(ladder=("bad", "fair", "good"), temperature=0.01), model, ())
    assert float(steps(model.images(picture))) == pytest.approx(0.5, abs=1e-4)
    plain = readout_of(Config(alpha=0.0), model, ("good", "fair"))
    assert float(plain(model.images(picture))) == pytest.approx(0.5 + 0.25)  # |g| is not one
    with pytest.raises(ConfigError, match="at least two"):
        readout_of(Config(ladder=("good",)), model, ())
    with pytest.raises(ConfigError, match="the same embedding"):
        readout_of(Config(baseline="good"), model, ("good",))


def test_a_known_order_is_found_and_others_are_not() -> None:
    model = simclip.load()
    found = model.ladder("the gripper is right at the green ball")
    assert found is not None and found[0] == [simclip.BLANK]
    assert any("touching" in text or "exactly at" in text for text in found[-1])
    backwards = model.ladder("the hand is very far from the ball")
    assert backwards is not None and backwards[-1] == found[1]
    for sentence in ("a red bus waits in the rain", "quarterly earnings exceeded forecasts"):
        assert model.ladder(sentence) is None


def test_the_world_is_drawn_where_no_picture_is_named(tmp_path: Path) -> None:
    """By the reward of a sentence and by that of a goal, which the first of three rows is at."""
    env = TwoGap(GapConfig(num_envs=3))
    env.reset(0)
    env.place[:] = torch.tensor([[0.9, 0.9], [0.8, 0.8], [0.1, 0.1]])
    (tmp_path / "goal.png").write_bytes(encode_png(env.render_batch(torch.tensor([0]), 96)[0]))
    goal = made_goal(goal=str(tmp_path / "goal.png"))
    for reward in (made(env.spec), goal):
        watched = reward.augment_env(env)
        watched.reset(0)
        env.place[:] = torch.tensor([[0.9, 0.9], [0.8, 0.8], [0.1, 0.1]])
        step = watched.step(torch.zeros(3, 2))
        paid = reward(nest(step.next_obs, "next_obs") | {"reward": step.reward})
        assert paid.shape == (3,) and bool((paid <= 0).all())
        with pytest.raises(ConfigError, match=r"reward\.(picture|leaf)=NAME"):
            reward({"reward": step.reward})
    assert paid[0] > paid[1] > paid[2]


def made(spec: Spec = SPEC, **settings: object) -> Any:
    node = node_of("rewards.vision_language.clip.Clip", prompt=REACH) | settings
    return build(node, Reward, spec=spec, device=CPU)


def test_change_is_potential_based() -> None:
    reward = made(value="change", scale=2.0, picture="front")
    before, after = (torch.full((2, 8, 8, 3), v, dtype=torch.uint8) for v in (30, 220))
    discount = torch.tensor([0.9, 0.0])
    rows = {"obs/front": before, "next_obs/front": after, "reward": torch.zeros(2)}
    expected = 2 * (discount * reward.score(after) - reward.score(before))
    torch.testing.assert_close(reward(rows | {"discount": discount}), expected)


def test_ends_are_hidden_from_the_learner() -> None:
    env = TwoGap(GapConfig(num_envs=1))
    endless = NoTerminationWrapper(env)
    endless.reset(0)
    env.place[0] = torch.tensor([0.9, 0.5])
    step = endless.step(torch.tensor([[1.0, 0.0]]))
    assert bool(step.log["success"]) and not bool(step.terminated) and bool(step.truncated)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"picture": "state"}, "is not an image observation"),
        ({"picture": "back"}, "there are \\['front'\\]"),
        ({"alpha": 1.5}, "alpha=1.5 should be at least 0, at most 1"),
        ({"prompt": None}, "no goal"),
        ({"model": "/no/such"}, "no model at /no/such"),
    ],
)
def test_wrong_settings_are_one_clear_line(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**settings)


def test_places_on_a_ladder_are_by_hand() -> None:
    phrases = [fill_templates(("{a} {b}",), a=("x", "y"), b=(f"p{n}", f"q{n}")) for n in range(3)]
    falling = ladder("near", (0.2, 0.1), (0.3, 0.0), phrases)
    quantity = torch.tensor([0.5, 0.25, 0.15, 0.05, 0.0])
    assert falling.rung(quantity).tolist() == [0, 0, 1, 2, 2]
    expected = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0]) * 2 / 3
    torch.testing.assert_close(falling.place(quantity), expected)
    made = fact("f", ["a", "b", "c", "d", "d"])
    assert len(made.phrases) == 3 and len(made.held_out) == 1
    assert not {*made.phrases} & {*made.held_out}


STATE = Leaf((3,), names=("x", "y", "z"))
GOAL_SPEC = Spec({"state": STATE, "front": Leaf((48, 48, 3), "uint8", 0, 255)}, Leaf((2,)), dt=0.1)


def made_goal(**settings: object) -> Goal:
    node = node_of("rewards.vision_language.goal.Goal", **settings)
    return build(node, Reward, spec=GOAL_SPEC, device=CPU)


def seen_rows(**leaves: Tensor) -> dict[str, Tensor]:
    count = len(next(iter(leaves.values())))
    return {f"next_obs/{k}": v for k, v in leaves.items()} | {"reward": torch.zeros(count)}


def test_distance_to_named_numbers() -> None:
    reward = made_goal(leaf="state", state={"x": 1.0, "z": 0.0}, weights={"z": 2.0}, scale=0.5)
    state = torch.tensor([[1.0, 9.0, 0.0], [4.0, 9.0, 2.0]])
    # sqrt(3^2 + (2 * 2)^2) = 5; y does not count.
    torch.testing.assert_close(reward(seen_rows(state=state)), torch.tensor([0.0, -2.5]))


def test_the_end_of_a_recorded_episode(tmp_path: Path) -> None:
    spec = Spec({"state": STATE}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    walk = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 3.0, 4.0]])
    shown = write_episodes(tmp_path / "shown", spec, [{"state": walk}], won=False)
    reward = made_goal(leaf="state", goal=shown)
    torch.testing.assert_close(reward(seen_rows(state=torch.zeros(1, 3))), torch.tensor([-5.0]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no goal"),
        ({"goal": "/no/such"}, "neither an image nor a dataset"),
        ({"leaf": "touch", "goal": "x"}, "not an observation: state, front"),
        ({"state": {"x": 1.0}}, "reward.leaf=state"),
        ({"leaf": "state", "state": {"w": 1.0}}, "no element 'w'"),
        ({"leaf": "state", "state": {"x": 1.0}, "weights": {"v": 1.0}}, "no element 'v'"),
    ],
)
def test_wrong_goals_are_one_clear_line(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        made_goal(**settings)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "goal.png").write_text("not a picture")
    with pytest.raises(ConfigError, match="is not an image"):
        made_goal(goal=str(tmp_path / "goal.png"))
    (tmp_path / "goal.png").write_bytes(encode_png(torch.full((8, 8, 1), 0.3)))  # in mm, 16 bits
    with pytest.raises(ConfigError, match="16 bits a colour: save it with 8"):
        made_goal(goal=str(tmp_path / "goal.png"))
