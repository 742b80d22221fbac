"""Demonstrations in a fine-tuning run: mixed in where rows hold robot actions, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.datasets.collect import CollectConfig, collect
from tests.toy_envs import Reach
from tests.training.test_train import run, settings

WORLD = {"_target_": "tests.toy_envs.Reach"}
BASE = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 2, "width": 16}
SAC = {"_target_": "embodied.learners.off_policy.sac.Sac", "batch_size": 32}
ALIASED = {"_target_": "embodied.learners.finetune.dsrl_na.DsrlNa", "batch_size": 32}


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A base in a checkpoint, and demonstrations by somebody else."""
    torch.manual_seed(0)
    base = build(BASE, Policy, spec=Reach().spec)
    checkpoint.save(tmp_path / "base" / "checkpoints" / "00000000", base, 0)
    random = {"_target_": "embodied.policies.random.Random"}
    out = str(tmp_path / "demos")
    collect(CollectConfig(WORLD, random, 4, out, 4, success_only=False), lambda kept, played: None)
    return {"init": str(tmp_path / "base"), "demos": out, "normalize": True}


def test_executed_actions_take_demonstrations(given: dict[str, Any], tmp_path: Path) -> None:
    node = settings(
        tmp_path / "run",
        finetune={"_target_": "embodied.policies.steering.dsrl_na.DsrlNa"},
        **given,
    )
    run(node | {"learner": ALIASED})
    base = checkpoint.load_policy(given["init"])
    learned = checkpoint.load_policy(tmp_path / "run")
    begun = {f"base.{key}": value for key, value in base.state_dict().items()}
    ended = learned.state_dict()
    assert all(torch.equal(value, ended[key]) for key, value in begun.items())
    assert learned.chunk == 2


def test_chosen_noise_does_not(given: dict[str, Any], tmp_path: Path) -> None:
    node = settings(
        tmp_path / "run", finetune={"_target_": "embodied.policies.steering.dsrl.Dsrl"}, **given
    )
    with pytest.raises(ConfigError, match="cannot use demonstrations"):
        run(node | {"learner": SAC})
