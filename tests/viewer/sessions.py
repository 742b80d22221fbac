"""Sessions for tests."""

from __future__ import annotations

from embodied.core.env import VecEnv
from embodied.viewer.session.player import choices_for
from embodied.viewer.session.session import Session


def alone(env: VecEnv) -> Session:
    """A world without a run."""
    return Session(env, *choices_for(env, None))
