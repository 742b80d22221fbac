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
from embodied.core.build import resolve
from embodied.core.policy import Policy, PolicyWrapper
from embodied.learners.learner import Learner
from embodied.policies.steering.steered import Steered
from tests.tiers import once_per_class, usually

__all__ = [
    "HORIZON",
    "ROWS",
    "SPEC",
    "batch_for",
    "candidates",
    "segment",
    "updates",
]  # for other tests
CONFIGS = PACKAGED
# Agents with tables in lifetimes of symbols alone (tests/learners/test_groove.py), what lifetimes
# observe (test_meta_dt.py), models of facts (tests/models/test_nsam.py), trained runs
# (test_distill.py), labelled clouds (test_m2t2.py), and a past (test_hib.py).
APART = ("distill", "groove", "hib", "m2t2", "meta_dt", "prompt_dt", "ramp", "rma")
FILES = sorted(file for file in (PACKAGED / "learner").glob("*.yaml") if file.stem not in APART)
LEARNERS = [file.stem for file in FILES]
# An exact resume needs the seed to decide.
USUAL = usually({*CHECKS} - {checks.the_seed_decides}, CHECKS)


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
