"""SceneModel: the protocol by which the page draws the 3D scene of any physics engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodied.viewer.scene.shapes import Mesh

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Shape:
    """A shape fixed in body number `body`, at `place` (m), rotated by `turn` (quaternion w, x, y,
    z).

    Shapes of equal `style` look the same; `mesh` makes the triangles, or None if it cannot be
    drawn. `lines` are the sides (m) of a floor that gets grid lines, so that motion is visible on
    it.
    """

    body: int
    name: str
    style: bytes
    rgba: tuple[float, float, float, float]
    place: Array
    turn: Array
    mesh: Callable[[], Mesh | None]
    lines: tuple[float, float] | None = None


@dataclass(frozen=True)
class Viewpoint:
    """A camera pose: `place` and `target` (m), vertical field of view (rad; None: the page's
    default)."""

    place: Array
    target: Array
    fov: float | None = None


@dataclass(frozen=True)
class TrackedBody:
    """The body that the camera follows, in the axes that are 1 in `along` (x, y, z)."""

    body: int
    along: tuple[float, float, float]


class SceneModel(Protocol):
    """The scene of one environment: moving bodies, and shapes that are fixed in them."""

    def bodies(self) -> Sequence[str]:
        """The names of the bodies, unique; other names mean another scene."""
        ...

    def poses(self) -> tuple[Array, Array]:
        """Current position [N, 3] (m) and quaternion [N, 4] (w, x, y, z) of every body."""
        ...

    def shapes(self) -> Iterable[Shape]:
        """All visible shapes."""
        ...

    def viewpoint(self) -> Viewpoint: ...

    def tracked_body(self) -> TrackedBody | None: ...


class NoScene(RuntimeError):
    """The environment has a scene, but cannot show it in this configuration."""


def view_of(places: Array) -> Viewpoint:
    """A viewpoint from the front and above that shows all `places` [N, 3]."""
    middle = places.mean(0)
    size = max(float(np.linalg.norm(places - middle, axis=1).max()), 0.5)
    return Viewpoint(middle + size * np.array([2.0, -2.5, 1.2]), middle)
