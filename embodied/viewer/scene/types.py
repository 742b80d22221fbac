"""SceneModel: the protocol by which the page draws the 3D scene of any physics engine; its meshes
and images, and how meshes become smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trimesh import Trimesh
from trimesh.graph import smooth_shade

from embodied.core.spec import Leaf

Vertices = NDArray[np.float32]
Faces = NDArray[np.uint32]
Mesh = tuple[Vertices, Faces]
"""Vertices [V, 3] (m) and faces [F, 3], counter-clockwise from outside."""
Picture = NDArray[np.uint8]
SMALL = 160
"""Images below this height (pixels) are enlarged by a whole factor."""
PLAIN = (90, 90, 100)


def is_picture(leaf: Leaf) -> bool:
    flat = len(leaf.shape) == 3 and leaf.shape[2] == 1 and min(leaf.shape[:2]) >= 16
    return leaf.is_image or (flat and not leaf.is_symbol)


def is_cloud(name: str, leaf: Leaf) -> bool:
    marked = getattr(leaf, "is_points", False) or name.rpartition("/")[2] == "points"
    return marked and len(leaf.shape) == 2 and leaf.shape[1] >= 3


def picture_of(value: Tensor, leaf: Leaf) -> Picture:
    """One value [H, W, C] of a leaf as uint8 [H, W, 3], enlarged if it is small.

    Of stacked frames the last is shown; one channel is grey, depth from near (dark) to far.
    """
    shown = value.cpu()
    if not leaf.is_image:
        finite = torch.nan_to_num(shown.float(), posinf=0.0, neginf=0.0)
        low, high = finite.min(), finite.max()
        shown = ((finite - low) / (high - low).clamp(min=1e-9) * 255).to(torch.uint8)
    channels = shown.shape[2]
    shown = shown[..., -3:] if channels >= 3 and channels % 3 == 0 else shown[..., :1]
    times = -(-SMALL // shown.shape[0])
    shown = shown.repeat_interleave(times, 0).repeat_interleave(times, 1)
    return shown.expand(-1, -1, 3).contiguous().numpy()


def cloud_of(value: Tensor) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Positions [N, 3] (m) and colours [N, 3] of a point cloud [N, 3 or more]; columns 3 to 5 are
    RGB in [0, 1]."""
    rows = value.cpu().float()
    places = rows[:, :3].numpy()
    if rows.shape[1] < 6:
        return places, np.broadcast_to(np.array(PLAIN, np.uint8), places.shape)
    colours = (rows[:, 3:6].clamp(0, 1) * 255).round().to(torch.uint8)
    return places, colours.numpy()


SMALL_MESH = 600
"""Meshes with up to this many triangles are left unchanged."""
CELLS = 44
"""Cells along the diagonal of a mesh."""
CREASE = np.radians(40.0)
"""Angle between faces above which their edge is kept sharp."""


# Mesh decimation by vertex clustering (Rossignac and Borrel, 1993).
# Robot meshes have hundreds of thousands of triangles, too many for a phone or a computer without a
# GPU to draw smoothly.
def lighter(mesh: Mesh, cells: int = CELLS) -> Mesh:
    """`mesh` decimated to a few thousand triangles at most. The vertices along sharp edges are
    there twice, so that averaged normals keep them sharp."""
    vertices, faces = mesh
    made = clustered(vertices, faces, cells) if len(faces) > SMALL_MESH else None
    made = Trimesh(vertices, faces, process=False) if made is None else made
    made = smooth_shade(made, angle=CREASE)
    return np.asarray(made.vertices, np.float32), np.asarray(made.faces, np.uint32)


def clustered(vertices: Vertices, faces: Faces, cells: int) -> Trimesh | None:
    """With the vertices of each cell merged into their mean; None where no triangle is left."""
    low = vertices.min(0)
    size = float(np.linalg.norm(vertices.max(0) - low)) / cells
    cell = np.floor((vertices - low) / max(size, 1e-12)).astype(np.int64)
    number = (cell[:, 0] * (cells + 2) + cell[:, 1]) * (cells + 2) + cell[:, 2]
    _, where, count = np.unique(number, return_inverse=True, return_counts=True)
    places = np.stack([np.bincount(where, axis) for axis in vertices.T], 1) / count[:, None]
    made = Trimesh(places, where[faces], process=False)
    made.update_faces(made.nondegenerate_faces() & made.unique_faces())
    return made if len(made.faces) else None


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
    default), and the positions [N, 3] (m) that a window of any shape should show, if known; shapes
    reach `around` them, a share of the largest side of the positions."""

    place: Array
    target: Array
    fov: float | None = None
    seen: Array | None = None
    around: float = 0.2


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

    def shapes(self) -> Iterable[Shape]: ...

    def viewpoint(self) -> Viewpoint: ...

    def tracked_body(self) -> TrackedBody | None: ...


class NoScene(RuntimeError):
    """The environment has a scene, but cannot show it in this configuration."""


def view_of(places: Array) -> Viewpoint:
    """A viewpoint from the front and above that shows all `places` [N, 3]."""
    middle = places.mean(0)
    size = max(float(np.linalg.norm(places - middle, axis=1).max()), 0.5)
    return Viewpoint(middle + size * np.array([2.0, -2.5, 1.2]), middle, seen=places)
