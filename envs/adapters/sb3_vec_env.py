"""VecView: presents a VecEnv of this project as a Stable-Baselines3 VecEnv."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

try:
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv as PeerVecEnv
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Stable-Baselines3 is not installed; type: pip install 'embodied-rl[dev]'",
        name="stable_baselines3",
    ) from error
from gymnasium import spaces

from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.envs.adapters.gymnasium_env import obs_space, shown_names
from embodied.envs.spaces import space_of


class VecView(PeerVecEnv):
    """All envs of a VecEnv; the info of finished episodes has `terminal_observation`,
    `TimeLimit.truncated` and, where success is reported, `is_success` (true if any step of the
    episode succeeded). What only critics may see is left out unless `asymmetric`.
    """

    def __init__(self, env: VecEnv, flat: bool = True, asymmetric: bool = False) -> None:
        self.env = env
        self.render_mode = None
        self.names = shown_names(env.spec, asymmetric)
        seen = obs_space(env.spec, self.names, flat)
        super().__init__(env.num_envs, seen, space_of(env.spec.act))
        self._flat = not isinstance(self.observation_space, spaces.Dict)
        self._discrete = env.spec.act.dtype == "int64"
        self._action = env.spec.act.zeros(env.num_envs)
        self._achieved = np.zeros(env.num_envs, np.bool_)

    def reset(self) -> Any:
        seed = self._seeds[0]
        self._reset_seeds()
        self._achieved[:] = False
        return self._shown(self.env.reset(seed=seed))

    def step_async(self, actions: np.ndarray) -> None:
        dtype = torch.int64 if self._discrete else torch.float32
        self._action = torch.as_tensor(actions, dtype=dtype)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        step = self.env.step(self._action)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if "success" in step.log:
            self._achieved |= step.log["success"].numpy()
        for row in np.flatnonzero(step.ended.numpy()):
            infos[row] = self._last_words(step, int(row))
        return self._shown(step.obs), step.reward.numpy().copy(), step.ended.numpy().copy(), infos

    def _last_words(self, step: Step, row: int) -> dict[str, Any]:
        final = {name: step.next_obs[name][row].numpy().copy() for name in self.names}
        info: dict[str, Any] = {
            "terminal_observation": next(iter(final.values())) if self._flat else final,
            "TimeLimit.truncated": bool(step.truncated[row]),
        }
        if "success" in step.log:
            info["is_success"] = bool(self._achieved[row])
            self._achieved[row] = False
        return info

    def _shown(self, obs: Tensors) -> Any:
        arrays = {name: obs[name].numpy().copy() for name in self.names}
        return next(iter(arrays.values())) if self._flat else arrays

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * len(self._rows(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("VecView cannot set attributes of single envs; set them on `env`")

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        raise NotImplementedError("VecView cannot call methods of single envs; call them on `env`")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * len(self._rows(indices))

    def _rows(self, indices: int | Iterable[int] | None) -> Sequence[int]:
        if indices is None:
            return range(self.num_envs)
        return [indices] if isinstance(indices, int) else list(indices)
