"""Gymnasium environments that a Python program gives as objects, registered with Gymnasium.

An object becomes the id "python/NAME-v0", so that every setting that takes an id takes it too. The
id exists in this process only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import gymnasium

from embodied.core.build import ConfigError
from embodied.envs.spaces import PREFIX


def register(given: gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]]) -> str:
    """The id of `given`: one environment, or a function (or class) that makes one.

    Of one environment, the first parallel env is the object itself and the others are copies.
    ConfigError if that object cannot be copied.
    """
    maker = _Copies(given) if isinstance(given, gymnasium.Env) else given
    name = getattr(given, "__name__", type(given).__name__)
    if isinstance(given, gymnasium.Env):
        name = type(given.unwrapped).__name__
    text = f"{PREFIX}{re.sub('[^A-Za-z0-9_]', '', name) or 'Env'}-v0"
    gymnasium.registry.pop(text, None)  # the newest object of a name counts
    gymnasium.register(text, entry_point=lambda **_: maker(), order_enforce=False)
    return text


class _Open(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that stays open: it belongs to the user."""

    def close(self) -> None:
        """Nothing: who made it closes it."""


class _Copies:
    """Makes the environment itself, which its user closes, then copies of it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.used = False

    def __call__(self) -> gymnasium.Env[Any, Any]:
        if not self.used:
            self.used = True
            return _Open(self.env)
        try:
            return copy.deepcopy(self.env)
        except Exception as error:  # any object inside may refuse
            raise ConfigError(
                f"{type(self.env.unwrapped).__name__} cannot be copied ({error}); give a function "
                "that makes it: env=lambda: MyEnv()"
            ) from error
