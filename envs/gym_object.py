"""Gymnasium environments that a Python program gives as objects, registered with Gymnasium.

An object becomes the id "python/NAME-v0", so that every setting that takes an id takes it too. The
id exists in this process only.
"""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium

from embodied.core.build import ConfigError
from embodied.core.native import OBJECT_PREFIX


def register(given: Any) -> str:
    """The id of `given`: one environment, or a function (or class) that makes one, or a list of
    these, which are made in turn (also those of a Gymnasium vector environment).

    Of one environment, the first parallel env is the object itself and the others are copies.
    ConfigError if that object cannot be copied, and for what is not one environment.
    """
    makers = itertools.cycle([_maker(each) for each in several(given) or [given]])
    name = getattr(given, "__name__", type(given).__name__)
    if isinstance(given, gymnasium.Env):
        name = type(given.unwrapped).__name__
    text = f"{OBJECT_PREFIX}{re.sub('[^A-Za-z0-9_]', '', name) or 'Env'}-v0"
    gymnasium.registry.pop(text, None)  # the newest object of a name counts
    gymnasium.register(text, entry_point=lambda **_: _one(next(makers)()), order_enforce=False)
    return text


def several(given: Any) -> Sequence[Any] | None:
    """The environments, or the functions that make them, of a list or a vector environment; None of
    a single one."""
    functions = getattr(given, "env_fns", given)
    return functions if isinstance(functions, list | tuple) and functions else None


def _maker(given: Any) -> Callable[[], Any]:
    if isinstance(given, gymnasium.Env):
        return _Copies(given)
    if callable(given) and not (isinstance(given, type) and not issubclass(given, gymnasium.Env)):
        return given
    raise ConfigError(_instead(given))


def _one(made: Any) -> gymnasium.Env[Any, Any]:
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(_instead(made))
    return made


def _instead(given: Any) -> str:
    """What `given` is, which is not one Gymnasium environment, and what to give instead."""
    kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    number = getattr(given, "num_envs", None)
    if hasattr(given, "possible_agents"):
        return (
            f"env is {kind} of several agents, and one policy acts here: give a gymnasium.Env in "
            "which one of them acts"
        )
    if isinstance(number, int):
        return (
            f"env is {kind} of {number} environments: give a function that makes one of them, "
            f"env=lambda: gymnasium.make(ID), and num_envs={number}"
        )
    if hasattr(given, "reset") and hasattr(given, "step"):
        return f"env is {kind}, which is no gymnasium.Env: derive its class from gymnasium.Env"
    return (
        f"env is {kind}: give a name (em.list('env')), a Gymnasium id, a gymnasium.Env, or a "
        "function that makes one"
    )


class _Open(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that stays open: it belongs to the user."""

    opened: ClassVar[weakref.WeakSet[_Open]] = weakref.WeakSet()

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.opened.add(self)

    def close(self) -> None:
        """Give it back: who made it closes it."""
        self.opened.discard(self)


class _Copies:
    """Makes the environment itself, which its user closes; copies of it while it is in use."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env

    def __call__(self) -> gymnasium.Env[Any, Any]:
        if all(each.env is not self.env for each in _Open.opened):
            return _Open(self.env)
        try:
            return copy.deepcopy(self.env)
        except Exception as error:  # any object inside may refuse
            raise ConfigError(
                f"{type(self.env.unwrapped).__name__} cannot be copied ({error}); give a function "
                "that makes it, env=lambda: MyEnv(), or train in it alone: num_envs=1"
            ) from error
