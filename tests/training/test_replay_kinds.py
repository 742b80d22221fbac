"""Runs with every kind of replay: exact resume, priorities from the learner, marks in rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import Step
from embodied.core.policy import Policy
from embodied.learners.off_policy.sac import Sac
from embodied.training.collector import Collector
from tests.builders import node_of
from tests.contract.test_learner import batch_for, make
from tests.toy_envs import Config as CounterConfig
from tests.toy_envs import Counter, Reach
from tests.training.test_train import run, same, settings, weights

KINDS: dict[str, dict[str, Any]] = {
    "prioritized": {"replay": {"_target_": "embodied.buffers.prioritized.PrioritizedReplayBuffer"}},
    "mapped": {"replay": {"_target_": "embodied.buffers.memmap.MemmapReplayBuffer"}},
    "successes": {"success_fraction": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind: str, tmp_path: Path) -> None:
    changes = KINDS[kind] | {"replay_size": 1000, "env": {"_target_": f"{__name__}.Near"}}
    run(settings(tmp_path / "whole", **changes))
    run(settings(tmp_path / "half", **changes, steps=200))
    run(settings(tmp_path / "half", **changes, resume=str(tmp_path / "half")))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "half"))


class Near(Reach):
    """A world in which many an episode succeeds by chance."""

    def step(self, action: torch.Tensor) -> Step:
        out = super().step(action)
        out.log["success"] = out.next_obs["state"].norm(dim=1) < 0.5
        return out


def test_a_learner_that_does_not_say_is_refused(tmp_path: Path) -> None:
    node = settings(tmp_path / "run", **KINDS["prioritized"])
    node["policy"] = {"_target_": "embodied.policies.deterministic.Deterministic", "hidden": [8]}
    node["learner"] = node_of("learners.off_policy.td3.Td3", hidden=[8], batch_size=8)
    with pytest.raises(ConfigError, match="no TD error"):
        run(node)


def make_sac() -> Sac:
    learner = make("sac")
    assert isinstance(learner, Sac)
    return learner


def test_priorities_are_the_errors_and_weights_weigh() -> None:
    """Two slices of an update; doubling all weights doubles the critic's loss."""
    losses = []
    for weight in (1.0, 2.0):
        learner = make_sac()
        batch = batch_for(learner) | {"weight": torch.full((learner.batch_size,), weight)}
        torch.manual_seed(0)
        losses.append(learner.update(batch)["critic_loss"].item())
        assert learner.priority is not None and learner.priority.shape == (learner.batch_size,)
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-5)
    torch.manual_seed(0)
    plain = make_sac()
    q = plain.critic({"state": batch["obs/state"]}, batch["action"])
    torch.manual_seed(0)
    backup = plain._backup(batch["reward"], batch["discount"], {"state": batch["next_obs/state"]})
    torch.testing.assert_close(learner.priority, (q - backup).abs().mean(0).detach())


def test_an_intervention_marks_its_decision() -> None:
    """Row 0 is taken over in its second step: the first decision of two steps has the mark."""

    class Watched(Counter):
        steps = 0

        def step(self, action: torch.Tensor) -> Step:
            out = super().step(action)
            self.steps += 1
            out.log["intervened"] = torch.tensor([self.steps == 2, False])
            return out

    for chunk, expected in ((2, [[True, False], [False, False]]), (1, None)):
        env = Watched(CounterConfig(ends=(100, 100)))
        node = {"_target_": "embodied.policies.random.Random", "chunk": chunk}
        rollout = Collector(env, build(node, Policy, spec=env.spec), 0.9)
        out = [rows for rows in (rollout.step()[0] for _ in range(4)) if rows]
        marks = [rows["intervened"].tolist() for rows in out]
        assert marks == (expected or [[False, False], [True, False]] + 2 * [[False, False]])
