"""Environments of configs/env, one after the other: each is built once for the tests of all files.

A parametrized fixture of the session makes pytest run all tests of one environment together.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embodied.checks.env import EnvSubject
from embodied.core.env import VecEnv
from tests.contract.environments import FILES, SLOW, settings_of
from tests.tiers import once_per_class


@pytest.fixture(params=once_per_class(FILES, ["envpool_walker_walk"], SLOW), scope="session")
def env_subject(request: pytest.FixtureRequest) -> Iterator[EnvSubject]:
    """An environment YAML as `embodied check env` reads it."""
    node = settings_of(request.param)
    subject = EnvSubject(node, most_steps=200, most_seconds=2.0)
    yield subject
    subject.close()


@pytest.fixture(scope="session")
def env(env_subject: EnvSubject) -> VecEnv:
    """The environment, with two parallel envs."""
    return env_subject.env
