"""Goals that were shown: numbers by hand, pictures by a real encoder, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import EpisodeWriter
from embodied.datasets.lerobot.video import encode_png
from embodied.envs.toy.two_gap import Config as GapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.rewards.vision_language.clip import Goal

STATE = Leaf((3,), names=("x", "y", "z"))
SPEC = Spec({"state": STATE, "front": Leaf((48, 48, 3), "uint8", 0, 255)}, Leaf((2,)), dt=0.1)


def made(**settings: object) -> Goal:
    node = {"_target_": "embodied.rewards.vision_language.clip.Goal", **settings}
    return build(node, Reward, spec=SPEC, device=torch.device("cpu"))


def rows(**leaves: Tensor) -> dict[str, Tensor]:
    count = len(next(iter(leaves.values())))
    return {f"next_obs/{k}": v for k, v in leaves.items()} | {"reward": torch.zeros(count)}


def test_distance_to_named_numbers() -> None:
    reward = made(leaf="state", state={"x": 1.0, "z": 0.0}, weights={"z": 2.0}, scale=0.5)
    state = torch.tensor([[1.0, 9.0, 0.0], [4.0, 9.0, 2.0]])
    # sqrt(3^2 + (2 * 2)^2) = 5; y does not count.
    torch.testing.assert_close(reward(rows(state=state)), torch.tensor([0.0, -2.5]))
    assert reward.frozen and reward.update({}) == {}


def test_the_end_of_a_recorded_episode(tmp_path: Path) -> None:
    spec = Spec({"state": STATE}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
    steps = {
        "obs/state": torch.zeros(2, 3),
        "next_obs/state": torch.tensor([[0.0, 3.0, 4.0]]),
        "action": torch.zeros(2, 2),
        "reward": torch.zeros(2),
        "terminated": torch.tensor([False, False]),
        "truncated": torch.tensor([False, True]),
    }
    with EpisodeWriter(tmp_path / "shown", spec) as writer:
        writer.add(steps)
    reward = made(leaf="state", goal=str(tmp_path / "shown"))
    torch.testing.assert_close(reward(rows(state=torch.zeros(1, 3))), torch.tensor([-5.0]))


def test_a_picture_of_the_goal(tmp_path: Path) -> None:
    """The nearer the point is to where it was shown, the higher the reward."""
    env = TwoGap(GapConfig(num_envs=4))
    env.reset(0)
    env.place[:] = torch.tensor([[0.9, 0.5], [0.88, 0.52], [0.3, 0.2], [0.05, 0.9]])
    shots = env.render_batch(torch.arange(4), 96)
    (tmp_path / "goal.png").write_bytes(encode_png(shots[0]))
    reward = made(goal=str(tmp_path / "goal.png"), leaf="front")
    paid = reward(rows(front=shots))
    assert float(paid[0]) == pytest.approx(0.0, abs=1e-3)
    assert bool((paid[1:] < paid[0]).all()) and float(paid[3]) < float(paid[1])


def test_the_world_is_drawn_where_no_leaf_is_named(tmp_path: Path) -> None:
    env = TwoGap(GapConfig(num_envs=2))
    env.reset(0)
    (tmp_path / "goal.png").write_bytes(encode_png(env.render_batch(torch.tensor([0]), 96)[0]))
    reward = made(goal=str(tmp_path / "goal.png"))
    watched = reward.augment_env(env)
    watched.reset(0)
    step = watched.step(torch.zeros(2, 2))
    following = {f"next_obs/{k}": v for k, v in step.next_obs.items()}
    paid = reward(following | {"reward": step.reward})
    assert paid.shape == (2,) and bool((paid <= 0).all())


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
def test_wrong_settings_are_one_clear_line(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        made(**settings)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "goal.png").write_text("not a picture")
    with pytest.raises(ConfigError, match="is not an image"):
        made(goal=str(tmp_path / "goal.png"))
