"""Environment YAMLs keep the contract: the checks of `embodied check env`."""

from __future__ import annotations

import pytest

from embodied.checks.check import Check
from embodied.checks.env import CHECKS, EnvSubject
from embodied.core.errors import NotApplicable


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(env_subject: EnvSubject, check: Check) -> None:
    try:
        check(env_subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))
