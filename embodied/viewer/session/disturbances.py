"""Disturbances for testing a policy: pushes, missing observations, delayed observations."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.viewer.scene.types import Array
from embodied.viewer.session.episode import Moment

FREE = mujoco.mjtJoint.mjJNT_FREE.value
ROBOT = "robot"
FASTEST = 1.5
"""Highest speed at which a dragged body is pulled, m/s."""
LATEST = 10
"""Largest observation delay, in steps."""


class ObservationDisturbance:
    """Observations that are `late` steps old, with zeros for the observations named in `off`."""

    def __init__(self) -> None:
        self.late = 0
        self.off: set[str] = set()

    def of(self, moments: list[Moment]) -> Tensors:
        """The observations to act on after `moments`; early in an episode its first ones."""
        return {
            name: torch.zeros_like(value) if name in self.off else value
            for name, value in moments[max(len(moments) - 1 - self.late, 0)].obs.items()
        }


class Pushes:
    """Pushes freely moving bodies of a MuJoCo environment, or the robot's joints.

    `names` lists what can be pushed; it is empty in environments that are not MuJoCo's.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env: Any = env
        model = self._model()
        self.names: list[str] = []
        self._dofs: dict[str, NDArray[np.intp]] = {}
        if model is None:
            return
        owned = np.zeros(model.nv, bool)
        for joint in np.flatnonzero(model.jnt_type == FREE):
            first = int(model.jnt_dofadr[joint])
            name = model.body(int(model.jnt_bodyid[joint])).name
            self._dofs[name] = np.arange(first, first + 3)
            owned[first : first + 6] = True
        if not owned.all():
            self._dofs[ROBOT] = np.flatnonzero(~owned)
        self.names = list(self._dofs)

    def push(self, name: str, strength: float, seed: int) -> None:
        """Add a velocity of size `strength` (m/s; joints: rad/s) in a direction derived from
        `seed`: horizontal for a body, any for joints."""
        dofs = self._dofs[name]
        way = np.random.default_rng(seed).standard_normal(len(dofs))
        if name != ROBOT:
            way[2] = 0.0
        self._velocity()[dofs] += strength * way / max(float(np.linalg.norm(way)), 1e-9)

    def pull(self, name: str, place: Array, dt: float) -> None:
        """Give the free body `name` the velocity that brings it to `place` [3] (m) within a few
        steps of `dt` s, compensating gravity."""
        model, dofs = self._model(), self._dofs[name]
        assert model is not None
        joint = int(model.body_jntadr[model.body(name).id])
        first = int(model.jnt_qposadr[joint])
        way = place - self._qpos()[first : first + 3]
        speed = way / (3 * dt)
        speed *= min(1.0, FASTEST / max(float(np.linalg.norm(speed)), 1e-9))
        # Half of what it falls in the step.
        self._velocity()[dofs] = speed - 0.5 * dt * model.opt.gravity
        self._velocity()[dofs + 3] *= 0.5

    def shove(self, body: str, way: Array, strength: float) -> None:
        """Add the joint velocities by which `body` moves along `way` [3] at `strength` m/s (damped
        least squares)."""
        model, robot = self._model(), self._dofs[ROBOT]
        assert model is not None
        data = mujoco.MjData(model)
        data.qpos[:] = self._qpos()
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        jacobian = np.zeros((3, model.nv))
        mujoco.mj_jacBodyCom(model, data, jacobian, None, model.body(body).id)
        jacobian = jacobian[:, robot]
        square = jacobian @ jacobian.T + 1e-3 * np.eye(3)
        wanted = strength * way / max(float(np.linalg.norm(way)), 1e-9)
        self._velocity()[robot] += jacobian.T @ np.linalg.solve(square, wanted)

    def links(self) -> list[str]:
        """Names of the bodies that the robot's joints move."""
        model = self._model()
        if model is None or ROBOT not in self._dofs:
            return []
        robot = set(self._dofs[ROBOT].tolist())
        return [
            model.body(i).name
            for i in range(1, model.nbody)
            if model.body(i).name and robot & set(chain_of(model, i))
        ]

    def _model(self) -> mujoco.MjModel | None:
        if self._batched():
            return self.env.model
        model = getattr(self._inner(), "model", None)
        return model if isinstance(model, mujoco.MjModel) else None

    def _velocity(self) -> NDArray[np.float64]:
        """Velocities [nv] of parallel env 0, writable."""
        if self._batched():
            return self.env.batch.qvel[0]
        return self._inner().data.qvel

    def _qpos(self) -> NDArray[np.float64]:
        """Positions [nq] of parallel env 0."""
        return self.env.batch.qpos[0] if self._batched() else self._inner().data.qpos

    def _batched(self) -> bool:
        return isinstance(getattr(getattr(self.env, "batch", None), "qvel", None), np.ndarray)

    def _inner(self) -> Any:
        return getattr(next(iter(getattr(self.env, "envs", ())), None), "unwrapped", None)


def chain_of(model: mujoco.MjModel, body: int) -> list[int]:
    """The degrees of freedom between the world body and `body`."""
    found: list[int] = []
    while body > 0:
        first, count = int(model.body_dofadr[body]), int(model.body_dofnum[body])
        found += range(first, first + count)
        body = int(model.body_parentid[body])
    return found
