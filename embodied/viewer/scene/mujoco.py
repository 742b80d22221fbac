"""MuJoCo scenes: bodies, geoms and meshes of an MjModel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.viewer.scene.types import (
    Array,
    Mesh,
    Shape,
    TrackedBody,
    Viewpoint,
    ball,
    box,
    capsule,
    cylinder,
    view_of,
)

DRAWN_GROUPS = 3
"""Geom groups below this are drawn, as in MuJoCo's viewer; the others are collision geoms."""
ENDLESS = 20.0
"""Half side at which an infinite plane is drawn, m."""
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
        moving = data.xpos[1:] if model.nbody > 1 else data.xpos
        if not model.ncam:
            return view_of(moving)
        place, forward = data.cam_xpos[0], -data.cam_xmat[0].reshape(3, 3)[:, 2]
        reach = max(float(np.dot(moving.mean(0) - place, forward)), 0.1)
        target = place + reach * forward
        # Further back, as the panels cover part of the window.
        return Viewpoint(
            target - 1.25 * reach * forward, target, float(np.radians(model.cam_fovy[0]))
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
    kind, size = mujoco.mjtGeom(int(model.geom_type[geom])), model.geom_size[geom]
    shape = mujoco.mjtGeom
    if kind == shape.mjGEOM_MESH:
        return _asset(model, int(model.geom_dataid[geom]))
    if kind == shape.mjGEOM_BOX:
        return box(size)
    if kind == shape.mjGEOM_PLANE:
        return box(np.array([*plane_half(size), 0.0]))
    if kind == shape.mjGEOM_SPHERE:
        return ball(size[0])
    if kind == shape.mjGEOM_ELLIPSOID:
        vertices, faces = ball(1.0)
        return vertices * size.astype(np.float32), faces
    if kind == shape.mjGEOM_CAPSULE:
        return capsule(size[0], size[1])
    if kind == shape.mjGEOM_CYLINDER:
        return cylinder(size[0], size[1])
    return None


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


def _asset(model: mujoco.MjModel, mesh: int) -> Mesh:
    """A mesh asset with one vertex per (position, normal) pair, which keeps creases."""
    vertex, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
    first, faces = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    corners = model.mesh_face[first : first + faces].reshape(-1).astype(np.int64)
    normals = model.mesh_facenormal[first : first + faces].reshape(-1).astype(np.int64)
    key = corners * (int(normals.max()) + 1) + normals
    _, index, inverse = np.unique(key, return_index=True, return_inverse=True)
    places = model.mesh_vert[vertex : vertex + count][corners[index]]
    return places.astype(np.float32), inverse.reshape(-1, 3).astype(np.uint32)
