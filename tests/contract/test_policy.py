"""Policies in configs/policy keep the contract: the checks of `embodied check policy`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from embodied.checks.check import Check
from embodied.checks.policy import (
    CHECKS,
    SPECS,
    PolicySubject,
    a_saved_policy_acts_bit_for_bit,
    actions_have_shape_and_range,
    observations_matter,
)
from embodied.core.errors import NotApplicable
from tests.tiers import once_per_class, usually

FILES = sorted((Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml"))
# The rest of what cameras and symbols add is in tests/policies/test_encoders.py.
CASES = [(spec, check) for spec in SPECS for check in CHECKS]
SEEN = (actions_have_shape_and_range, observations_matter, a_saved_policy_acts_bit_for_bit)
USUAL = [(spec, check) for spec, check in CASES if spec == "state" or check in SEEN]


def name_of(value: str | Check) -> str:
    return value if isinstance(value, str) else value.__name__


def test_there_are_policies() -> None:
    assert {"gaussian", "diffusion", "flow"} <= {path.stem for path in FILES}


@pytest.mark.parametrize(("spec", "check"), usually(USUAL, CASES), ids=name_of)
@pytest.mark.parametrize("file", once_per_class(FILES))
def test_the_contract(file: Path, spec: str, check: Check) -> None:
    try:
        check(PolicySubject(yaml.safe_load(file.read_text()), SPECS[spec]))
    except NotApplicable as reason:
        pytest.skip(str(reason))
