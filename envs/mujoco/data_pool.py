"""DataPool: MuJoCo envs on Python threads, with the contact forces that `mujoco.batch` leaves out.

`Batch.step` does not call `mj_rnePostConstraint`. With a Runge-Kutta integrator no sensor can
replace it, because sensors are evaluated at the first of the four stages, not at the last.
`mj_step` releases the GIL, so one thread per core on plain `MjData` is as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np
from numpy.typing import NDArray

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
            shape = getattr(self._datas[0], name).shape
            setattr(self, name, np.zeros((rows, *shape)))
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

    def step(self, nstep: int, stage: int = 0) -> None:
        """Advance every row by `nstep` substeps, then compute its contact forces."""

        def advance(data: mujoco.MjData) -> None:
            mujoco.mj_step(self.model, data, nstep=nstep)
            mujoco.mj_rnePostConstraint(self.model, data)

        self._run(list(range(len(self.state))), advance)

    def close(self) -> None:
        """End the threads."""
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
