"""What a Python program gives, as the words of a command line: names, mappings with a name and
settings, and classes, objects and functions, which get a name in this process."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from embodied.core.build import ConfigError, give
from embodied.core.policy import Policy
from embodied.core.reward import Reward
from embodied.learners.learner import Learner
from embodied.teachers.teacher import Curriculum

OPTIONS = Path(__file__).parent / "options"
"""YAML of options that only Python can choose."""
Choice: TypeAlias = "str | Mapping[str, Any] | type | Any"
"""The name of an option ("sac"), a mapping with its `name` and settings, or the class, object or
function itself (also as the `name` in a mapping)."""
GROUPS = ("finetune", "reward", "teacher", "replay", "weighting", "demonstrator")
"""Settings that are chosen by name."""
ROLES: dict[str, type[Any]] = {
    "policy": Policy,
    "learner": Learner,
    "reward": Reward,
    "teacher": Curriculum,
}
"""The classes of what may be given itself."""
FUNCTIONS = {
    "policy": "of the network's numbers of inputs and outputs",
    "learner": "of a policy and a batch, that returns the loss",
    "reward": "of transitions",
    "teacher": "of the number of episodes and a generator, that returns points of the unit cube",
}


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
        text = str(value)
        plain = text and all(c.isalnum() or c in "_-./" for c in text)
        # Quoted: commas, spaces and braces have a meaning in Hydra.
        return text if plain else json.dumps(text)
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(each, name) for each in cast(list[Any], value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return "{" + ",".join(f"{key}:{_written(each, name)}" for key, each in pairs) + "}"
    if hasattr(value, "predict"):  # an agent, by its run
        if value.folder is None:
            raise ConfigError(f"{name} is an agent of no run: agent.save(FOLDER), {name}=FOLDER")
        return _written(value.folder, name)
    if callable(value):
        return give(value, name)
    raise ConfigError(f"{name} is a {type(value).__name__}: give a number, a text or a list")


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
    return callable(policy) and not issubclass(kind, Policy) and not hasattr(policy, "policy")


def _part(group: str, chosen: Any) -> Any:
    """What settings of `group` can name: a class or object of its role."""
    role = ROLES.get(group)
    kind = chosen if inspect.isclass(chosen) else type(chosen)
    if role is not None and role in kind.__mro__:
        return chosen
    if group in FUNCTIONS and group != "policy" and callable(chosen) and kind is not chosen:
        from embodied.api.functions import as_part

        return as_part(group, chosen)
    what = f"the class {kind.__name__}" if inspect.isclass(chosen) else kind.__name__
    more = ""
    if role is not None:
        more = f", a {role.__name__} (class or object), or a function {FUNCTIONS[group]}"
    raise ConfigError(
        f"{group} is {what}: give a name (em.list({group!r})), or a mapping with a name and "
        f"settings{more}"
    )


def settings_words(settings: Mapping[str, Any]) -> list[str]:
    """The words of the other settings of a command."""
    words: list[str] = []
    for key, value in settings.items():
        chosen = key in GROUPS and value is not None
        words += choice_words(key, value) if chosen else as_words("", {key: value})
    return words
