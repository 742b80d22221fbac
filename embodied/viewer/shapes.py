"""Triangles and colours of MuJoCo geoms, in each geom's own frame."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

Vertices = NDArray[np.float32]
Faces = NDArray[np.uint32]
Mesh = tuple[Vertices, Faces]
SEGMENTS = 32
ENDLESS = 20.0
"""Half the side of a plane that has no end, m."""


def mesh_of(model: mujoco.MjModel, geom: int) -> Mesh | None:
    """Vertices [V, 3] (m) and faces [F, 3] of one geom; None for kinds that cannot be drawn."""
    kind, size = mujoco.mjtGeom(int(model.geom_type[geom])), model.geom_size[geom]
    shape = mujoco.mjtGeom
    if kind == shape.mjGEOM_MESH:
        return _asset(model, int(model.geom_dataid[geom]))
    if kind == shape.mjGEOM_BOX:
        return box(size)
    if kind == shape.mjGEOM_PLANE:
        return box(np.array([*plane_half(size), 0.0]))
    if kind == shape.mjGEOM_SPHERE:
        return lathe(_rounded(size[0], 0.0))
    if kind == shape.mjGEOM_ELLIPSOID:
        vertices, faces = lathe(_rounded(1.0, 0.0))
        return vertices * size.astype(np.float32), faces
    if kind == shape.mjGEOM_CAPSULE:
        return lathe(_rounded(size[0], size[1]))
    if kind == shape.mjGEOM_CYLINDER:
        r, h = size[:2]
        # Corners are there twice, so that the rim stays sharp when normals are averaged.
        return lathe(np.array([(0, -h), (r, -h), (r, -h), (r, h), (r, h), (0, h)]))
    return None


def rgba_of(model: mujoco.MjModel, geom: int) -> tuple[float, float, float, float]:
    """The geom's colour in [0, 1], as MuJoCo chooses between geom and material; a texture counts
    with its mean."""
    rgba, material = model.geom_rgba[geom], int(model.geom_matid[geom])
    if material >= 0 and np.allclose(rgba, (0.5, 0.5, 0.5, 1.0)):
        rgba = model.mat_rgba[material].copy()
        texture = int(model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB.value])
        if texture >= 0:
            rgba[:3] *= _mean_colour(model, texture)
    r, g, b, a = (float(value) for value in rgba)
    return r, g, b, a


def plane_half(size: NDArray[np.float64]) -> tuple[float, float]:
    """Half sides of a plane geom, m; a side of 0 has no end in MuJoCo."""
    x, y = (float(side) if side > 0 else ENDLESS for side in size[:2])
    return x, y


def box(half: NDArray[np.float64]) -> Mesh:
    """A box with half sides `half` [3]; every side has corners of its own, so edges are sharp."""
    square = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], np.float64)
    sides = []
    for axis in range(3):
        for sign in (-1.0, 1.0):
            side = np.empty((4, 3))
            side[:, axis] = sign
            # Turned about for the far side: corners run counter-clockwise seen from outside.
            side[:, [(axis + 1) % 3, (axis + 2) % 3]] = square[:: int(sign)]
            sides.append(side)
    vertices = np.concatenate(sides) * half
    corners = np.array([(0, 1, 2), (0, 2, 3)])
    faces = np.concatenate([corners + 4 * i for i in range(6)])
    return vertices.astype(np.float32), faces.astype(np.uint32)


def lathe(profile: NDArray[np.float64], segments: int = SEGMENTS) -> Mesh:
    """The surface that `profile` [K, 2] (radius, height), from bottom to top, makes about z."""
    angle = np.linspace(0, 2 * np.pi, segments, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)], 1)
    rings = np.empty((len(profile), segments, 3))
    rings[..., :2] = profile[:, None, :1] * circle
    rings[..., 2] = profile[:, 1:]
    here = np.arange((len(profile) - 1) * segments).reshape(-1, segments)
    a, b = here, np.roll(here, -1, 1)
    faces = np.concatenate(
        [np.stack([a, b, b + segments], -1), np.stack([a, b + segments, a + segments], -1)]
    )
    return rings.reshape(-1, 3).astype(np.float32), faces.reshape(-1, 3).astype(np.uint32)


def _rounded(radius: float, half: float) -> NDArray[np.float64]:
    """Profile of a ball of `radius` that is cut in two, `half` above and below the middle."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 18)
    height = radius * np.sin(angle) + np.where(angle < 0, -half, half)
    return np.stack([radius * np.cos(angle), height], 1)


def _asset(model: mujoco.MjModel, mesh: int) -> Mesh:
    """A mesh asset, with one vertex for each (position, normal) pair, so that creases stay."""
    vertex, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
    first, faces = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    corners = model.mesh_face[first : first + faces].reshape(-1).astype(np.int64)
    normals = model.mesh_facenormal[first : first + faces].reshape(-1).astype(np.int64)
    key = corners * (int(normals.max()) + 1) + normals
    _, index, inverse = np.unique(key, return_index=True, return_inverse=True)
    places = model.mesh_vert[vertex : vertex + count][corners[index]]
    return places.astype(np.float32), inverse.reshape(-1, 3).astype(np.uint32)


def _mean_colour(model: mujoco.MjModel, texture: int) -> NDArray[np.float64]:
    start, channels = int(model.tex_adr[texture]), int(model.tex_nchannel[texture])
    pixels = int(model.tex_width[texture]) * int(model.tex_height[texture])
    values = model.tex_data[start : start + pixels * channels].reshape(pixels, channels)
    return values[:, :3].mean(0) / 255.0
