"""Mesh decimation by vertex clustering (Rossignac and Borrel, 1993).

Robot meshes have hundreds of thousands of triangles, too many for a phone or a computer without a
GPU to draw smoothly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from embodied.viewer.scene.shapes import Mesh
from embodied.viewer.scene.types import Array, SceneModel, Shape, TrackedBody, Viewpoint

SMALL_MESH = 600
"""Meshes with up to this many triangles are left unchanged."""
CELLS = 44
"""Cells along the diagonal of a mesh."""
CREASE = np.cos(np.radians(40.0))
"""Cosine of the angle between faces above which their edge is kept sharp."""


def lighter(mesh: Mesh, cells: int = CELLS) -> Mesh:
    """`mesh` decimated to a few thousand triangles at most, with its sharp edges kept."""
    vertices, faces = mesh
    if len(faces) <= SMALL_MESH:
        return mesh
    places, corners = clustered(vertices.astype(np.float64), faces.astype(np.int64), cells)
    return creased(places, corners) if len(corners) else mesh


def clustered(
    vertices: NDArray[np.float64], faces: NDArray[np.int64], cells: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Merge the vertices of each cell into their mean; degenerate and duplicate triangles are
    removed."""
    low, high = vertices.min(0), vertices.max(0)
    size = float(np.linalg.norm(high - low)) / cells
    cell = np.floor((vertices - low) / max(size, 1e-12)).astype(np.int64)
    number = (cell[:, 0] * (cells + 2) + cell[:, 1]) * (cells + 2) + cell[:, 2]
    _, where, count = np.unique(number, return_inverse=True, return_counts=True)
    places = np.stack([np.bincount(where, vertices[:, axis]) for axis in range(3)], 1)
    places /= count[:, None]
    corners = where[faces]
    a, b, c = corners.T
    corners = corners[(a != b) & (b != c) & (c != a)]
    # The same three corners, whichever comes first, are the same triangle.
    turned = np.take_along_axis(corners, (corners.argmin(1)[:, None] + np.arange(3)) % 3, 1)
    # One number each: sorting rows takes several times as long.
    size = len(places)
    single = np.unique((turned[:, 0] * size + turned[:, 1]) * size + turned[:, 2])
    return places, np.stack([single // size**2, single // size % size, single % size], 1)


def creased(places: NDArray[np.float64], corners: NDArray[np.int64]) -> Mesh:
    """Duplicate the vertices along sharp edges, so that averaged normals keep them sharp."""
    a, b, c = (places[corners[:, i]] for i in range(3))
    cross = np.cross(b - a, c - a)
    unit = cross / np.maximum(np.linalg.norm(cross, axis=1, keepdims=True), 1e-20)
    mean = np.zeros_like(places)
    for i in range(3):
        np.add.at(mean, corners[:, i], cross)
    mean /= np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-20)
    smooth = np.einsum("fcx,fx->fc", mean[corners], unit) > CREASE
    # A corner that is not smooth belongs with others that face the same of six ways.
    way = np.abs(unit).argmax(1) * 2 + (
        np.take_along_axis(unit, np.abs(unit).argmax(1)[:, None], 1)[:, 0] > 0
    )
    key = corners * 7 + np.where(smooth, 0, way[:, None] + 1)
    _, first, inverse = np.unique(key.reshape(-1), return_index=True, return_inverse=True)
    vertices = places[corners.reshape(-1)[first]]
    return vertices.astype(np.float32), inverse.reshape(-1, 3).astype(np.uint32)


class DecimatedScene:
    """A scene model with decimated meshes; each mesh is made once per style."""

    def __init__(self, scene: SceneModel) -> None:
        self.scene = scene
        self._made: dict[tuple[int, str, bytes], Mesh | None] = {}

    def bodies(self) -> Sequence[str]:
        return self.scene.bodies()

    def poses(self) -> tuple[Array, Array]:
        return self.scene.poses()

    def viewpoint(self) -> Viewpoint:
        return self.scene.viewpoint()

    def tracked_body(self) -> TrackedBody | None:
        return self.scene.tracked_body()

    def shapes(self) -> Iterator[Shape]:
        for shape in self.scene.shapes():
            yield replace(shape, mesh=partial(self._mesh, shape))

    def _mesh(self, shape: Shape) -> Mesh | None:
        key = (shape.body, shape.name, shape.style)
        if key not in self._made:
            mesh = shape.mesh()
            self._made[key] = None if mesh is None else lighter(mesh)
        return self._made[key]
