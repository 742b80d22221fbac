"""Episodes that end when a classifier has detected success in several steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.core.build import build
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.rewards.success.model import Training, load_labelled, made, write
from embodied.rewards.wrappers.success_detector import DetectSuccess, SuccessDetector
from tests.builders import make_reward
from tests.rewards.test_progress import SPEC, corridor, record
from tests.toy_envs import Config, Counter

STAY = torch.zeros(2, 1)


def at(*ages: int) -> Callable[[Tensors], Tensor]:
    """Detects a Counter of one of these ages."""
    return lambda obs: torch.isin(obs["state"][:, 0] % 100, torch.tensor(ages, dtype=torch.float32))


def test_only_consecutive_detections_end_an_episode() -> None:
    """Ages 1 and 3 are detected, but not 2; then 5 and 6, the second of which ends both episodes;
    they begin again, and an end of the environment stays what it was."""
    env = SuccessDetector(Counter(Config(ends=(9, 9))), at(1, 3, 5, 6), 2)
    env.reset(0)
    for age in range(1, 6):
        step = env.step(STAY)
        assert not step.ended.any() and not step.log["detected"].any(), age
    step = env.step(STAY)
    assert step.terminated.all() and not step.truncated.any() and step.log["detected"].all()
    assert step.next_obs["state"].flatten().tolist() == [6, 106]
    assert step.obs["state"].flatten().tolist() == [0, 100]
    assert not step.log["success"].any()  # the environment knows success, and that is kept
    assert env.step(STAY).next_obs["state"].flatten().tolist() == [1, 101]


def test_one_episode_ends_and_the_other_goes_on() -> None:
    def second(obs: Tensors) -> Tensor:
        return obs["state"][:, 0] == 102

    env = SuccessDetector(Counter(Config(ends=(9, 9))), second, 1)
    env.reset(0)
    env.step(STAY)
    step = env.step(STAY)
    assert step.ended.tolist() == [False, True]
    assert step.obs["state"].flatten().tolist() == [2, 100]


def test_it_is_the_success_of_an_environment_that_knows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knowing = Counter.step
    monkeypatch.setattr(Counter, "step", lambda *given: replace(knowing(*given), log={}))
    env = SuccessDetector(Counter(Config(ends=(2, 9))), at(2), 1)
    env.reset(0)
    env.step(STAY)
    step = env.step(STAY)
    assert step.log["success"].tolist() == [True, True]
    # Env 0 ended by itself in the same step: a termination, not a truncation.
    assert step.terminated.tolist() == [True, True]


def test_counts_are_saved() -> None:
    def build_one() -> SuccessDetector:
        return SuccessDetector(Counter(Config(ends=(9, 9))), at(1, 2), 2)

    one, two = build_one(), build_one()
    one.reset(0), two.reset(0)
    one.step(STAY)
    two.set_state(one.get_state())
    assert one.step(STAY).ended.all() and two.step(STAY).ended.all()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("eyes")
    data = record(folder / "data", corridor(12, 20, seed=1))
    how = Training(updates=300, last=2)
    whole, leaves = load_labelled([data], how, 0)
    net, calibration = made(whole, leaves, how, 0)
    facts = {"version": 1, "fingerprint": "x", "data": [data], "training": how.__dict__}
    write(folder / "net", net, leaves, calibration, facts)
    return str(folder / "net")


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
    long = Config(ends=(30, 30))
    node = {"_target_": "embodied.rewards.wrappers.success_detector.DetectSuccess"}
    alone = build(node | {"trained": trained, "steps": 2}, Wrapper, env=Walker(long))
    assert isinstance(alone, DetectSuccess)
    node = {"_target_": "embodied.rewards.success.classifier.Classifier", "trained": trained}
    node |= {"terminate": True, "steps": 2, "refit_every": 0}
    reward = make_reward(node, SPEC, Path("unused"))
    for env in (alone, reward.augment_env(Walker(long))):
        env.reset(0)
        age, step = 1, env.step(STAY)
        while not step.ended.any():
            age, step = age + 1, env.step(STAY)
        assert 16 <= age <= 23
        assert step.terminated.all() and step.log["detected"].all()
        rows = {"next_obs/state": step.next_obs["state"], "discount": torch.zeros(2)}
        assert reward(rows).tolist() == [1, 1]
