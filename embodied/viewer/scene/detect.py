"""Finds the 3D scene of an environment and the engine that holds it (MuJoCo or SAPIEN), and the
state of a MuJoCo scene from recorded observations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray
from trimesh import creation

from embodied.core.env import HasSapienScene, HasScene, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.viewer.scene.types import (
    Array,
    Mesh,
    NoScene,
    SceneModel,
    Shape,
    TrackedBody,
    Viewpoint,
    view_of,
)

DRAWN_GROUPS = 3
"""Geom groups below this are drawn, as in MuJoCo's viewer; the others are collision geoms."""
ENDLESS = 20.0
"""Half side at which an infinite plane is drawn, m."""
ROUND = (18, 32)
"""Parts of a half and a whole turn."""
TRACKING = (mujoco.mjtCamLight.mjCAMLIGHT_TRACK.value, mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM.value)


class MujocoScene:
    """The scene model of `scene()`, an MjModel with its MjData."""

    def __init__(self, scene: Callable[[], tuple[mujoco.MjModel, mujoco.MjData]]) -> None:
        self.scene = scene

    def bodies(self) -> Sequence[str]:
        model, _ = self.scene()
        return [_named(model.body(i).name, i) for i in range(model.nbody)]

    def poses(self) -> tuple[Array, Array]:
        _, data = self.scene()
        return data.xpos.copy(), data.xquat.copy()

    def shapes(self) -> Iterator[Shape]:
        model, _ = self.scene()
        for geom in range(model.ngeom):
            rgba = rgba_of(model, geom)
            if model.geom_group[geom] < DRAWN_GROUPS and rgba[3] > 0:
                yield _shape(model, geom, rgba)

    def viewpoint(self) -> Viewpoint:
        """That of the model's first camera, or one in front of everything that moves."""
        model, data = self.scene()
        moves = (model.body_weldid > 0) | (model.body_mocapid >= 0)
        moving = data.xpos[moves if moves.any() else slice(None)]
        if not model.ncam:
            return view_of(moving)
        place, forward = data.cam_xpos[0], -data.cam_xmat[0].reshape(3, 3)[:, 2]
        reach = max(float(np.dot(moving.mean(0) - place, forward)), 0.1)
        several = self.tracked_body() is None and float(np.ptp(moving, axis=0).max()) > 0.1
        return Viewpoint(
            place,
            place + reach * forward,
            float(np.radians(model.cam_fovy[0])),
            moving if several else None,
        )

    def tracked_body(self) -> TrackedBody | None:
        """The body that the model's first camera tracks (horizontally), or the only free body there
        is (in all axes)."""
        model, _ = self.scene()
        if model.ncam and model.cam_mode[0] in TRACKING and model.cam_bodyid[0] > 0:
            return TrackedBody(int(model.cam_bodyid[0]), (1.0, 1.0, 0.0))
        if model.njnt == 1 and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE.value:
            return TrackedBody(int(model.jnt_bodyid[0]), (1.0, 1.0, 1.0))
        return None


def _named(name: str, index: int) -> str:
    return f"{index}_{name}" if name else str(index)


def _shape(model: mujoco.MjModel, geom: int, rgba: tuple[float, float, float, float]) -> Shape:
    place, turn, size = model.geom_pos[geom], model.geom_quat[geom], model.geom_size[geom]
    plane = model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_PLANE.value
    x, y = plane_half(size)
    return Shape(
        body=int(model.geom_bodyid[geom]),
        name=_named(model.geom(geom).name, geom),
        style=np.concatenate([size, place, turn, rgba]).tobytes(),
        rgba=rgba,
        place=place,
        turn=turn,
        mesh=partial(mesh_of, model, geom),
        lines=(2 * x, 2 * y) if plane else None,
    )


def mesh_of(model: mujoco.MjModel, geom: int) -> Mesh | None:
    """Vertices [V, 3] (m) and faces [F, 3] of one geom; None for types that cannot be drawn."""
    size = model.geom_size[geom]
    made: Any = None
    match mujoco.mjtGeom(int(model.geom_type[geom])).name.removeprefix("mjGEOM_"):
        case "MESH":
            mesh = model.mesh(int(model.geom_dataid[geom]))
            corners = slice(mesh.vertadr[0], mesh.vertadr[0] + mesh.vertnum[0])
            triangles = slice(mesh.faceadr[0], mesh.faceadr[0] + mesh.facenum[0])
            return model.mesh_vert[corners], model.mesh_face[triangles].astype(np.uint32)
        case "BOX":
            made = creation.box(2 * size)
        case "PLANE":
            made = creation.box(2 * np.array([*plane_half(size), 0.0]))
        case "SPHERE":
            made = creation.uv_sphere(size[0], ROUND)
        case "ELLIPSOID":
            made = creation.uv_sphere(1.0, ROUND).apply_scale(size)
        case "CAPSULE":
            made = creation.capsule(2 * size[1], size[0], ROUND)
        case "CYLINDER":
            made = creation.cylinder(size[0], 2 * size[1])
        case _:
            return None
    return np.asarray(made.vertices, np.float32), np.asarray(made.faces, np.uint32)


def rgba_of(model: mujoco.MjModel, geom: int) -> tuple[float, float, float, float]:
    """The geom's colour in [0, 1], of the geom or its material; a texture counts with its mean
    colour."""
    rgba, material = model.geom_rgba[geom], int(model.geom_matid[geom])
    if material >= 0 and np.allclose(rgba, (0.5, 0.5, 0.5, 1.0)):
        rgba = model.mat_rgba[material].copy()
        texture = int(model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB.value])
        if texture >= 0:
            start, channels = int(model.tex_adr[texture]), int(model.tex_nchannel[texture])
            pixels = int(model.tex_width[texture]) * int(model.tex_height[texture])
            values = model.tex_data[start : start + pixels * channels].reshape(pixels, channels)
            rgba[:3] *= values[:, :3].mean(0) / 255.0
    r, g, b, a = (float(value) for value in rgba)
    return r, g, b, a


def plane_half(size: NDArray[np.float64]) -> tuple[float, float]:
    """Half sides of a plane geom, m; a side of 0 is infinite in MuJoCo."""
    x, y = (float(side) if side > 0 else ENDLESS for side in size[:2])
    return x, y


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
        for i, joint in enumerate(np.flatnonzero(model.jnt_type == HINGE)):
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
