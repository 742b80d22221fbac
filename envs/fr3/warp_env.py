"""Fr3Warp: the tasks of `embodied.envs.fr3.env` in thousands of parallel envs, with MuJoCo Warp on
a GPU.

Tasks, controller, spec and reward are the code of the CPU version, run on torch tensors that share
Warp's memory; envs are reset without leaving the device. Each control step synchronises with the
device once, to check for non-finite values and for finished episodes. Physics is in single
precision, everything else in double.

On the CPU a seed gives bitwise equal runs. On a GPU MuJoCo Warp 4.0 finds contacts in arbitrary
order (its ordering option has no effect yet), so runs agree only up to rounding, which contacts
amplify.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Ranges
from embodied.core.device import pick_device
from embodied.core.env import NotFinite, StateRoles, Step, VecEnv, require_finite
from embodied.core.tensors import Tensors, where
from embodied.embodiments import cartesian_delta
from embodied.embodiments.cartesian_delta import CartesianDelta
from embodied.envs.fr3.base import (
    DT,
    RenderScene,
    TaskInstance,
    addresses,
    compile_scene,
    mocaps,
    stand,
    view_of,
)
from embodied.envs.fr3.tasks.task import View
from embodied.envs.mujoco.cameras import Cameras
from embodied.envs.mujoco.warp_batch import WarpBatch, tell_about_compiling
from embodied.envs.row_rng import RowRng

REFERENCE = ("place", "turn", "q", "width")


@dataclass(frozen=True)
class Config:
    """Settings as in `embodied.envs.fr3.env.Config`, without cameras."""

    task: str = "lift"  # which task of `embodied.envs.fr3.tasks`
    num_envs: Count = 64  # parallel environments
    reward: Literal["sparse", "shaped"] = "sparse"  # kind of the reward
    horizon: Count | None = None  # control steps of an episode, 20 Hz (null: the task's own)
    seed: CountOrZero = 0  # of the random numbers
    turning: Literal["none", "yaw", "full"] = "none"  # rotations of the hand that an action has
    ranges: Ranges = field(default_factory=dict)  # ranges of task parameters, by name
    device: str = "auto"  # auto (a GPU if available), cpu or cuda:0
    contacts: Count = 32  # capacity per environment, on average
    constraints: Count = 128  # capacity per environment, at most


class Fr3Warp(VecEnv):
    """B parallel FR3 robots with one of the tasks of `embodied.envs.fr3.tasks`, on one device.

    `batch.state` is the live simulation and may be written; `task` [B, D] are the task vectors,
    `memory` [B, ...] the controller's references and what the task drew for the episode.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = f"fr3_{config.task}_warp"
        self.given = TaskInstance(config.task, config.reward, config.ranges)
        self.what = self.given.task
        self.parameters = self.given.parameters
        self.controller = CartesianDelta(cartesian_delta.Config(turning=config.turning))
        self.spec = self.given.spec(self.controller)
        self.num_envs = config.num_envs
        self.horizon = self.what.horizon if config.horizon is None else config.horizon
        self.substeps = round(DT / self.what.timestep)
        self.model = compile_scene(self.what, pictures=False)
        self.batch = self._batch()
        self.device = self.batch.device
        self._free = addresses(self.model, self.what)
        self._markers = mocaps(self.model, self.what)
        self._drawn = RenderScene(self.what)
        self._cameras = Cameras((), 0)
        self.streams = RowRng(config.seed, self.num_envs, self.device)
        self.count = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        shape = (self.num_envs, len(self.parameters))
        self.task = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.memory: Tensors = {}
        self._obs: Tensors | None = None

    def _batch(self) -> WarpBatch:
        config = self.config
        device = str(pick_device(self.config.device))
        tell_about_compiling(self.name, device)
        half = {each.name: np.full(1, (each.low + each.high) / 2) for each in self.parameters}
        return WarpBatch(
            self.model,
            self.num_envs,
            device,
            contacts=config.contacts,
            constraints=config.constraints,
            varied=tuple({name for name, _ in self.what.shape(half)}),
        )

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if mask is not None:
            rows = mask.to(self.device, torch.bool)
        if self._obs is None and not rows.all():
            raise ValueError(f"{self.name}: the first reset must reset all envs (mask=None)")
        if seed is not None:
            self.streams.seed(seed, rows.nonzero().flatten())
        self._begin(rows, None if task is None else self._checked_task(task))
        fresh = self._observe(self.view())
        self._obs = fresh if self._obs is None else where(rows, fresh, self._obs)
        return self._obs

    def step(self, action: Tensor) -> Step:
        if self._obs is None:
            raise RuntimeError(f"{self.name}: call reset() before step()")
        shape = (self.num_envs, *self.spec.act.shape)
        if tuple(action.shape) != shape:
            raise ValueError(f"{self.name}: action is {tuple(action.shape)}, expected {shape}")
        act = action.detach().to(self.device, torch.float64).clamp(-1, 1)
        reference = {key: self.memory[key] for key in REFERENCE}
        measured = self.batch.state["qpos"][:, :7].double()
        joints, width, moved = self.controller(act, measured, reference)
        self.memory.update(moved)
        self.batch.state["ctrl"].copy_(torch.cat([joints, width[:, None] / 2], 1))
        self.batch.step(self.substeps)
        self.count = self.count + 1
        view = self.view()
        reward, won, log = self.given.judge(view)
        reward = reward.float()
        next_obs = self._observe(view)
        late = (self.count >= self.horizon) & ~won
        ended = won | late
        sane = torch.isfinite(next_obs["state"]).all() & torch.isfinite(reward).all()
        # The only synchronisation with the device per step.
        some, fine, lost = torch.stack([ended.any(), sane, self.batch.lost()]).tolist()
        if not fine or lost:
            # Raise the error of the step, with env indices and names.
            bad = ~torch.isfinite(action).all(1)
            if bad.any():
                rows = bad.nonzero().flatten().tolist()[:5]
                raise NotFinite(f"{self.name}: action is not finite in envs {rows}")
            if lost:
                raise RuntimeError(self.batch.why_lost(self.name))
            require_finite(reward, next_obs, self.name)
        self._obs = next_obs
        if some:
            self._notify_before_reset(ended)
            self._begin(ended, None)
            self._obs = where(ended, self._observe(self.view()), next_obs)
        return Step(self._obs, next_obs, reward, won, late, log)

    def view(self, rows: slice = slice(None)) -> View:
        """The `View` of `rows` for rewards, observations and descriptions."""
        state = self.batch.state
        return view_of(
            state["qpos"][rows].double(),
            state["qvel"][rows].double(),
            state["mocap_pos"][rows].double(),
            self._free,
            self._markers,
            self.memory["place"][rows],
            self.given.native(self.task[rows]),
            {k: v[rows] for k, v in self.memory.items() if k not in REFERENCE},
        )

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"count": None}, {"stream": None})

    def get_state(self) -> Tensors:
        if self._obs is None:
            raise RuntimeError(f"{self.name}: call reset() before get_state()")
        own = {"count": self.count, "task": self.task, "stream": self.streams.state}
        memory = {f"memory/{key}": value for key, value in self.memory.items()}
        physics = {f"physics/{key}": value for key, value in self.batch.state.items()}
        obs = {f"obs/{key}": value for key, value in self._obs.items()}
        return {key: value.clone() for key, value in {**own, **memory, **physics, **obs}.items()}

    def set_state(self, state: Tensors) -> Tensors:
        here = {key: value.to(self.device, copy=True) for key, value in state.items()}
        self.count = here["count"]
        self.task = here["task"]
        self.streams.state = here["stream"]
        start = len("memory/")
        self.memory = {k[start:]: v for k, v in here.items() if k.startswith("memory/")}
        self.batch.load({key: here[f"physics/{key}"] for key in self.batch.state})
        self._set_tasks()
        self._obs = {key: here[f"obs/{key}"] for key in self.spec.obs}
        return self._obs

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        task = self.task[row : row + 1].cpu().numpy()
        model, data = self._drawn.shaped(self.given.native(task))
        for name in ("qpos", "qvel", "ctrl", "mocap_pos", "mocap_quat"):
            getattr(data, name)[:] = self.batch.state[name][row].cpu().numpy()
        mujoco.mj_forward(model, data)
        return model, data

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        return torch.from_numpy(self._cameras.picture(*self.scene(row), None, width, height))

    def describe(self, row: int = 0) -> str:
        return self.what.describe(self.view(slice(row, row + 1)))

    def close(self) -> None:
        self._cameras.close()

    def _begin(self, mask: Tensor, task: Tensor | None) -> None:
        """Start a new episode in the envs `mask` [B]; `task` [B, D] fixes their task vectors. All
        envs are computed and those not in `mask` keep their values, so no synchronisation is
        needed.
        """
        size = len(self.parameters)
        # Only the generators of the envs `mask` advance.
        before = self.streams.state.clone()
        drawn = self.streams.uniform(size + self.what.draws).mT.double()
        self.streams.state = torch.where(mask[:, None], self.streams.state, before)
        # The task is always drawn, so that a fixed one does not shift the env's later draws.
        vector = drawn[:, :size] if task is None else task
        self.task = torch.where(mask[:, None], vector, self.task)
        self.count = self.count.masked_fill(mask, 0)
        self._set_tasks()
        start = self.what.start(self.given.native(self.task), drawn[:, size:])
        q = self.controller.reach(start.tool)
        reference = self.controller.begin(q, start.width)
        if self.what.settle:
            reference["width"] = torch.zeros_like(start.width)
        fresh = {**reference, **start.memory}
        self.memory = where(mask, fresh, self.memory or fresh)
        # State fields [B, ...] of envs that start at `start` with joint angles `q` [B, 7].
        qpos = self.batch.origin.double()
        stand(qpos, q, start, self._free)
        mocap = self.batch.state["mocap_pos"].double()
        for name, place in start.marker.items():
            mocap[:, self._markers[name]] = place
        finger = torch.zeros_like(start.width) if self.what.settle else start.width / 2
        ctrl = torch.cat([q, finger[:, None]], 1)
        self.batch.restart(mask, {"qpos": qpos, "ctrl": ctrl, "mocap_pos": mocap})
        if self.what.settle:
            unsettled = self.batch.saved()
            self.batch.step(self.what.settle)
            self.batch.keep(~mask, unsettled)

    def _set_tasks(self) -> None:
        for (name, geom), value in self.what.shape(self.given.native(self.task)).items():
            self.batch.field(name)[:, self.model.geom(geom).id] = value.float()

    def _observe(self, view: View) -> Tensors:
        return {"state": self.given.observe(view).float()}

    def _checked_task(self, task: Tensor) -> Tensor:
        if tuple(task.shape) != tuple(self.task.shape):
            wanted = tuple(self.task.shape)
            raise ValueError(f"{self.name}: task is {tuple(task.shape)}, expected {wanted}")
        values = task.detach().to(self.device, torch.float64)
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{self.name}: task vectors must be in [0, 1]")
        return values
