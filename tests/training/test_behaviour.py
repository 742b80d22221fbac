"""A learner that collects with a policy of its own, and one that learns from several batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import UNPLANNED, RunPlan
from embodied.learners.off_policy import sac
from embodied.learners.on_policy import ppo
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from tests.builders import node_of
from tests.training.test_train import run, same, settings, weights

SHIFT = 100.0  # of the behaviour policy's actions, before they are squashed or clipped


class Behaving(ppo.Ppo):
    """PPO that collects with a copy of the policy whose actions are larger, and keeps 3 batches."""

    keep_batches = 3

    def __init__(
        self, config: ppo.Config, policy: Policy, spec: Spec, run: RunPlan = UNPLANNED
    ) -> None:
        super().__init__(config, policy, spec, run)
        self.behaviour = shifted(policy)
        self.shapes: list[tuple[int, ...]] = []

    def behaviour_policy(self) -> Policy:
        return self.behaviour

    def update(self, batch: Tensors) -> Tensors:
        self.shapes.append(tuple(batch["valid"].shape))
        return {**super().update(batch), "action": batch["action"].mean()}


class BehavingSac(sac.Sac):
    """SAC that collects with a copy of the policy whose actions are larger."""

    def __init__(self, config: sac.Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config, policy, spec)
        self.behaviour = shifted(policy)

    def behaviour_policy(self) -> Policy:
        return self.behaviour


def shifted(policy: Policy) -> Policy:
    made = copy.deepcopy(policy).requires_grad_(False)
    for name, value in made.named_parameters():
        if name.endswith("bias"):
            value += SHIFT
    return made


def on_policy(folder: Path, learner: str = f"{__name__}.Behaving", **more: Any) -> Any:
    made = settings(
        folder,
        "on_policy",
        policy=node_of("policies.diagonal_gaussian.DiagonalGaussian", hidden=[8]),
        learner={"_target_": learner, "horizon": 5, "batch_size": 20, "epochs": 2},
        **more,
    )
    return made


def test_the_behaviour_policy_collects_and_batches_are_kept(tmp_path: Path) -> None:
    components = RunComponents(read_config(on_policy(tmp_path)))
    loop: Any = components.loop
    learner: Any = components.learner
    assert loop.collector.actor.policy is learner.behaviour is not components.policy
    for _ in range(5 * 4):
        loop.advance()
    assert learner.shapes == [(5, 4), (5, 8), (5, 12), (5, 12)]
    usual: Any = RunComponents(read_config(on_policy(tmp_path, f"{ppo.__name__}.Ppo")))
    assert usual.loop.collector.actor.policy is usual.policy
    means: list[float] = []
    for each in (loop, usual.loop):
        for _ in range(4):
            each.advance()
        means.append(float(each.buffer.held["action"].mean()))
    assert means[0] > means[1] + 1


def test_on_policy_resume_is_exact(tmp_path: Path) -> None:
    """In the middle of a batch, with two batches before it."""
    run(on_policy(tmp_path / "whole", steps=120))
    run(on_policy(tmp_path / "half", steps=52))
    run(on_policy(tmp_path / "half", steps=120, resume=str(tmp_path / "half")))
    run(on_policy(tmp_path / "usual", f"{ppo.__name__}.Ppo", steps=120))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "usual"))


def off_policy(folder: Path, **more: Any) -> Any:
    made = settings(folder, **more)
    made["learner"]["_target_"] = f"{__name__}.BehavingSac"
    return made


def test_off_policy_after_the_warm_up(tmp_path: Path) -> None:
    components = RunComponents(read_config(off_policy(tmp_path / "a", warmup_steps=0)))
    loop: Any = components.loop
    learner: Any = components.learner
    assert loop.collector.actor.policy is learner.behaviour is not components.policy
    run(off_policy(tmp_path / "whole"))
    run(off_policy(tmp_path / "half", steps=200))
    run(off_policy(tmp_path / "half", resume=str(tmp_path / "half")))
    run(settings(tmp_path / "usual"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "usual"))


def test_actors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a policy of its own: data\.actors=0"):
        RunComponents(read_config(off_policy(tmp_path, actors=1)))
