"""LeRobotEnv: a VecEnv as the Gymnasium environment that LeRobot's commands expect.

Observations are `agent_pos`, `pixels` ({name: image}) and `environment_state`, which LeRobot calls
observation.state, observation.images.NAME and observation.environment_state. LeRobot's EnvHub loads
the file `plugins/envhub/env.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied.core.env import VecEnv
from embodied.core.spec import hidden
from embodied.envs.adapters.gymnasium_env import GymView

Make = Callable[[], VecEnv]


class LeRobotEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The leaf `state` (or the first vector) is agent_pos, all other vectors together are
    environment_state. Where there is only one vector and no image, it is both: LeRobot's generative
    policies need one of the two beside agent_pos. What only critics may see is left out.

    `task`: the instruction in words. An episode ends after `episode_steps`."""

    def __init__(self, env: VecEnv, task: str, episode_steps: int) -> None:
        view = GymView(env, flat=False, render_mode="rgb_array")
        super().__init__(gymnasium.wrappers.TimeLimit(view, episode_steps))
        leaves = {n: leaf for n, leaf in env.spec.obs.items() if not hidden(n)}
        self.images = [name for name, leaf in leaves.items() if leaf.is_image]
        vectors = [name for name in leaves if name not in self.images]
        first = "state" if "state" in vectors else next(iter(vectors), None)
        self.own = [] if first is None else [first]
        others = [name for name in vectors if name not in self.own]
        self.others = others if others or self.images else self.own
        self.task = self.task_description = task
        self._max_episode_steps = episode_steps
        given: Any = self.env.observation_space
        parts: dict[str, spaces.Space[Any]] = {}
        for key, names in (("agent_pos", self.own), ("environment_state", self.others)):
            if names:
                size = sum(int(np.prod(given[name].shape)) for name in names)
                parts[key] = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        if self.images:
            parts["pixels"] = spaces.Dict({name: given[name] for name in self.images})
        self.observation_space = spaces.Dict(parts)

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**given)
        return self._shown(obs), {"is_success": False, **info}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        info = {"is_success": False, **info}
        return self._shown(obs), float(reward), terminated, truncated, info

    def _shown(self, obs: Any) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for key, names in (("agent_pos", self.own), ("environment_state", self.others)):
            if names:
                parts = [np.asarray(obs[name], np.float32).reshape(-1) for name in names]
                shown[key] = np.concatenate(parts)
        if self.images:
            shown["pixels"] = {name: obs[name] for name in self.images}
        return shown


def vector_env(
    make: Make, n_envs: int, use_async_envs: bool, task: str, episode_steps: int
) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """`n_envs` of the environment that `make` builds (num_envs=1), reset in the step that ends an
    episode; each in a process of its own with `use_async_envs`."""
    made = [lambda: LeRobotEnv(make(), task, episode_steps)] * n_envs
    kind = gymnasium.vector.AsyncVectorEnv if use_async_envs else gymnasium.vector.SyncVectorEnv
    return kind(made, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
