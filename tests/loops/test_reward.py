"""A reward that is told the step and remembers: in the replay loop, saved and resumed exactly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.compose import compose
from embodied.core import checkpoint
from embodied.core.build import allow
from embodied.core.tensors import Tensors
from embodied.loops.log import read_metrics
from tests.loops.test_run import flat, run, same, settings, weights

allow("tests")


@dataclass(frozen=True)
class Config:
    start: float = 1.0


class Growing:
    """The world's reward times a factor that learning raises; remembers every step it was told."""

    frozen = False

    def __init__(self, config: Config) -> None:
        self.factor, self.told = config.start, list[int]()

    def at(self, step: int) -> None:
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


class Told:
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
    run(settings(tmp_path, steps=200, reward={"_target_": "tests.loops.test_reward.Told"}))
    assert read_metrics(tmp_path)[-3]["train/reward_lessons"] > 10


def test_a_reward_with_a_state_is_resumed_exactly(tmp_path: Path) -> None:
    reward = {"_target_": "tests.loops.test_reward.Growing"}
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
        words = ["experiment=quadrotor_hover", "size=debug", "reward.every=150", "ratio=0.2"]
        return compose("train", [*words, f"output={tmp_path / folder}", "name=x", *more]).node

    run(node("whole", "steps=240"))
    run(node("half", "steps=120"))
    run(node("half", "steps=240", f"resume={tmp_path / 'half'}"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    whole, half = (checkpoint.load_state(tmp_path / name, "loop") for name in ("whole", "half"))
    assert flat(whole) == flat(half)
