"""A scene as viser nodes: a frame for each body, its shapes below it, poses sent per frame.

/world                     moved against the followed body
/world/BODY                pose of the body (position, quaternion)
/world/BODY/SHAPE          a mesh, fixed in the body
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from viser import (
    CameraHandle,
    ClientHandle,
    FrameHandle,
    ImageHandle,
    InitialCameraConfig,
    MeshHandle,
    ViserServer,
)

from embodied.viewer.scene.types import Array, SceneModel, Shape, Viewpoint

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
            x, y, z = self.offset
            if self.follow and self.followed is not None:
                x, y, z = self.offset - places[self.followed.body] * self.followed.along
            self.root.position = float(x), float(y), float(z)
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
        return self.frames[body]

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


Picture = NDArray[np.uint8]
HEIGHT = 1.0
IMAGE_FOV = 0.6
FILL = 0.94
"""Share of the window that the image takes."""
UPRIGHT = (0.5**0.5, -(0.5**0.5), 0.0, 0.0)
"""Quaternion that puts an image's columns along x and its rows down."""


class ImagePlane:
    """The node `/picture`; `show` replaces its image."""

    def __init__(self, server: ViserServer, picture: Picture) -> None:
        self.server = server
        self.picture = self._add(picture)
        self._aim(server.initial_camera, 1.0)
        server.on_client_connect(self._fit)

    def show(self, picture: Picture) -> None:
        """Send `picture` [H, W, 3]; another size replaces the node."""
        if picture.shape == self.picture.image.shape:
            self.picture.image = picture
        else:
            self.picture = self._add(picture)

    def _fit(self, client: ClientHandle) -> None:
        """Fit the camera of `client` to its window now, and whenever its aspect ratio changes."""
        aspects: list[float] = []

        @client.camera.on_update
        def moved(camera: CameraHandle) -> None:
            if aspects[-1:] != [camera.aspect]:
                aspects.append(camera.aspect)
                self._aim(camera, camera.aspect)

    def _aim(self, camera: InitialCameraConfig | CameraHandle, aspect: float) -> None:
        """Put the camera where the image fits the narrower side of the window."""
        size = max(HEIGHT, self.picture.render_width / aspect)
        distance = size / 2 / np.tan(IMAGE_FOV / 2) / FILL
        camera.position, camera.look_at = (0.0, -distance, 0.0), (0.0, 0.0, 0.0)
        camera.fov = IMAGE_FOV

    def _add(self, picture: Picture) -> ImageHandle:
        high, wide = picture.shape[:2]
        # A node of the same name replaces the previous one.
        return self.server.scene.add_image(
            "/picture", picture, HEIGHT * wide / high, HEIGHT, jpeg_quality=92, wxyz=UPRIGHT
        )


FOV, ASPECT, BETWEEN = np.deg2rad(75.0), 1.6, 0.55
"""viser's vertical field of view (rad); a window's width by its height; the part of its width that
is between the panels."""
ABOVE = 0.5
"""Where the scene's centre is on a narrow screen, from the middle (0) to the top (1): the controls
cover the lower part."""


class SceneCameras:
    """`set` moves the cameras of clients that are connected and of those to come."""

    def __init__(self, server: ViserServer) -> None:
        self.server = server
        self.eye: Viewpoint | None = None
        server.on_client_connect(self._connected)

    def set(self, eye: Viewpoint) -> None:
        self.eye = eye
        turn(self.server.initial_camera, eye)
        for client in self.server.get_clients().values():
            turn(client.camera, fitted(eye, client.camera.aspect))

    def _connected(self, client: ClientHandle) -> None:
        if self.eye is not None:
            turn(client.camera, fitted(self.eye, client.camera.aspect))
        client.camera.on_update(self._moved)

    def _moved(self, camera: CameraHandle) -> None:
        """A page may take the viewpoint that is sent to all clients after its own: once more."""
        eye = self.eye
        if eye is None or camera.aspect >= 1.0:
            return
        if np.allclose(camera.position, eye.place, atol=1e-3):
            turn(camera, fitted(eye, camera.aspect))


def turn(camera: InitialCameraConfig | CameraHandle, eye: Viewpoint) -> None:
    camera.position, camera.look_at = eye.place, eye.target
    if eye.fov is not None:
        camera.fov = eye.fov


def fitted(eye: Viewpoint, aspect: float) -> Viewpoint:
    """`eye` for a window of `aspect` (width by height): on one that is higher than wide, as much is
    visible from side to side as between the panels of a wide one, above the controls."""
    if aspect >= 1.0:
        return eye
    offset = (eye.place - eye.target) * max(1.0, ASPECT * BETWEEN / aspect)
    far = float(np.linalg.norm(offset))
    right = np.cross(-offset, (0.0, 0.0, 1.0))
    up = np.cross(right, -offset)
    down: Array = -up / max(float(np.linalg.norm(up)), 1e-9) * (ABOVE * far * tangent(eye.fov))
    target = eye.target + down
    return Viewpoint(target + offset, target, eye.fov)


def of_both(eye: Viewpoint, step: Array) -> Viewpoint:
    """From where two scenes `step` [3] apart both fit between the panels; `eye` is for one."""
    offset, target = eye.place - eye.target, eye.target + step / 2
    far = float(np.linalg.norm(step)) / (tangent(eye.fov) * ASPECT * BETWEEN)
    offset = offset * max(1.35, far / float(np.linalg.norm(offset)))
    return Viewpoint(target + offset, target, eye.fov)


def tangent(fov: float | None) -> float:
    """Half the visible height by the distance."""
    return float(np.tan((FOV if fov is None else fov) / 2))
