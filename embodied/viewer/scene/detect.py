"""Finds the 3D scene of an environment and the engine that holds it (MuJoCo or SAPIEN), and the
state of a MuJoCo scene from recorded observations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from embodied.core.env import HasSapienScene, HasScene, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.viewer.scene.types import NoScene, SceneModel


def detect_scene(env: VecEnv) -> SceneModel | None:
    """The scene of parallel env 0, or None if the environment has no scene to draw in 3D.

    MuJoCo environments have `scene(row)`, SAPIEN environments `sub_scene(row)`; a Gymnasium
    environment has its MuJoCo model on the unwrapped environment. Engines are imported only for
    their own environments. Raises NoScene if the environment refuses to show its scene (the
    parallel environments run in other processes).
    """
    target: Any = env
    if find_protocol(env, HasSapienScene) is not None:
        from embodied.viewer.scene.sapien import SapienScene

        try:
            target.sub_scene(0)
        except ValueError as error:
            raise NoScene(str(error)) from error
        return SapienScene(lambda: target.sub_scene(0))
    inner: Any = getattr(next(iter(getattr(target, "envs", ())), None), "unwrapped", None)
    has_model = type(getattr(inner, "model", None)).__module__.startswith("mujoco.")
    if not has_model and find_protocol(env, HasScene) is None:
        return None
    from embodied.viewer.scene.mujoco import MujocoScene

    return MujocoScene(lambda: (inner.model, inner.data) if has_model else target.scene(0))


HINGE, SLIDE = mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value


# Poses a MuJoCo model from the named elements of an observation.
#
# | name | sets |
# | `q1` to `qN` | the hinge joints, in the model's order |
# | `width` | the gripper opening, divided over the slide joints |
# | `NAME_x`, `NAME_y`, `NAME_z` | position of body NAME (free or mocap) |
# | `NAME_cos_4yaw`, `NAME_sin_4yaw` | its yaw, up to a quarter turn |
@dataclass
class PosedModel:
    """A model posed from observation `leaf`; `where` is the index of each named element."""

    model: mujoco.MjModel
    data: mujoco.MjData
    leaf: str
    where: dict[str, int]

    @classmethod
    def of(cls, world: Any, spec: Spec) -> PosedModel | None:
        """For the model of environment `world` and observations `spec`; None if they do not fit."""
        if find_protocol(world, HasScene) is None:
            return None
        world.reset(0)
        model, data = world.scene(0)
        hinges = int((model.jnt_type == HINGE).sum())
        for name, leaf in spec.obs.items():
            where = {word: at for at, word in enumerate(leaf.names)}
            known = [f"q{i + 1}" in where for i in range(hinges + 1)]
            if hinges and known == [*[True] * hinges, False]:
                return cls(model, data, name, where)
        return None

    def put(self, shown: Tensors) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Pose model and data by `shown` (the leaves of one parallel env)."""
        values = shown[self.leaf].double().numpy()
        model, data = self.model, self.data
        hinges = np.flatnonzero(model.jnt_type == HINGE)
        for i, joint in enumerate(hinges):
            data.qpos[model.jnt_qposadr[joint]] = values[self.where[f"q{i + 1}"]]
        if "width" in self.where:
            slides = np.flatnonzero(model.jnt_type == SLIDE)
            for joint in slides:
                data.qpos[model.jnt_qposadr[joint]] = values[self.where["width"]] / len(slides)
        for body in range(1, model.nbody):
            self._place(body, values)
        mujoco.mj_forward(model, data)
        return model, data

    def _place(self, body: int, values: np.ndarray) -> None:
        model, data, name = self.model, self.data, self.model.body(body).name
        axes = [self.where[f"{name}_{axis}"] for axis in "xyz" if f"{name}_{axis}" in self.where]
        if len(axes) < 3:
            return
        place, joint = values[axes], int(model.body_jntadr[body])
        if model.body_mocapid[body] >= 0:
            data.mocap_pos[model.body_mocapid[body]] = place
        elif joint >= 0 and model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE.value:
            first = int(model.jnt_qposadr[joint])
            data.qpos[first : first + 3] = place
            half = self._yaw(name, values) / 2
            data.qpos[first + 3 : first + 7] = np.cos(half), 0.0, 0.0, np.sin(half)

    def _yaw(self, name: str, values: np.ndarray) -> float:
        for word, at in self.where.items():
            found = re.fullmatch(rf"{re.escape(name)}_cos_(\d*)yaw", word)
            sine = word.replace("_cos_", "_sin_")
            if found and sine in self.where:
                return float(np.arctan2(values[self.where[sine]], values[at])) / int(found[1] or 1)
        return 0.0
