"""Task: one of OGBench's single tasks, so that the seed decides the whole episode.

The package steps twice with unseeded random actions while it resets a manipulation scene, and the
solver's start and the contact forces of these steps reach the first observation. Here they are
cleared. Each env has a generator of its own behind `numpy.random`, which the package uses too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import mujoco
import numpy as np
from ogbench.manipspace.envs.manipspace_env import ManipSpaceEnv


class Task(gymnasium.Env[Any, Any]):
    """A manipulation scene or a maze, made by the package."""

    def __init__(self, made: gymnasium.Env[Any, Any]) -> None:
        self.made = made
        self.drawn = NumpyRandom()
        self.metadata = made.metadata
        self.render_mode = made.render_mode
        self.action_space = made.action_space
        self.observation_space = made.observation_space

    @property
    def dt(self) -> float:
        """Seconds per step."""
        made: Any = self.made.unwrapped
        return float(made.control_timestep() if is_scene(made) else made.dt)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.drawn.seed(seed)
        with self.drawn.used():
            obs, info = self.made.reset(seed=seed, options=options)
        return (cleared(self.made.unwrapped) if is_scene(self.made.unwrapped) else obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.made.step(action)

    def render(self) -> Any:
        return self.made.render()

    def close(self) -> None:
        self.made.close()


def is_scene(env: Any) -> bool:
    """Whether it is a manipulation scene (else a maze)."""
    return isinstance(env, ManipSpaceEnv)


def cleared(scene: Any) -> Any:
    """The observation of a scene at time 0, without traces of earlier steps."""
    data = scene._data
    data.time = 0.0
    data.ctrl[:] = 0.0
    data.qacc_warmstart[:] = 0.0
    mujoco.mj_forward(scene._model, data)
    mujoco.mj_rnePostConstraint(scene._model, data)
    return scene.compute_observation()


class NumpyRandom:
    """A state of `numpy.random` of one's own."""

    def __init__(self) -> None:
        self._state: Any = np.random.RandomState().get_state()

    def seed(self, seed: int) -> None:
        """Begin at `seed`."""
        self._state = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def used(self) -> Iterator[None]:
        """`numpy.random` draws from this state inside, and is as it was outside."""
        outside: Any = np.random.get_state()
        np.random.set_state(self._state)
        try:
            yield
        finally:
            self._state = np.random.get_state()
            np.random.set_state(outside)
