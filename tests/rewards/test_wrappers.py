"""Episodes that somebody takes over, or that end when a classifier has detected success: when, what
is stored, what is paid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.policies.scripted.intervener import Config as WatcherConfig
from embodied.policies.scripted.intervener import Intervener, ProgressIntervener
from embodied.rewards.success.interventions import Config, Interventions, InterventionWrapper
from embodied.rewards.wrappers.success_detector import SuccessDetector
from embodied.training.collector import Collector
from tests.builders import make_policy, make_reward, node_of
from tests.rewards.test_progress import SPEC, corridor, record
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter

NAMES = ("d_x", "d_y", "d_z")
FAR = Spec({"state": Leaf((3,), names=NAMES)}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
HAND = node_of("policies.random.Random")
FIRST = torch.tensor([True, True])


def watcher(**settings: Any) -> ProgressIntervener:
    return ProgressIntervener(WatcherConfig(HAND, distance="d", **settings), FAR, 2)


def seen(*far: float) -> Tensors:
    return {"state": torch.tensor([[value, 0.0, 0.0] for value in far])}


def test_it_takes_over_where_nothing_gets_better_and_lets_go_again() -> None:
    made = watcher(patience=3, better=0.05, hold=2)
    # Row 0 gets nearer all the time; row 1 by a centimetre a step, which is too little.
    asked = [(1.0 - 0.1 * k, 1.0 - 0.01 * k) for k in range(9)]
    over = [made.over(seen(*far), FIRST if k == 0 else ~FIRST) for k, far in enumerate(asked)]
    assert not any(rows[0] for rows in over)
    # Three steps without 5 cm, two in hand, and then three more.
    assert [bool(rows[1]) for rows in over] == [*[False] * 3, True, True, *[False] * 2, True, True]
    assert made.over(seen(0.5, 0.5), torch.tensor([False, True])).tolist() == [False, False]


def test_it_blunders_as_often_as_it_is_told() -> None:
    made = watcher(patience=10**6, blunder=0.1, hold=1)
    rows = [made.over(seen(1.0, 1.0), ~FIRST) for _ in range(2000)]
    assert torch.stack(rows).float().mean().item() == pytest.approx(0.1, abs=0.02)
    with pytest.raises(ConfigError, match="e_x is not an element of"):
        ProgressIntervener(WatcherConfig(HAND, distance="e"), FAR, 2)


class Scripted(Intervener):
    """Has rows in hand when it is said so, and does 0.5."""

    def __init__(self, over: list[list[bool]]) -> None:
        self.plan, self.seen = iter(over), list[Tensor]()

    def executed(self, action: Tensor) -> None:
        self.seen.append(action)

    def over(self, obs: Tensors, first: Tensor) -> Tensor:
        return torch.tensor(next(self.plan))

    def act(self, obs: Tensors, first: Tensor) -> Tensor:
        return torch.full((len(first), 1), 0.5)


def test_the_step_before_pays_and_what_was_done_is_stored() -> None:
    plan = [[False, False], [False, True], [True, True], [True, False], [True, False]]
    scripted = Scripted(plan)
    env = InterventionWrapper(Counter(CounterConfig(ends=(3, 100))), scripted, True)
    rollout = Collector(env, make_policy("random.Random", env.spec), 0.9)
    stored, steps = zip(*(rollout.step() for _ in range(4)), strict=True)
    # Row 1 is taken in the second step: the first one pays. Row 0 in the third: the second does.
    # Row 0's episode ends with its third step: who has the next in hand took nothing over.
    paid = torch.stack([rows["reward"] for rows in stored])
    assert paid.tolist() == [[0, -1], [-1, 0], [0, 0], [0, 0]]
    theirs = torch.stack([rows["intervened"] for rows in stored])
    assert theirs.tolist() == plan[:4]
    action = torch.stack([rows["action"] for rows in stored])
    assert torch.equal(action, torch.stack([step.log["executed"] for step in steps]))
    assert torch.equal(action, torch.stack(scripted.seen))
    assert torch.equal((action == 0.5)[..., 0], theirs)
    assert not rollout.savable


def test_chunks_cannot_be_taken_over_from() -> None:
    env = InterventionWrapper(Counter(CounterConfig()), Scripted([[True, True]] * 5), False)
    policy = make_policy("random.Random", env.spec, chunk=2)
    with pytest.raises(ConfigError, match="execute=1"):
        Collector(env, policy, 0.9).step()


def test_a_demonstration_is_nobodys_complaint() -> None:
    node = node_of("policies.scripted.intervener.ProgressIntervener", hand=HAND, distance="d")
    rows = {"reward": torch.tensor([1.0, 0.0, -1.0])}
    assert Interventions(Config(node), 2, 0)(rows).tolist() == [0.0, 0.0, -1.0]
    assert Interventions(Config(node, pay="env"), 2, 0)(rows).tolist() == [1.0, 0.0, -1.0]


STAY = torch.zeros(2, 1)
CLASSIFIER = node_of("rewards.success.classifier.Classifier", refit_every=0)


def detector(steps: int, *states: float, ends: tuple[int, int] = (9, 9)) -> SuccessDetector:
    """Detects a Counter in these states, and has begun its first episodes."""
    detected = torch.tensor(states)

    def detect(obs: Tensors) -> Tensor:
        return torch.isin(obs["state"][:, 0], detected)

    env = SuccessDetector(Counter(CounterConfig(ends=ends)), detect, steps)
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

    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self.spec = SPEC

    def _obs(self) -> Tensors:
        x = self.age / 20.0
        return {"state": torch.stack([x, 0 * x, torch.sin(3 * x)], 1)}


def test_a_trained_classifier_ends_episodes_in_both_places(trained: str) -> None:
    """As a wrapper in an environment's YAML (evaluation, a robot), and by the reward that learns;
    both near the end of a walk, and the transition that ends it is worth 1."""
    node = node_of("rewards.wrappers.success_detector.DetectSuccess", trained=trained, steps=2)
    alone = build(node, Wrapper, env=Walker(CounterConfig(ends=(30, 30))))
    settings = {"trained": trained, "terminate": True, "steps": 2}
    reward = make_reward(CLASSIFIER | settings, SPEC, Path("unused"))
    for env in (alone, reward.augment_env(Walker(CounterConfig(ends=(30, 30))))):
        env.reset(0)
        age, step = 1, env.step(STAY)
        while not step.ended.any():
            age, step = age + 1, env.step(STAY)
        assert 16 <= age <= 23
        assert step.terminated.all() and step.log["detected"].all()
        rows = {"next_obs/state": step.next_obs["state"], "discount": torch.zeros(2)}
        assert reward(rows).tolist() == [1, 1]
