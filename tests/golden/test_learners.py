"""Every learner computes what it computed when `learners.json` was recorded.

Four updates from a fixed seed, then a fingerprint of all its parameters and buffers, without their
names: classes, modules and attributes may be renamed, arithmetic may not change.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.learners.learner import Learner, RunPlan
from tests.contract import test_learner as contract
from tests.golden import fingerprint

FILE = "learners.json"
UPDATES = 4
ALL = ("imitate",)  # learners that are recorded with every policy that they take
MORE = ("policy/diagonal_gaussian", "policy/recurrent")  # with every learner that takes them
RECORDED = fingerprint.read(FILE)


def make(stem: str, option: str) -> Learner:
    """The learner `configs/learner/STEM.yaml` of the policy or fine-tuner `option`."""
    group, name = option.split("/")
    settings = contract.node("learner", stem) | {"batch_size": contract.ROWS}
    if "horizon" in settings:
        settings["horizon"] = contract.HORIZON
    torch.manual_seed(0)
    if group == "policy":
        policy = build(contract.node(group, name), Policy, spec=contract.SPEC)
    else:
        policy = contract.steer(contract.CONFIGS / group / f"{name}.yaml")
    return build(settings, Learner, policy=policy, spec=contract.SPEC, run=RunPlan(100))


def state(stem: str, option: str) -> list[torch.Tensor]:
    """Everything that the learner has, after a few updates."""
    torch.set_num_threads(1)
    learner = make(stem, option)
    contract.updates(learner, 0, UPDATES)
    return list(learner.state_dict().values())


def record(stem: str, option: str) -> dict[str, Any]:
    return fingerprint.figures(state(stem, option))


def accepted(stem: str) -> list[str]:
    """The policies and fine-tuners that the learner takes."""
    found: list[str] = []
    for group, path in contract.candidates():
        option = f"{group}/{path.stem}"
        if not found or stem in ALL or option in MORE:
            try:
                make(stem, option)
            except ConfigError:
                continue
            found.append(option)
    return found


def records_of(stem: str) -> dict[str, Any]:
    """With the first option that the learner takes, and with those that matter to it besides."""
    first, *others = accepted(stem)
    records = {first: record(stem, first)}
    for option in others:
        try:
            records[option] = record(stem, option)
        except (NotImplementedError, LookupError, RuntimeError) as error:
            # It can be built with it, and not learn so.
            print(f"{stem} with {option} is not recorded: {error!r}")
    return records


def record_all() -> dict[str, Any]:
    return {stem: records_of(stem) for stem in contract.LEARNERS}


CASES = [(stem, option) for stem, kept in RECORDED["records"].items() for option in kept]


@pytest.mark.parametrize(("stem", "option"), CASES)
def test_a_learner_computes_what_it_did(stem: str, option: str) -> None:
    fingerprint.compare(state(stem, option), RECORDED["records"][stem][option], RECORDED)
