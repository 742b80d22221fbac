"""VectorView: presents a VecEnv as a Gymnasium vector environment, numpy in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from embodied.core.env import VecEnv
from embodied.core.native import Native, NativeAction
from embodied.core.tensors import Tensors
from embodied.envs.adapters.gymnasium_env import obs_space, shown_names
from embodied.envs.spaces import space_of


class VectorView(VectorEnv[Any, Any, Any]):
    """All envs of a VecEnv. Actions are those of the environment that it adapts, in its units, or
    in [-1, 1]; a single observation stands for itself, without its name.

    An env whose episode ended is already reset in what `step` returns (AutoresetMode.SAME_STEP);
    `info["final_obs"]` holds the true successors of all envs, `info["success"]` whether they
    succeeded. What only critics may see is left out.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        native = Native.of(env.spec)
        nested = native is None or not isinstance(native.act, NativeAction)
        self.act = None if nested else native.act
        self.names = shown_names(env.spec, asymmetric=False)
        self.single_observation_space = obs_space(env.spec, self.names, flat=True)
        own = space_of(env.spec.act) if self.act is None else native_space(self.act)
        self.single_action_space = own
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        rate = round(1 / env.spec.dt)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_fps": rate}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """New episodes; `options={"task": [B, D] numbers in [0, 1]}` fixes their task vectors."""
        task = (options or {}).get("task")
        wanted = None if task is None else torch.as_tensor(task, dtype=torch.float32)
        return self._shown(self.env.reset(seed, wanted)), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        act = self.env.spec.act
        if self.act is None:
            kind = torch.int64 if act.dtype == "int64" else torch.float32
            unit = torch.as_tensor(np.asarray(actions), dtype=kind).view(-1, *act.shape)
        else:
            unit = self.act.unit(actions)
        step = self.env.step(unit.to(self.env.device))
        info: dict[str, Any] = {name: value.cpu().numpy() for name, value in step.log.items()}
        if bool(step.ended.any()):
            info["final_obs"] = self._shown(step.next_obs)
        ends = (step.reward, step.terminated, step.truncated)
        return self._shown(step.obs), *(value.cpu().numpy().copy() for value in ends), info

    def render(self) -> tuple[Any, ...]:
        """A picture of each env, uint8 [height, width, 3]."""
        return tuple(self.env.render(row).numpy() for row in range(self.num_envs))

    def close(self, **kwargs: Any) -> None:
        self.env.close()

    def _shown(self, obs: Tensors) -> Any:
        arrays = {name: obs[name].cpu().numpy().copy() for name in self.names}
        single = not isinstance(self.single_observation_space, spaces.Dict)
        return next(iter(arrays.values())) if single else arrays


def native_space(act: NativeAction) -> spaces.Space[Any]:
    """The space of an action of the environment that an environment adapts."""
    if act.discrete:
        counts = [int(high - low) + 1 for low, high in zip(act.low, act.high, strict=True)]
        if not act.shape:
            return spaces.Discrete(counts[0], start=int(act.low[0]))
        shaped = np.reshape(counts, act.shape), np.reshape(act.low, act.shape).astype(np.int64)
        return spaces.MultiDiscrete(shaped[0], start=shaped[1])
    low, high = (np.reshape(end, act.shape).astype(act.dtype) for end in (act.low, act.high))
    return spaces.Box(low, high, act.shape, np.dtype(act.dtype).type)
