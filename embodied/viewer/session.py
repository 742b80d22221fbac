"""One episode after another, of one environment row and whoever acts in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import build, nearest
from embodied.core.checkpoint import load_policy
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.viewer.launch import Run, ViewerError
from embodied.viewer.scripts import script_for

CURVES = 8
"""Elements of an action or observation in a plot: more cannot be told apart."""


class Acts(Protocol):
    """What `Actor` offers: actions [1, A] for observations, with or without exploration."""

    explore: bool

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor: ...


class Still:
    """Always the zero action (the middle of every range; the first of discrete actions)."""

    explore = False

    def __init__(self, spec: Spec) -> None:
        self.action = spec.act.zeros(1)

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor:
        return self.action


@dataclass(slots=True)
class Episode:
    """What has happened since the start that `seed` gives; `end` says how it ended, if it did.

    `seen` holds, by name, the first elements of what each action led to.
    """

    seed: int
    rewards: list[float] = field(default_factory=list)
    actions: list[list[float]] = field(default_factory=list)
    seen: dict[str, list[list[float]]] = field(default_factory=dict)
    success: bool | None = None
    end: str = ""

    @property
    def steps(self) -> int:
        return len(self.rewards)


class Session:
    """Steps row 0 of `env`; every episode starts from a seed of its own, the one after the last.

    `choices` names who may act; each is made when it is first chosen. `task` [D] in [0, 1] fixes
    the task vector of all episodes (None: drawn anew for each).
    """

    def __init__(self, env: VecEnv, choices: Mapping[str, Callable[[], Acts]], chosen: str) -> None:
        self.env, self.choices, self.explore = env, choices, False
        self.made: dict[str, Acts] = {}
        self.task: Tensor | None = None
        self.choose(chosen)
        self.episode = Episode(0)
        self.obs: Tensors = {}
        self.shown: Tensors = {}
        self.curves = [name for name, leaf in env.spec.obs.items() if is_curve(leaf)]
        self.first = torch.ones(1, dtype=torch.bool)

    def choose(self, name: str) -> None:
        """Let `name` act from the next step on, as if its episode began there."""
        if name not in self.choices:
            raise ViewerError(f'there is no policy "{name}"{nearest(name, self.choices)}')
        if name not in self.made:
            self.made[name] = self.choices[name]()
        self.acts, self.chosen = self.made[name], name
        self.first = torch.ones(1, dtype=torch.bool)

    def begin(self, seed: int) -> None:
        """Start the episode that `seed` (and `task`, where it is fixed) gives."""
        torch.manual_seed(seed)
        task = None if self.task is None else self.task[None]
        self.obs = self.env.reset(seed, task)
        self.shown = self.obs
        self.first = torch.ones(1, dtype=torch.bool)
        self.episode = Episode(seed, seen={name: [] for name in self.curves})

    def advance(self) -> None:
        """One control step; after the end of an episode, the start of the next one instead."""
        if self.episode.end:
            return self.begin(self.episode.seed + 1)
        self.acts.explore = self.explore
        action = self.acts(self.obs, self.first)
        step = self.env.step(action)
        # At the end of an episode, what it led to, not the next start.
        self.obs, self.shown, self.first = step.obs, step.next_obs, step.ended
        episode = self.episode
        episode.rewards.append(float(step.reward[0]))
        episode.actions.append(action[0].float().reshape(-1).tolist())
        for name, values in episode.seen.items():
            values.append(firsts(step.next_obs[name]))
        if "success" in step.log:
            episode.success = bool(episode.success) or bool(step.log["success"][0])
        if bool(step.ended[0]):
            episode.end = "ended" if bool(step.terminated[0]) else "out of time"

    @property
    def drawn_task(self) -> list[float] | None:
        """The running episode's task vector, where the environment shows it."""
        task = getattr(self.env, "task", None)
        if self.env.spec.task is None or task is None or len(task) != 1:
            return None if self.task is None else self.task.tolist()
        return [float(value) for value in task[0]]

    def describe(self) -> str:
        """The state in words, or nothing where the environment has none."""
        try:
            return self.env.describe(0)
        except NotImplementedError:
            return ""


def is_curve(leaf: Leaf) -> bool:
    """Whether a leaf is numbers over time, neither a picture nor points."""
    return len(leaf.shape) < 2 and leaf.size > 0


def firsts(value: Tensor) -> list[float]:
    """The first elements of row 0."""
    return value[0].reshape(-1)[:CURVES].float().tolist()


def choices_for(env: VecEnv, run: Run | None) -> tuple[dict[str, Callable[[], Acts]], str]:
    """Who may act in `env`: the run's checkpoints, the script for its task, random, nobody."""
    spec = env.spec
    found: dict[str, Callable[[], Acts]] = {}
    if run is not None:
        for folder in run.checkpoints:
            found[_label(folder.name)] = lambda folder=folder: Actor(
                load_policy(folder, spec), 1, run.execute
            )
    script = script_for(env)
    if script is not None:
        found["demonstrator"] = lambda: Actor(build(script, spec=spec), 1)
    random = {"_target_": "policies.random.Random"}
    found["random"] = lambda: Actor(build(random, spec=spec), 1)
    found["zero"] = lambda: Still(spec)
    return found, next(iter(found)) if run is None else _label(run.chosen.name)


def _label(checkpoint: str) -> str:
    return f"checkpoint {checkpoint}"
