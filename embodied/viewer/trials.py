"""Trials: what a robot may meet: a push, a sensor that is off, a delay before it sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.viewer.episode import Moment

FREE = mujoco.mjtJoint.mjJNT_FREE.value
ROBOT = "robot"
LATEST = 10
"""Steps that what is seen may be late."""


class Senses:
    """What who acts is shown: the world `late` steps ago, and nothing (zeros) of the observations
    `off`."""

    def __init__(self) -> None:
        self.late = 0
        self.off: set[str] = set()

    @property
    def whole(self) -> bool:
        return not self.late and not self.off

    def of(self, moments: list[Moment]) -> Tensors:
        """The observations to act on, after `moments`; early in an episode its first ones."""
        obs = moments[max(len(moments) - 1 - self.late, 0)].obs
        return {
            name: torch.zeros_like(value) if name in self.off else value
            for name, value in obs.items()
        }


class Pushes:
    """Pushes bodies of a MuJoCo world that move freely, or the robot's joints; `names` are what can
    be pushed (none: this world cannot be)."""

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
        """Add a velocity of size `strength` (m/s; of joints rad/s), in a direction that `seed`
        gives: along the ground for a body, any for joints."""
        dofs = self._dofs[name]
        way = np.random.default_rng(seed).standard_normal(len(dofs))
        if name != ROBOT:
            way[2] = 0.0
        self._velocity()[dofs] += strength * way / max(float(np.linalg.norm(way)), 1e-9)

    def _model(self) -> mujoco.MjModel | None:
        if self._batched():
            return self.env.model
        model = getattr(self._inner(), "model", None)
        return model if isinstance(model, mujoco.MjModel) else None

    def _velocity(self) -> NDArray[np.float64]:
        """Velocities [nv] of row 0, to be written to."""
        if self._batched():
            return self.env.batch.qvel[0]
        return self._inner().data.qvel

    def _batched(self) -> bool:
        return isinstance(getattr(getattr(self.env, "batch", None), "qvel", None), np.ndarray)

    def _inner(self) -> Any:
        return getattr(next(iter(getattr(self.env, "envs", ())), None), "unwrapped", None)


def said_of(senses: Senses, pushed: Mapping[int, str]) -> str:
    """What was done to the robot, in words; nothing where nothing was."""
    parts = [f"sees {senses.late} steps late"] if senses.late else []
    parts += [f"{name} is off" for name in sorted(senses.off)]
    parts += [f"{name} pushed at step {step}" for step, name in sorted(pushed.items())]
    return ", ".join(parts)
