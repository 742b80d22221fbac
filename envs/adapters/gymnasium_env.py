"""GymView: presents a VecEnv with one env as a Gymnasium environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors
from embodied.envs.gym import Gym
from embodied.envs.spaces import space_of


class GymView(gymnasium.Env):
    """A VecEnv with `num_envs` 1 with `reset() -> (obs, info)` and the five results of
    `step(action)`.

    Observations are a Dict of arrays, or a single array if there is one leaf and `flat` is true.
    What only critics may see (`critic/`, `privileged/`) is left out unless `asymmetric`: a policy
    of another library would use it.
    `info["is_success"]` (bool) is in every step of an environment that reports success.
    `render_mode="rgb_array"` renders `width` x `height` pixels.
    """

    def __init__(
        self,
        env: VecEnv,
        flat: bool = True,
        render_mode: str | None = None,
        width: int = 320,
        height: int = 240,
        asymmetric: bool = False,
    ) -> None:
        if env.num_envs != 1:
            raise ValueError(f"GymView needs an env with num_envs=1, got num_envs={env.num_envs}")
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / env.spec.dt)}
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; use 'rgb_array' or None")
        self.env = env
        self.render_mode = render_mode
        self._size = (width, height)
        self.names = tuple(name for name in env.spec.obs if asymmetric or not hidden(name))
        self.observation_space = obs_space(env.spec, self.names, flat)
        self.action_space = space_of(env.spec.act)
        self._flat = not isinstance(self.observation_space, spaces.Dict)
        self._obs: Tensors | None = None
        self._begun = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; `options={"task": [D] numbers in [0, 1]}` fixes its task vector."""
        super().reset(seed=seed)
        task = (options or {}).get("task")
        # After the end of an episode the env has already been reset: return its first observation.
        if self._obs is None or not self._begun or seed is not None or task is not None:
            wanted = None if task is None else torch.as_tensor(task, dtype=torch.float32)[None]
            self._obs = self.env.reset(seed=seed, task=wanted)
        self._begun = False
        return self._shown(self._obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._obs is None or self._begun:
            raise ResetNeeded("no episode is running; call reset() before step()")
        result = self.env.step(batched(action, self.env.spec))
        self._obs = result.obs
        self._begun = bool(result.ended[0])
        info: dict[str, Any] = {name: value[0].item() for name, value in result.log.items()}
        if "success" in info:
            info["is_success"] = bool(info.pop("success"))
        return (
            self._shown(result.next_obs),
            float(result.reward[0]),
            bool(result.terminated[0]),
            bool(result.truncated[0]),
            info,
        )

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        return self.env.render(0, *self._size).numpy()

    def close(self) -> None:
        self.env.close()

    def _shown(self, obs: Tensors) -> Any:
        arrays = {name: obs[name][0].numpy().copy() for name in self.names}
        return next(iter(arrays.values())) if self._flat else arrays


def native_view(env: VecEnv) -> gymnasium.Env[Any, Any]:
    """The Gymnasium environment that `env` (with `num_envs` 1) adapts; a GymView of another one."""
    return env.envs[0] if isinstance(env, Gym) else GymView(env, render_mode="rgb_array")


def obs_space(spec: Spec, names: tuple[str, ...], flat: bool) -> spaces.Space:
    """The Gymnasium space of observations `names`; with `flat`, a single leaf stands for itself."""
    parts = {name: space_of(spec.obs[name]) for name in names}
    return next(iter(parts.values())) if flat and len(parts) == 1 else spaces.Dict(parts)


def batched(action: Any, spec: Spec) -> Tensor:
    """One action as the tensor [1, A] (int64 [1] where discrete) that a VecEnv takes."""
    dtype = torch.int64 if spec.act.dtype == "int64" else torch.float32
    return torch.as_tensor(np.asarray(action), dtype=dtype).reshape(1, *spec.act.shape)
