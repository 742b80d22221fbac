"""Episodes that end when a classifier has detected success in several steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied.core.build import build
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.rewards.wrappers.success_detector import SuccessDetector
from tests.builders import make_reward, node_of
from tests.rewards.test_progress import SPEC, corridor, record
from tests.toy_envs import Config, Counter

STAY = torch.zeros(2, 1)
CLASSIFIER = node_of("rewards.success.classifier.Classifier", refit_every=0)


def detector(steps: int, *states: float, ends: tuple[int, int] = (9, 9)) -> SuccessDetector:
    """Detects a Counter in these states, and has begun its first episodes."""
    detected = torch.tensor(states)
    env = SuccessDetector(
        Counter(Config(ends=ends)), lambda obs: torch.isin(obs["state"][:, 0], detected), steps
    )
    env.reset(0)
    return env


def test_only_consecutive_detections_end_an_episode() -> None:
    """Row 0 is detected at 1 and 3, but not at 2; then at 5 and 6, which ends its episode, the
    count being saved between; row 1 goes on."""
    env, other = (detector(2, 1.0, 3.0, 5.0, 6.0, 103.0, 106.0) for _ in range(2))
    for age in range(1, 6):
        step = env.step(STAY)
        assert not step.ended.any() and not step.log["detected"].any(), age
    other.set_state(env.get_state())
    for each in (env, other):
        step = each.step(STAY)
        assert step.terminated.tolist() == step.log["detected"].tolist() == [True, False]
        assert not step.truncated.any()
        assert step.next_obs["state"].flatten().tolist() == [6, 106]
        assert step.obs["state"].flatten().tolist() == [0, 106]
        assert not step.log["success"].any()  # the environment knows success, and that is kept
    assert env.step(STAY).next_obs["state"].flatten().tolist() == [1, 107]


def test_it_is_the_success_of_an_environment_that_knows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knowing = Counter.step
    monkeypatch.setattr(Counter, "step", lambda *given: replace(knowing(*given), log={}))
    env = detector(1, 2.0, 102.0, ends=(2, 9))
    env.step(STAY)
    step = env.step(STAY)
    assert step.log["success"].tolist() == [True, True]
    # Env 0 ended by itself in the same step: a termination, not a truncation.
    assert step.terminated.tolist() == [True, True]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("classifier")
    data = record(folder / "data", corridor(12, 20, seed=1))
    training = {"updates": 300, "last": 2}
    make_reward(CLASSIFIER | {"data": data, "training": training}, SPEC, folder)
    return str(folder / "v1")


class Walker(Counter):
    """State 0 moves from 0 to 1 in 20 steps, like the walks of the classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.spec = SPEC

    def _obs(self) -> Tensors:
        x = self.age / 20.0
        return {"state": torch.stack([x, 0 * x, torch.sin(3 * x)], 1)}


def test_a_trained_classifier_ends_episodes_in_both_places(trained: str) -> None:
    """As a wrapper in an environment's YAML (evaluation, a robot), and by the reward that learns;
    both near the end of a walk, and the transition that ends it is worth 1."""
    node = node_of("rewards.wrappers.success_detector.DetectSuccess", trained=trained, steps=2)
    alone = build(node, Wrapper, env=Walker(Config(ends=(30, 30))))
    settings = {"trained": trained, "terminate": True, "steps": 2}
    reward = make_reward(CLASSIFIER | settings, SPEC, Path("unused"))
    for env in (alone, reward.augment_env(Walker(Config(ends=(30, 30))))):
        env.reset(0)
        age, step = 1, env.step(STAY)
        while not step.ended.any():
            age, step = age + 1, env.step(STAY)
        assert 16 <= age <= 23
        assert step.terminated.all() and step.log["detected"].all()
        rows = {"next_obs/state": step.next_obs["state"], "discount": torch.zeros(2)}
        assert reward(rows).tolist() == [1, 1]
