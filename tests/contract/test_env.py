"""Environment YAMLs keep the contract: the checks of `embodied check env`."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from embodied.checks.check import Check
from embodied.checks.env import CHECKS, EnvSubject
from embodied.core.errors import NotApplicable


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(
    env_subject: EnvSubject, check: Check, request: pytest.FixtureRequest
) -> None:
    many = request.config.getoption("--all") and "envpool" in str(env_subject.node["_target_"])
    try:
        if many:  # EnvPool keeps what it loads for each family
            number, sizes = CHECKS.index(check), (env_subject.most_steps, env_subject.most_seconds)
            apart = request.getfixturevalue("apart")
            apart.submit(checked, json.dumps(env_subject.node), number, *sizes).result()
        else:
            check(env_subject)
    except NotApplicable as reason:
        pytest.skip(str(reason))


def checked(node: str, number: int, most_steps: int, most_seconds: float) -> None:
    """Make a check in this process; its environment stays until another one is asked for."""
    CHECKS[number](subject(node, most_steps, most_seconds))


@lru_cache(1)
def subject(node: str, most_steps: int, most_seconds: float) -> EnvSubject:
    return EnvSubject(json.loads(node), most_steps, most_seconds)
