"""What a Python program gives, as the words of a command line; classes, objects and functions get a
name in this process. `edge`: mistakes in one line, answers to words of other libraries."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError, give
from embodied.core.policy import Policy
from embodied.core.reward import Reward
from embodied.core.tensors import Tensors
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.learners.learner import Learner
from embodied.mistakes import answer, mistake
from embodied.teachers.teacher import Curriculum, Teacher

P = ParamSpec("P")
R = TypeVar("R")
OPTIONS = Path(__file__).parent / "options"
"""YAML of options that only Python can choose."""
Choice: TypeAlias = "str | Mapping[str, Any] | type | Any"
"""The name of an option, or the class, object or function itself; or a mapping with such a `name`
and settings."""
GROUPS = ("finetune", "reward", "teacher", "replay", "weighting", "demonstrator")
"""Settings that are chosen by name."""
ROLES = {"policy": Policy, "learner": Learner, "reward": Reward, "teacher": Curriculum}
"""The classes of what may be given itself."""


def edge(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what users call: a mistake is raised from here, without the traceback inside."""
    name, own = function.__name__, inspect.signature(function).parameters
    of_parts = name in ("make_policy", "make_learner")  # what keywords are settings of

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for word in () if of_parts else kwargs.keys() - own.keys():
                if ours := answer("keywords", f"{name}.{word}") or answer("keywords", word):
                    raise ConfigError(f"{name}({word}=...){ours}", key=word)
            return function(*args, **kwargs)
        except Exception as error:
            if (line := mistake(error)) is None:
                raise
            if not isinstance(error, OSError):
                error.args = (line,)
            if isinstance(error, ImportError):
                error.msg = line
            raise error.with_traceback(None) from None

    return called


def named(chosen: Mapping[str, Any], group: str) -> tuple[Any, dict[str, Any]]:
    """The `name` in a mapping, and the settings beside it."""
    if "name" not in chosen:
        raise ConfigError(f'{group} needs a name: {group}={{"name": NAME, ...}}')
    return chosen["name"], {key: value for key, value in chosen.items() if key != "name"}


def as_words(prefix: str, settings: Mapping[str, Any]) -> list[str]:
    """`{"lr": 1e-3, "net": {"hidden": [64]}}` below "learner" as `learner.lr=0.001 ...`."""
    words: list[str] = []
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value:
            words += as_words(name, cast(Mapping[str, Any], value))
        else:
            words.append(f"{name}={_written(value, name)}")
    return words


def _written(value: Any, name: str) -> str:
    """The value of the setting `name` in Hydra's syntax."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | Path):
        plain = str(value) and all(c.isalnum() or c in "_-./" for c in str(value))
        # Quoted: commas, spaces and braces have a meaning in Hydra.
        return str(value) if plain else json.dumps(str(value))
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(each, name) for each in cast(list[Any], value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return "{" + ",".join(f"{key}:{_written(each, name)}" for key, each in pairs) + "}"
    if callable(value):
        return give(value, name)
    if (folder := getattr(value, "folder", None)) is not None:  # an agent, by its run
        return _written(folder, name)
    raise ConfigError(f"{name} is a {type(value).__name__}: give a number, a text or a folder")


def choice_words(group: str, chosen: Choice) -> list[str]:
    """The words of a command line that choose an option of `group` and its settings."""
    settings: dict[str, Any] = {}
    if isinstance(chosen, Mapping):
        chosen, settings = named(cast(Mapping[str, Any], chosen), group)
    if isinstance(chosen, str):
        return [f"{group}={chosen}", *as_words(group, settings)]
    name = give(_part(group, chosen), group)
    return [f"{group}=python", f"{group}._target_={name}", *as_words(group, settings)]


def is_network(policy: Any) -> bool:
    """Whether `policy` is a torch module, or a class or function that makes one."""
    kind = policy if inspect.isclass(policy) else type(policy)
    return callable(policy) and not issubclass(kind, Policy | Learner)


def _of_function(group: str, function: Callable[..., Any]) -> type[Any]:
    """The class of a part whose work `function` does."""

    class FunctionReward(Reward):
        frozen = True

        def __call__(self, transitions: Tensors) -> Tensor:
            usual = transitions["reward"]
            return torch.as_tensor(function(transitions)).to(usual).view_as(usual)

    class FunctionTeacher(Teacher):
        def propose(self, n: int) -> list[tuple[Any, Any]]:
            points = np.reshape(function(n, self.random), (n, len(self.space)))
            return [(point, None) for point in points]

        def learn(self, points: Any, scores: Any, memos: list[Any]) -> None:
            """Scores change nothing."""

    class FunctionLoss(BehaviorCloning):
        def loss(self, batch: Tensors) -> Tensor:
            return function(self.online, batch)

    return {"reward": FunctionReward, "teacher": FunctionTeacher, "learner": FunctionLoss}[group]


def _part(group: str, chosen: Any) -> Any:
    """What settings of `group` can name: a class or an object of its role."""
    role: Any = ROLES.get(group)
    kind = chosen if inspect.isclass(chosen) else type(chosen)
    if role in kind.__mro__:
        return chosen
    if role not in (None, Policy) and callable(chosen) and kind is not chosen:
        return _of_function(group, chosen)
    what = f"the class {kind.__name__}" if kind is chosen else kind.__name__
    more = "" if role is None else f", or a {role.__name__} (class or object), or a function"
    raise ConfigError(
        f"{group} is {what}: give a name (em.list({group!r})), a mapping with a name{more}"
    )


def settings_words(settings: Mapping[str, Any]) -> list[str]:
    """The words of the other settings of a command."""
    words: list[str] = []
    for key, value in settings.items():
        chosen = key in GROUPS and value is not None
        words += choice_words(key, value) if chosen else as_words("", {key: value})
    return words
