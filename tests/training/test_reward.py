"""A reward that is told the step and remembers: in the replay loop, saved and resumed exactly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.build import ConfigError, allow, parse
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors
from embodied.datasets.collect import CollectConfig, collect
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.demonstrations import rows_for
from embodied.training.logger import read_metrics
from embodied.training.off_policy import OffPolicyLoop
from tests.training.test_train import flat, run, same, settings, weights

allow("tests")


@dataclass(frozen=True)
class Config:
    start: float = 1.0


class Growing(Reward):
    """The world's reward times a factor that learning raises; remembers every step it was told."""

    frozen = False

    def __init__(self, config: Config) -> None:
        self.factor, self.told = config.start, list[int]()

    def set_step(self, step: int) -> None:
        self.told.append(step)

    def __call__(self, rows: Tensors) -> Tensor:
        return self.factor * rows["reward"]

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        self.factor += 0.01
        return {"factor": torch.tensor(self.factor)}

    def get_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "told": list(self.told)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.factor, self.told = state["factor"], list(state["told"])


class Told(Reward):
    """Pays 1 for everything; what it is taught from holds what the world paid: less than 0."""

    frozen = False

    def __init__(self) -> None:
        self.lessons = 0

    def __call__(self, rows: Tensors) -> Tensor:
        assert (rows["reward"] < 0).all()
        return torch.ones_like(rows["reward"])

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        assert (rows["reward"] < 0).all() and not any("own" in key for key in rows)
        self.lessons += 1
        return {"lessons": torch.tensor(float(self.lessons))}


def test_rewards_learn_from_what_the_world_paid(tmp_path: Path) -> None:
    run(settings(tmp_path, steps=200, reward={"_target_": "tests.training.test_reward.Told"}))
    counts = [row.get("train/reward_lessons", 0) for row in read_metrics(tmp_path)]
    assert max(counts) > 10


def test_a_reward_with_a_state_is_resumed_exactly(tmp_path: Path) -> None:
    reward = {"_target_": "tests.training.test_reward.Growing"}
    run(settings(tmp_path / "whole", steps=400, reward=reward))
    run(settings(tmp_path / "half", steps=200, reward=reward))
    run(settings(tmp_path / "half", steps=400, reward=reward, resume=str(tmp_path / "half")))
    whole, half = (checkpoint.load_state(tmp_path / name, "loop") for name in ("whole", "half"))
    assert whole["loop"]["reward"]["factor"] > 1.5
    assert whole["loop"]["reward"]["told"] == list(range(4, 401, 4))
    assert flat(whole) == flat(half)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))


def test_a_flight_school_is_resumed_exactly(tmp_path: Path) -> None:
    """The quadrotor's experiment, interrupted before its weights grow and ended after."""

    def node(folder: str, *more: str) -> dict[str, Any]:
        words = [
            "experiment=quadrotor_hover",
            "size=debug",
            "reward.every=150",
            "data.utd_ratio=0.2",
        ]
        return compose("train", [*words, f"out={tmp_path / folder}", "name=x", *more]).node

    run(node("whole", "steps=240"))
    run(node("half", "steps=120"))
    run(node("half", "steps=240", f"resume={tmp_path / 'half'}"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    whole, half = (checkpoint.load_state(tmp_path / name, "loop") for name in ("whole", "half"))
    assert flat(whole) == flat(half)


def test_demonstrations_are_paid_like_everything_else(tmp_path: Path) -> None:
    """A reward that stands in for the world's own pays their rows too; offline it has to be asked
    for a labelled copy; what it cannot see in them is one line."""
    env = {"_target_": "tests.toy_envs.Reach", "num_envs": 4}
    collected = {
        "env": env,
        "demonstrator": {"_target_": "embodied.policies.random.Random"},
        "episodes": 4,
    }
    collected |= {"out": str(tmp_path / "demos"), "num_envs": 4, "success_only": False}
    collect(parse(CollectConfig, collected, "collect"), lambda kept, played: None)
    double = {"_target_": "embodied.rewards.handcrafted.composite.Scaled", "factor": -2.0}
    more = {"demos": str(tmp_path / "demos"), "demo_fraction": None, "reward": double}
    node = settings(tmp_path / "run", **more)
    made = RunComponents(read_config(node))
    assert made.episodes is not None and isinstance(made.loop, OffPolicyLoop)
    rows = rows_for(made.episodes, made.policy, made.learner, None)
    stored = made.loop.buffers.replay.take(torch.arange(len(rows["reward"])))
    assert torch.equal(stored["reward"], -2 * rows["reward"]) and rows["reward"].abs().sum() > 0
    with pytest.raises(ConfigError, match="embodied reward label"):
        offline = {key: value for key, value in more.items() if key != "demo_fraction"}
        run(settings(tmp_path / "off", **offline, data="offline"))
    looks = {
        "_target_": "embodied.rewards.vision_language.clip.Clip",
        "prompt": "the ball is there",
    }
    with pytest.raises(ConfigError, match="which this reward observes"):
        run(settings(tmp_path / "clip", **{**more, "reward": looks}))
