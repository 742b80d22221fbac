"""Policies in configs/policy keep the contract: the checks of `embodied check policy`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from embodied.checks.check import Check
from embodied.checks.policy import CHECKS, SPECS, PolicySubject
from embodied.core.errors import NotApplicable
from tests.tiers import once_per_class

FILES = sorted((Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml"))


def test_there_are_policies() -> None:
    assert {"gaussian", "diffusion", "flow"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("file", once_per_class(FILES))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(file: Path, spec: str, check: Check) -> None:
    try:
        check(PolicySubject(yaml.safe_load(file.read_text()), SPECS[spec]))
    except NotApplicable as reason:
        pytest.skip(str(reason))
