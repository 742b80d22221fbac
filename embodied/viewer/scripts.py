"""The scripted demonstrators that belong to an environment, by the names in `configs`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from embodied.core.env import VecEnv

WHICH = ("task", "id")
"""Settings that say which of its worlds an environment is."""


def script_for(env: VecEnv) -> dict[str, Any] | None:
    """The node of the demonstrator that has the name of this environment or of its task, whatever
    is wrapped around it."""
    while isinstance(inner := getattr(env, "env", None), VecEnv):
        env = inner
    target = f"{type(env).__module__}.{type(env).__name__}"
    config = getattr(env, "config", None)
    names: list[str] = []
    for name, node in _options("env").items():
        told = {key: node[key] for key in WHICH if key in node}
        mine = all(getattr(config, key, None) == value for key, value in told.items())
        if node.get("_target_") == target and mine:
            names += [name, *map(str, told.values())]
    scripts = _options("demonstrator")
    return next((scripts[name] for name in names if name in scripts), None)


def _options(group: str) -> dict[str, dict[str, Any]]:
    folder = files("configs") / group
    found = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    nodes = {name: yaml.safe_load((folder / name).read_text()) for name in found}
    return {name.removesuffix(".yaml"): node for name, node in nodes.items()}
