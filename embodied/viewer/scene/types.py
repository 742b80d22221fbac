"""What the page needs of a world's scene to draw it in 3D, whichever engine holds it."""

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
    """One thing that is fixed in body number `body`, there at `place` (m), turned by `turn` (w, x,
    y, z). Shapes of equal `style` look the same; `mesh` makes its triangles, or None where there is
    no way to draw it. `lines` are the sides (m) of a floor that gets lines, or nothing would tell
    that a walker moves.
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
class Eye:
    """Where to look from: `place` and `target` (m), field of view (rad; None: the page's own)."""

    place: Array
    target: Array
    fov: float | None = None


@dataclass(frozen=True)
class Followed:
    """The body that the eye goes along with, in the axes that are 1 in `along` (x, y, z)."""

    body: int
    along: tuple[float, float, float]


class Look(Protocol):
    """The scene of one world as bodies that move and shapes that are fixed in them."""

    def bodies(self) -> Sequence[str]:
        """Their names, unique; other names mean another scene."""
        ...

    def poses(self) -> tuple[Array, Array]:
        """Place [N, 3] (m) and turn [N, 4] (w, x, y, z) of every body, now."""
        ...

    def shapes(self) -> Iterable[Shape]:
        """All that can be seen."""
        ...

    def eye(self) -> Eye: ...

    def followed(self) -> Followed | None: ...


class NoScene(RuntimeError):
    """This kind of world has a scene, but as it is set up there is none here."""


def around(places: Array) -> Eye:
    """A view from in front and above that has all `places` [N, 3] in it."""
    middle = places.mean(0)
    size = max(float(np.linalg.norm(places - middle, axis=1).max()), 0.5)
    return Eye(middle + size * np.array([2.0, -2.5, 1.2]), middle)
