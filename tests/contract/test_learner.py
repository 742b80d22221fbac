"""Learners in configs/learner keep the contract: the checks of `embodied check learner`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.checks import learner as checks
from embodied.checks.check import Check
from embodied.checks.learner import (
    CHECKS,
    HORIZON,
    ROWS,
    SPEC,
    LearnerSubject,
    batch_for,
    segment,
    trainable,
    updates,
)
from embodied.checks.subjects import candidates, learner_subject
from embodied.compose import PACKAGED
from embodied.core.build import ConfigError, build, resolve
from embodied.core.config_fields import complete
from embodied.core.policy import Policy, PolicyWrapper
from embodied.learners.learner import Learner, RunPlan
from embodied.policies.steering.steered import Steered
from tests.tiers import once_per_class, usually

__all__ = ["HORIZON", "batch_for", "candidates", "segment", "updates"]  # for other tests
CONFIGS = PACKAGED
# It teaches agents with tables in lifetimes of symbols alone: tests/learners/test_groove.py.
APART = "groove"
FILES = sorted(file for file in (PACKAGED / "learner").glob("*.yaml") if file.stem != APART)
LEARNERS = [file.stem for file in FILES]
# An exact resume needs the seed to decide; names of settings are tried below.
ALSO = {checks.the_seed_decides, checks.unknown_settings_are_refused}
USUAL = usually({*CHECKS} - ALSO, CHECKS)


def node(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((PACKAGED / group / f"{name}.yaml").read_text())


def subject(name: str) -> LearnerSubject:
    return learner_subject(node("learner", name), [PACKAGED])


def make(name: str, seed: int = 0) -> Learner:
    """The learner of a YAML, with the first policy that it accepts."""
    return checks.make(subject(name), seed)


def steer(path: Path) -> Policy:
    """What a learner gets of a fine-tuner around a small base policy."""
    wrapper = yaml.safe_load(path.read_text())
    inner = issubclass(resolve(wrapper["_target_"], PolicyWrapper), Steered)
    return trainable(wrapper, node("policy", "gaussian") if inner else None)


@pytest.mark.parametrize("file", once_per_class(FILES))
@pytest.mark.parametrize("check", USUAL, ids=lambda check: check.__name__)
def test_the_contract(file: Path, check: Check) -> None:
    check(subject(file.stem))


@pytest.mark.parametrize("file", once_per_class(FILES))
def test_unknown_settings_get_the_nearest_name(file: Path) -> None:
    policy = build(node("policy", "gaussian"), Policy, spec=SPEC)
    made = node("learner", file.stem)
    known = "batch_size" if "batch_size" in complete(made) else "horizon"
    wrong = known.replace("z", "s")
    with pytest.raises(ConfigError) as error:
        build(made | {wrong: ROWS}, Learner, policy=policy, spec=SPEC, run=RunPlan(100))
    assert (error.value.key, error.value.hint) == (wrong, known)
