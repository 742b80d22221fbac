"""Finds the scripted demonstrator of an environment among the configurations."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from embodied.core.complete_node import complete
from embodied.core.env import VecEnv

WHICH = ("task", "id")
"""Settings that select one of an environment class's variants."""


def script_for(env: VecEnv) -> dict[str, Any] | None:
    """The configuration of the demonstrator with the name of this environment or of its task,
    ignoring wrappers; None if there is none."""
    while isinstance(inner := getattr(env, "env", None), VecEnv):
        env = inner
    target = f"{type(env).__module__}.{type(env).__name__}"
    config = getattr(env, "config", None)
    names: list[str] = []
    for name, text in _texts("env").items():
        if target not in text:
            continue  # most of them, and reading YAML takes its time
        node = complete(yaml.safe_load(text))
        told = {key: node[key] for key in WHICH if node.get(key) is not None}
        mine = all(getattr(config, key, None) == value for key, value in told.items())
        if node.get("_target_") == target and mine:
            names += [name, *map(str, told.values())]
    scripts = _texts("demonstrator")
    found = next((scripts[name] for name in names if name in scripts), None)
    return None if found is None else yaml.safe_load(found)


def _texts(group: str) -> dict[str, str]:
    folder = files("embodied.configs") / group
    found = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): (folder / name).read_text() for name in found}
