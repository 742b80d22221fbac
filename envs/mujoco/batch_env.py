"""MujocoVecEnv: base class of batched MuJoCo environments on one thread pool (`mujoco.batch`).

The state of an env is MuJoCo's full integration state (warm start and controls included), a
generator, a clock, a task vector and the `memory` arrays of the subclass. Finished envs are reset
inside `step` from their own generator, after the true successor state was read.

`DataPool` adds the contact forces that `mujoco.batch` leaves out: `Batch.step` does not call
`mj_rnePostConstraint`. With a Runge-Kutta integrator no sensor can replace it, because sensors are
evaluated at the first of the four stages, not at the last. `mj_step` releases the GIL, so one
thread per core on plain `MjData` is as fast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.env import NotFinite, StateRoles, Step, VecEnv, require_finite
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, each
from embodied.envs.mujoco.cameras import Cameras
from embodied.envs.row_rng import pack, unpack

Floats = NDArray[np.float64]
STATE = mujoco.mjtState.mjSTATE_INTEGRATION.value
VIEWS = {
    "qpos": mujoco.mjtState.mjSTATE_QPOS.value,
    "qvel": mujoco.mjtState.mjSTATE_QVEL.value,
    "ctrl": mujoco.mjtState.mjSTATE_CTRL.value,
}


class DataPool:
    """The part of `mujoco.batch.Batch` that `MujocoVecEnv` uses, with `outputs` filled every call.

    `state` [B, n] holds the integration states; `qpos`, `qvel`, `ctrl` are writable views of it.
    Each name in `outputs` becomes an attribute [B, ...]; after `step` they lag the state by a
    substep as with `mj_step`. `cfrc_ext` is that of `mj_rnePostConstraint` after `step`, and zero
    after `forward`, as no contact has been felt yet.
    """

    qpos: Floats
    qvel: Floats
    ctrl: Floats

    def __init__(
        self, model: mujoco.MjModel, rows: int, threads: int, outputs: Sequence[str]
    ) -> None:
        self.model = model
        self._outputs = tuple(outputs)
        self.state = np.zeros((rows, mujoco.mj_stateSize(model, STATE)))
        self._datas = [mujoco.MjData(model) for _ in range(min(threads, rows))]
        self._threads = ThreadPoolExecutor(len(self._datas), "mujoco")
        for name, part in VIEWS.items():
            # The columns of `state` that hold one component: marked in one row, found by the mark.
            marked = np.zeros(self.state.shape[1])
            picked = np.ones(mujoco.mj_stateSize(self.model, part))
            data = mujoco.MjData(self.model)
            mujoco.mj_setState(self.model, data, np.zeros_like(marked), STATE)
            mujoco.mj_setState(self.model, data, picked, part)
            mujoco.mj_getState(self.model, data, marked, STATE)
            columns = np.flatnonzero(marked)
            setattr(self, name, self.state[:, columns[0] : columns[-1] + 1])
        for name in self._outputs:
            setattr(self, name, np.zeros((rows, *getattr(self._datas[0], name).shape)))
        self.reset(np.arange(rows))

    def reset(self, rows: NDArray[np.intp], stage: int = 0) -> None:
        """Put `rows` at the model's defaults; derived quantities wait for `forward`."""
        data = self._datas[0]
        mujoco.mj_resetData(self.model, data)
        fresh = np.empty(self.state.shape[1])
        mujoco.mj_getState(self.model, data, fresh, STATE)
        self.state[rows] = fresh

    def forward(self, rows: NDArray[np.intp]) -> None:
        """Compute derived quantities of `rows` at their states."""

        def advance(data: mujoco.MjData) -> None:
            mujoco.mj_forward(self.model, data)
            data.cfrc_ext[:] = 0.0

        self._run(rows.tolist(), advance)

    def step(self, ids: NDArray[np.intp] | None = None, nstep: int = 1, stage: int = 0) -> None:
        """Advance the rows `ids` (None: all) by `nstep` substeps, then compute their contact
        forces."""

        def advance(data: mujoco.MjData) -> None:
            mujoco.mj_step(self.model, data, nstep=nstep)
            mujoco.mj_rnePostConstraint(self.model, data)

        self._run(list(range(len(self.state))) if ids is None else ids.tolist(), advance)

    def close(self) -> None:
        self._threads.shutdown()

    def _run(self, rows: list[int], advance: Callable[[mujoco.MjData], None]) -> None:
        # One iterator shared by all threads balances the load.
        todo = iter(rows)
        others = [
            self._threads.submit(self._serve, data, todo, advance) for data in self._datas[1:]
        ]
        self._serve(self._datas[0], todo, advance)
        for other in others:
            other.result()

    def _serve(
        self, data: mujoco.MjData, todo: Iterator[int], advance: Callable[[mujoco.MjData], None]
    ) -> None:
        pairs = [(getattr(self, name), getattr(data, name)) for name in self._outputs]
        for row in todo:
            mujoco.mj_setState(self.model, data, self.state[row], STATE)
            advance(data)
            mujoco.mj_getState(self.model, data, self.state[row], STATE)
            for kept, value in pairs:
                kept[row] = value


