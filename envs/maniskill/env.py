"""ManiSkill: registered ManiSkill tasks as a VecEnv, on the CPU or as one batch on a GPU.

Source: ManiSkill 3 (Tao et al., 2024). The inner environment is stepped without ManiSkill's time
limit and vector wrapper, so that the true successor state is available before finished envs are
reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero
from embodied.core.device import pick_device
from embodied.core.env import NotFinite, NotSavable, StateRoles, Step, VecEnv, require_finite
from embodied.core.native import Native
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.envs.maniskill.factory import Settings, horizon_of, task_text
from embodied.envs.maniskill.observations import leaves
from embodied.envs.maniskill.pool import Batch, Pool, Rows
from embodied.envs.spaces import action_of

Obs = Literal["state", "state_dict", "rgb", "rgbd", "pointcloud"]


@dataclass(frozen=True)
class Config:
    """Settings of a ManiSkill task.

    `end_on_success` is off by default, as in the evaluation of ManiSkill's baselines: dense rewards
    are largest after success, so ending there would penalise it.
    """

    id: str  # of a registered ManiSkill task
    num_envs: Count = 1  # parallel environments
    obs: Obs = "state"  # what is observed
    control_mode: str | None = None  # what actions mean (null: the robot's default)
    reward: Literal["dense", "normalized_dense", "sparse"] = "normalized_dense"  # its kind
    backend: Literal["auto", "cpu", "gpu"] = "auto"  # simulator (auto: the GPU for many envs)
    workers: CountOrZero = 0  # processes of CPU environments (0: none)
    horizon: Count | None = None  # steps of an episode (null: the task's limit)
    end_on_success: bool = False  # ManiSkill's success and failure terminate the episode
    image_size: tuple[Count, Count] | None = None  # height, width in pixels (null: the task's)
    cameras: tuple[str, ...] = ()  # observation cameras to keep (empty: all)
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for `gymnasium.make`
    text: str = ""  # task instruction as a sentence


class ManiSkill(VecEnv):
    """ManiSkill tasks. CPU envs are separate environments, env i seeded with (seed, i); they are
    saved as the actions of the episode to replay (to the bit: `pool.py`). GPU envs share a
    generator and cannot be saved.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_envs = config.num_envs
        horizon = config.horizon or horizon_of(config.id)
        if horizon is None:
            raise ValueError(f"{config.id} has no registered time limit; set env.horizon (steps)")
        cuda = torch.cuda.is_available()
        if config.backend == "gpu" and not cuda:
            raise ValueError("backend=gpu needs an NVIDIA GPU that torch can use; use backend=cpu")
        on_gpu = config.backend == "gpu" or (
            config.backend == "auto" and cuda and config.num_envs > 1
        )
        settings = Settings(
            id=config.id,
            obs=config.obs,
            control_mode=config.control_mode,
            reward=config.reward,
            backend="gpu" if on_gpu else "cpu",
            image_size=config.image_size,
            cameras=tuple(config.cameras),
            horizon=horizon,
            end_on_success=config.end_on_success,
            kwargs=dict(config.kwargs),
        )
        self.horizon = settings.horizon
        self.on_gpu = settings.backend == "gpu"
        self.device = pick_device("cuda" if self.on_gpu else "cpu")
        self.rows = _rows(settings, config)
        space, obs, names, period = self.rows.about()
        self._action = action_of(space, config.id)
        seen = [name for name in obs if name.startswith("sensor_data_")]
        for camera in config.cameras:
            if not any(name.startswith(f"sensor_data_{camera}_") for name in seen):
                raise ValueError(f"{config.id} with obs={config.obs} has no camera {camera!r}")
        self.spec = Spec(
            obs=leaves(obs, names),
            act=self._action.leaf,
            dt=period,
            text=config.text or task_text(config.id),
            native=Native((), self._action).to_json(),
        )
        self._count = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._seeds: dict[int, tuple[int, int] | None] = {r: (0, r) for r in range(self.num_envs)}
        self._now: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        if task is not None:
            raise ValueError(f"{self.config.id} has no task vector; call reset without `task`")
        if mask is not None and not self._now:
            raise ValueError("the first reset must reset every env; call reset without `mask`")
        chosen = range(self.num_envs) if mask is None else mask.nonzero().flatten().tolist()
        if seed is not None:
            self._seeds |= {row: (seed, row) for row in chosen}
        if chosen:
            fresh = self._begin(list(chosen))
            self._now = fresh if mask is None else self._replaced(self._now, list(chosen), fresh)
        return self._now

    def step(self, action: Tensor) -> Step:
        if not self._now:
            raise RuntimeError(f"{self.config.id}: call reset() before step()")
        following, told = self.rows.step(self._sent(action))
        require_finite(told["reward"], following, self.config.id)
        self._count += 1
        terminated = told["terminated"]
        truncated = (self._count >= self.horizon) & ~terminated
        ended = (terminated | truncated).nonzero().flatten().tolist()
        self._now = following
        if ended:
            self._now = self._replaced(following, ended, self._begin(ended))
        return Step(
            obs=self._now,
            next_obs=following,
            reward=told["reward"],
            terminated=terminated,
            truncated=truncated,
            log={key[4:]: value for key, value in told.items() if key.startswith("log/")},
        )

    @property
    def state_roles(self) -> StateRoles:
        raise NotSavable(
            f"{self.config.id} restores a state by repeating its episode from the start, so its "
            "clock cannot begin anew there"
        )

    def get_state(self) -> Tensors:
        if not self._now:
            raise RuntimeError(f"{self.config.id}: call reset() before get_state()")
        if isinstance(self.rows, Batch):
            raise NotSavable(
                f"{self.config.id} on the GPU cannot save its contacts; use backend=cpu"
            )
        state = {key: torch.from_numpy(value) for key, value in self.rows.read().items()}
        return state | {f"obs/{key}": value.clone() for key, value in self._now.items()}

    def set_state(self, state: Tensors) -> Tensors:
        if isinstance(self.rows, Batch):
            raise NotSavable(f"{self.config.id} on the GPU cannot load a state; use backend=cpu")
        self.rows.write({k: v.numpy() for k, v in state.items() if not k.startswith("obs/")})
        self._count = state["count"].clone()
        self._seeds = {}
        self._now = {name: state[f"obs/{name}"].clone() for name in self.spec.obs}
        return self._now

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return self.rows.draw(self._checked(row), width, height)

    def describe(self, row: int = 0) -> str:
        return f"{self.spec.text}: {self.rows.tell(self._checked(row))}"

    def sub_scene(self, row: int = 0) -> Any:
        """The live SAPIEN scene of one env; not available for envs in worker processes."""
        self._checked(row)
        if isinstance(self.rows, Pool):
            raise ValueError(
                "the scene of an env in a worker process cannot be accessed; set workers=0"
            )
        if isinstance(self.rows, Rows):
            return self.rows.rows[row].env.scene.sub_scenes[0]
        self.rows.env.scene.px.sync_poses_gpu_to_cpu()
        return self.rows.env.scene.sub_scenes[row]

    def close(self) -> None:
        self.rows.close()

    def _checked(self, row: int) -> int:
        if not 0 <= row < self.num_envs:
            raise ValueError(f"there is no env {row}; envs are 0 to {self.num_envs - 1}")
        return row

    def _begin(self, rows: list[int]) -> Tensors:
        """New episodes: the first of a new seed, else the env's next."""
        self._count[rows] = 0
        return self.rows.reset({row: self._seeds.pop(row, None) for row in rows})

    def _replaced(self, obs: Tensors, rows: list[int], fresh: Tensors) -> Tensors:
        index = torch.tensor(rows, device=self.device)
        return {key: value.index_copy(0, index, fresh[key]) for key, value in obs.items()}

    def _sent(self, action: Tensor) -> Any:
        """The action for the rows: on the GPU where they are, else an array."""
        if not torch.isfinite(action).all():
            raise NotFinite(f"{self.config.id}: the action is not finite; the run stops here")
        if self.on_gpu:
            return action
        return np.ascontiguousarray(action.detach().numpy(), np.float32)


def _rows(settings: Settings, config: Config) -> Rows | Pool | Batch:
    if settings.backend == "gpu":
        return Batch(settings, config.num_envs)
    workers = min(config.workers, config.num_envs)
    return (
        Pool(settings, config.num_envs, workers) if workers > 1 else Rows(settings, config.num_envs)
    )
