"""The Gymnasium ids that settings may name: "package.module:Name-v0" imports the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodied.core.build import require_allowed

PREFIX = "python/"
"""Of ids that stand for objects of a Python program (`embodied.envs.gym_object`)."""


def require_known_id(name: str, kwargs: Mapping[str, Any]) -> None:
    """ConfigError if `gymnasium.make(name, **kwargs)` would import a module that is not in an
    allowed package; adapters of older versions take another id in `env_id`."""
    for text in (name, str(kwargs.get("env_id", ""))):
        module, colon, _ = text.partition(":")
        if colon:
            require_allowed(module, f"the module of the environment {text}")
