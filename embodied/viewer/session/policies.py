"""Policies to choose from: a run's checkpoints, the environment's demonstrator, random, zero."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.checkpoint import load_policy
from embodied.core.config_fields import complete
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.viewer.run_folder import Run

WHICH = ("task", "id")
"""Settings that select one of an environment class's variants."""


class ActionSource(Protocol):
    """What `Actor` offers: actions [1, A] for observations, with or without exploration noise."""

    explore: bool

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor: ...


@runtime_checkable
class HasState(Protocol):
    """An action source with a state (chunk, memory) that can be saved and restored."""

    def get_state(self) -> Tensors: ...

    def set_state(self, state: Tensors) -> None: ...


Choices = dict[str, Callable[[], ActionSource]]


class ZeroAction:
    """Always the zero action (the middle of every range; the first of discrete actions)."""

    explore = False

    def __init__(self, spec: Spec) -> None:
        self.action = spec.act.zeros(1)

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor:
        return self.action


def choices_for(env: VecEnv, run: Run | None) -> tuple[Choices, str]:
    """The policies for `env` by name, each loaded when first chosen, and the name of the initial
    one."""
    spec = env.spec
    found: Choices = {}
    if run is not None:
        for folder in run.checkpoints:
            found[label(folder)] = lambda folder=folder: Actor(
                load_policy(folder, spec), 1, run.execute
            )
    script = script_for(env)
    if script is not None:
        found["demonstrator"] = lambda: Actor(build(script, Policy, spec=spec), 1)
    random = {"_target_": "embodied.policies.random.Random"}
    found["random"] = lambda: Actor(build(random, Policy, spec=spec), 1)
    found["zero"] = lambda: ZeroAction(spec)
    return found, next(iter(found)) if run is None else label(run.chosen)


def label(checkpoint: Path) -> str:
    """The name of a checkpoint folder among the policies."""
    return f"checkpoint {checkpoint.name}"


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
