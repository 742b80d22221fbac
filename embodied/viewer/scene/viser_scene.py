"""A scene as viser nodes: a frame for each body, its shapes below it, poses sent per frame.

/world                     moved against the followed body
/world/BODY                pose of the body (position, quaternion)
/world/BODY/SHAPE          a mesh, fixed in the body
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from viser import FrameHandle, MeshHandle, ViserServer

from embodied.viewer.scene.types import Array, SceneModel, Shape

Key = tuple[int, str]
Place = tuple[float, float, float]


class ViserScene:
    """The viser nodes of one scene; `show` sends poses, `restyle` changed shapes.

    A second scene has another `root` and stands at `offset` (m) from the first.
    """

    def __init__(
        self,
        server: ViserServer,
        model: SceneModel,
        root: str = "/world",
        offset: Place = (0.0, 0.0, 0.0),
    ) -> None:
        self.server, self.model, self.follow = server, model, False
        self.path, self.offset = root, offset
        self.root = server.scene.add_frame(root, show_axes=False, position=offset)
        self.followed = model.tracked_body()
        self.bodies: list[str] = []
        self.names: list[str] = []
        self.frames: list[FrameHandle] = []
        self.meshes: dict[Key, MeshHandle] = {}
        self.styles: dict[Key, bytes] = {}
        self.undrawn = 0
        self.mesh_callback: Callable[[int, MeshHandle], None] | None = None
        self._sent: tuple[Array, Array] | None = None
        self.restyle()
        self.show(*model.poses())

    def restyle(self) -> None:
        """Draw new and changed shapes; remove those that are gone."""
        bodies = list(self.model.bodies())
        if bodies != self.bodies:
            for frame in self.frames:
                frame.remove()
            self.meshes.clear()
            self.styles.clear()
            self._sent = None
            self.bodies, self.names = bodies, [f"{self.path}/{_node(body)}" for body in bodies]
            scene = self.server.scene
            self.frames = [scene.add_frame(name, show_axes=False) for name in self.names]
        shapes = {(shape.body, shape.name): shape for shape in self.model.shapes()}
        for key in self.styles.keys() - shapes.keys():
            del self.styles[key]
            if key in self.meshes:
                self.meshes.pop(key).remove()
        for key, shape in shapes.items():
            if self.styles.get(key) != shape.style:
                self._draw(key, shape)
                self.styles[key] = shape.style
        self.undrawn = len(self.styles) - len(self.meshes)

    def show(self, places: Array, turns: Array) -> None:
        """Send the positions [N, 3] and quaternions [N, 4] of the bodies that moved."""
        before = self._sent
        with self.server.atomic():
            for body, frame in enumerate(self.frames):
                if before is None or np.abs(places[body] - before[0][body]).max() > 1e-6:
                    frame.position = places[body]
                if before is None or np.abs(turns[body] - before[1][body]).max() > 1e-6:
                    frame.wxyz = turns[body]
            self.root.position = self._offset(places)
        self._sent = places, turns

    def on_mesh(self, drawn: Callable[[int, MeshHandle], None]) -> None:
        """Call `drawn` with the body number and the handle of every mesh, present and future."""
        self.mesh_callback = drawn
        for (body, _), mesh in self.meshes.items():
            drawn(body, mesh)

    def place(self, body: int) -> Array | None:
        """The displayed position of a body [3] (m), in its own environment's frame."""
        return None if self._sent is None else self._sent[0][body]

    def frame(self, body: int) -> FrameHandle:
        """The node of one body."""
        return self.frames[body]

    def _offset(self, places: Array) -> Place:
        if not self.follow or self.followed is None:
            return self.offset
        x, y, z = self.offset - places[self.followed.body] * self.followed.along
        return float(x), float(y), float(z)

    def _draw(self, key: Key, shape: Shape) -> None:
        mesh = shape.mesh()
        if mesh is None:
            return
        red, green, blue, alpha = shape.rgba
        name = f"{self.names[shape.body]}/{_node(shape.name)}"
        # A node of the same name replaces the previous one.
        self.meshes[key] = self.server.scene.add_mesh_simple(
            name,
            *mesh,
            color=(round(255 * red), round(255 * green), round(255 * blue)),
            opacity=None if alpha >= 1 else alpha,
            position=shape.place,
            wxyz=shape.turn,
        )
        if self.mesh_callback is not None:
            self.mesh_callback(shape.body, self.meshes[key])
        if shape.lines is not None:
            self.server.scene.add_grid(
                f"{name}/lines",
                *shape.lines,
                cell_thickness=0.0,
                section_color=(150, 150, 150),
                fade_distance=25.0,
                position=(0.0, 0.0, 0.002),
            )


def _node(name: str) -> str:
    """A name without the path separator."""
    return name.replace("/", ".")