Rows = NDArray[np.intp]


@dataclass(slots=True)
class Outcome:
    """Result of a control step: `reward` [B], `terminated` [B] (bool), `log` [B] arrays."""

    reward: Floats
    terminated: NDArray[np.bool_]
    log: dict[str, NDArray[np.generic]] = field(default_factory=dict)


class MujocoVecEnv(VecEnv):
    """B parallel envs of one MuJoCo model; subclasses supply the hooks `control, observe, outcome,
    place`.

    `batch` is the live simulation: `batch.qpos` and the other state fields are [B, ...] views that
    may be written, every other MjData field (`batch.xpos`, `batch.cfrc_ext`, `batch.sensordata`) is
    a read-only [B, ...] output of the last call, and `batch.expand("geom_size")` gives a model
    field one value per env. As with `mj_step`, outputs are one substep behind the state unless
    `stage` says otherwise. `memory` holds the subclass's own arrays [B, ...] (controller
    references, previous positions); they are saved and restored with the env.
    """

    stage: int = mujoco.mjtStage.mjSTAGE_NONE.value
    """Stages computed at the new state after each control step (mjSTAGE_VEL: fresh `xpos`)."""
    draws: int = 0
    """How many uniform numbers `place` is given for each row it begins."""
    portraits: tuple[str, ...] = ()
    """The cameras of `render_batch`."""

    def __init__(
        self,
        model: mujoco.MjModel,
        spec: Spec,
        num_envs: int,
        *,
        substeps: int,
        horizon: int,
        threads: int = 2,
        seed: int = 0,
        name: str = "mujoco",
        cameras: Cameras | None = None,
    ) -> None:
        # MuJoCo would silently reset a diverged state; disabled so that it is reported.
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
        self.model = model
        self.name = name
        self.num_envs = num_envs
        self.substeps = substeps
        self.horizon = horizon
        self.cameras = cameras
        self.spec = spec if cameras is None else spec.with_obs(**cameras.leaves())
        self.batch = Batch(model, num_envs, max(1, threads))
        self.memory: dict[str, NDArray[Any]] = {}
        self.count = np.zeros(num_envs, np.int64)
        self.task = np.zeros((num_envs, 0 if spec.task is None else spec.task.size))
        self.generators = [_generator(seed, row) for row in range(num_envs)]
        self.playing = np.ones(num_envs, np.bool_)  # those that are not paused
        self._obs: Tensors | None = None

    @abstractmethod
    def control(self, action: Floats) -> None:
        """Write `batch.ctrl` for the coming control step; `action` [B, A] is clipped to [-1, 1]."""

    @abstractmethod
    def observe(self, rows: Rows) -> dict[str, NDArray[np.generic]]:
        """Observations [n, ...] of `rows` [n] by name (cameras are added by the base class)."""

    @abstractmethod
    def outcome(self, action: Floats) -> Outcome:
        """Reward, termination and log of the last control step, for all envs."""

    @abstractmethod
    def place(self, rows: Rows, draws: Floats) -> None:
        """Write the start state of `rows` [n] (state fields are at the model's defaults, `task` is
        set) from `draws` [n, self.draws], uniform in [0, 1); clear their `memory` too."""

    def step_physics(self) -> None:
        """Run the physics of one control step; override to look at each substep."""
        ids = None if self.playing.all() else np.flatnonzero(self.playing)
        self.batch.step(ids, nstep=self.substeps, stage=self.stage)

    def pause(self, rows: Tensor) -> None:
        """Leave the envs `rows` [B] (bool) where they are (`core.env.CanPause`)."""
        self.playing = ~rows.cpu().numpy()

    def retask(self, rows: Rows) -> None:
        """Write the model fields (`batch.expand`) that depend on `task[rows]`; default: none."""

    def draw(self, generator: np.random.Generator) -> Floats:
        """The random numbers of one start, [self.draws]; override for another distribution."""
        return generator.random(self.draws)

    def scene(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Model and data of one env for the viewer and videos."""
        data = mujoco.MjData(self.model)
        mujoco.mj_setState(
            self.model, data, self.batch.state[row], mujoco.mjtState.mjSTATE_INTEGRATION.value
        )
        mujoco.mj_forward(self.model, data)
        return self.model, data

    def sight(self, row: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Model and data of one env for the observation cameras."""
        return self.scene(row)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        every = np.arange(self.num_envs)
        rows = every if mask is None else every[mask.cpu().numpy().astype(bool)]
        if self._obs is None and len(rows) != self.num_envs:
            raise ValueError(f"{self.name}: the first reset must reset all envs (mask=None)")
        if seed is not None:
            for row in rows:
                self.generators[row] = _generator(seed, int(row))
        self._begin(rows, None if task is None else self._checked_task(task))
        fresh = self._observe(rows)
        self._obs = fresh if self._obs is None else _replaced(self._obs, rows, fresh)
        return self._obs

    def step(self, action: Tensor) -> Step:
        if self._obs is None:
            raise RuntimeError(f"{self.name}: call reset() before step()")
        act = self._checked_action(action)
        self.control(act)
        self.step_physics()
        self.count += self.playing
        outcome = self.outcome(act)
        next_obs = self._observe(np.arange(self.num_envs))
        reward = torch.from_numpy(outcome.reward.astype(np.float32))
        require_finite(reward, next_obs, self.name)
        truncated = (self.count >= self.horizon) & ~outcome.terminated
        rows = np.flatnonzero(outcome.terminated | truncated)
        self._obs = next_obs
        if len(rows):
            self._notify_before_reset(torch.from_numpy(outcome.terminated | truncated))
            self._begin(rows, None)
            self._obs = _replaced(next_obs, rows, self._observe(rows))
        return Step(
            obs=self._obs,
            next_obs=next_obs,
            reward=reward,
            terminated=torch.from_numpy(outcome.terminated),
            truncated=torch.from_numpy(truncated),
            log={key: torch.from_numpy(np.asarray(value)) for key, value in outcome.log.items()},
        )

    @property
    def state_roles(self) -> StateRoles:
        return StateRoles({"count": None}, {"generator": None})

    def get_state(self) -> Tensors:
        if self._obs is None:
            raise RuntimeError(f"{self.name}: call reset() before get_state()")
        state = {
            "physics": self.batch.state,
            "count": self.count,
            "task": self.task,
            "generator": np.stack([pack(generator) for generator in self.generators]),
            **{f"memory/{key}": value for key, value in self.memory.items()},
        }
        kept = {key: torch.from_numpy(np.array(value)) for key, value in state.items()}
        # Observations may read outputs that are one substep behind the state, so they are kept too.
        return {**kept, **{f"obs/{key}": value.clone() for key, value in self._obs.items()}}

    def set_state(self, state: Tensors) -> Tensors:
        arrays = {key: value.cpu().numpy() for key, value in state.items()}
        self.batch.state[:] = arrays["physics"]
        self.count[:] = arrays["count"]
        self.task[:] = arrays["task"]
        for row, words in enumerate(arrays["generator"]):
            unpack(self.generators[row], words)
        for key, value in self.memory.items():
            value[:] = arrays[f"memory/{key}"]
        self.retask(np.arange(self.num_envs))
        self._obs = {key: state[f"obs/{key}"].clone() for key in self.spec.obs}
        return self._obs

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        if self.cameras is None:
            self.cameras = Cameras((), 0)
        model, data = self.scene(row)
        return torch.from_numpy(self.cameras.picture(model, data, None, width, height))

    @property
    def num_views(self) -> int:
        return max(len(self.portraits), 1)

    def render_batch(self, rows: Tensor, size: int) -> Tensor:
        """Images from the `portraits` cameras, else the first observation camera, else the model's
        first.
        """
        if self.cameras is None:
            self.cameras = Cameras((), 0)
        names = self.portraits or self.cameras.names[:1] or (None,)
        shots = torch.empty(len(rows), size, len(names), size, 3, dtype=torch.uint8)
        for shot, row in zip(shots, rows.tolist(), strict=True):
            model, data = self.sight(row)
            for view, name in enumerate(names):
                picture = self.cameras.picture(model, data, name, size, size, "observation")
                shot[:, view] = torch.from_numpy(picture)
        return shots.flatten(2, 3)

    def close(self) -> None:
        if self.cameras is not None:
            self.cameras.close()

    def _begin(self, rows: Rows, task: Floats | None) -> None:
        """Start a new episode in `rows`; `task` [B, D] fixes their task vectors."""
        if not len(rows):
            return
        for row in rows:
            # The task is always drawn, so that a fixed one does not shift the env's later draws.
            drawn = self.generators[row].random(self.task.shape[1])
            self.task[row] = drawn if task is None else task[row]
        draws = np.stack([self.draw(self.generators[row]) for row in rows])
        self.count[rows] = 0
        self.batch.reset(rows, stage=mujoco.mjtStage.mjSTAGE_NONE.value)
        self.retask(rows)
        self.place(rows, draws)
        self.batch.forward(rows)

    def _observe(self, rows: Rows) -> Tensors:
        obs = {key: torch.from_numpy(value) for key, value in self.observe(rows).items()}
        if self.cameras is not None and self.cameras.leaves():
            seen = self.cameras.observe(self.sight(int(row)) for row in rows)
            obs.update({key: torch.from_numpy(value) for key, value in seen.items()})
        return obs

    def _checked_action(self, action: Tensor) -> Floats:
        shape = (self.num_envs, *self.spec.act.shape)
        if tuple(action.shape) != shape:
            raise ValueError(f"{self.name}: action is {tuple(action.shape)}, expected {shape}")
        act = action.detach().cpu().numpy().astype(np.float64)
        if not np.isfinite(act).all():
            rows = np.flatnonzero(~np.isfinite(act).all(1)).tolist()[:5]
            raise NotFinite(f"{self.name}: action is not finite in envs {rows}")
        return np.clip(act, -1.0, 1.0)

    def _checked_task(self, task: Tensor) -> Floats:
        values = task.detach().cpu().numpy().astype(np.float64)
        if values.shape != self.task.shape:
            raise ValueError(f"{self.name}: task is {values.shape}, expected {self.task.shape}")
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{self.name}: task vectors must be in [0, 1]")
        return values


def action_leaf(names: tuple[str, ...]) -> Leaf:
    """A continuous action in [-1, 1] with one name per element."""
    return Leaf((len(names),), low=-1.0, high=1.0, names=names)


def _replaced(obs: Tensors, rows: Rows, fresh: Tensors) -> Tensors:
    """A copy of `obs` with `rows` taken from `fresh`."""
    index = torch.from_numpy(rows)
    merged = each(obs, Tensor.clone)
    for key, value in merged.items():
        value[index] = fresh[key]
    return merged


def _generator(seed: int, row: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, row]))
