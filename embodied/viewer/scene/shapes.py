"""Triangle meshes of primitive shapes, in each shape's frame."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vertices = NDArray[np.float32]
Faces = NDArray[np.uint32]
Mesh = tuple[Vertices, Faces]
"""Vertices [V, 3] (m) and faces [F, 3], counter-clockwise from outside."""
SEGMENTS = 32


def box(half: NDArray[np.floating]) -> Mesh:
    """A box with half sides `half` [3]; each side has its own vertices, so edges are sharp."""
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


def ball(radius: float) -> Mesh:
    """A sphere around the origin."""
    return lathe(_rounded(radius, 0.0))


def capsule(radius: float, half: float) -> Mesh:
    """A capsule along z; its straight part reaches `half` above and below the centre."""
    return lathe(_rounded(radius, half))


def cylinder(radius: float, half: float) -> Mesh:
    """A cylinder along z."""
    # Corners are there twice, so that the rim stays sharp when normals are averaged.
    r, h = radius, half
    return lathe(np.array([(0, -h), (r, -h), (r, -h), (r, h), (r, h), (0, h)]))


def lathe(profile: NDArray[np.float64], segments: int = SEGMENTS) -> Mesh:
    """The surface of revolution of `profile` [K, 2] (radius, height; bottom to top) about z."""
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
    """Profile of a sphere of `radius` cut in two, `half` above and below the centre."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 18)
    height = radius * np.sin(angle) + np.where(angle < 0, -half, half)
    return np.stack([radius * np.cos(angle), height], 1)
