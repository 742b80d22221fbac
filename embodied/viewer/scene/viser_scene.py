"""A scene as viser nodes: a frame for each body, its shapes below it, poses sent per frame.

/world                     moved against the followed body
/world/BODY                pose of the body (position, quaternion)
/world/BODY/SHAPE          a mesh, fixed in the body
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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
ROOT = "/world"


class ViserScene:
    """The viser nodes of one scene; `show` sends poses, `restyle` changed shapes."""

    def __init__(self, server: ViserServer, model: SceneModel) -> None:
        self.server, self.model, self.follow = server, model, False
        self.root = server.scene.add_frame(ROOT, show_axes=False)
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
            self.bodies, self.names = bodies, [f"{ROOT}/{_node(body)}" for body in bodies]
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
            origin = np.zeros(3)
            if self.follow and self.followed is not None:
                origin = -places[self.followed.body] * self.followed.along
            self.root.position = origin
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
HEIGHT, IMAGE_FOV = 1.0, 0.6  # m, rad
UPRIGHT = (0.5**0.5, -(0.5**0.5), 0.0, 0.0)
"""Quaternion that puts an image's columns along x and its rows down."""


class ImagePlane:
    """The node `/picture`; `show` replaces its image."""

    def __init__(self, server: ViserServer, picture: Picture) -> None:
        self.server = server
        self.picture = self._add(picture)

    def viewpoint(self) -> Viewpoint:
        """In front of the image; its corners are seen in a window of any shape."""
        half = np.array([self.picture.render_width, 0.0, self.picture.render_height]) / 2
        corners = np.array([-half, half])
        return Viewpoint(np.array([0.0, -2.0, 0.0]), np.zeros(3), IMAGE_FOV, corners, 0.0)

    def show(self, picture: Picture) -> None:
        """Send `picture` [H, W, 3]; another size replaces the node."""
        if picture.shape == self.picture.image.shape:
            self.picture.image = picture
        else:
            self.picture = self._add(picture)

    def _add(self, picture: Picture) -> ImageHandle:
        high, wide = picture.shape[:2]
        # A node of the same name replaces the previous one.
        return self.server.scene.add_image(
            "/picture", picture, HEIGHT * wide / high, HEIGHT, jpeg_quality=92, wxyz=UPRIGHT
        )


FOV = np.deg2rad(75.0)
"""viser's vertical field of view (rad)."""
FILL = 0.92
"""Share of the window that what should be seen takes at most."""
SIDES = 0.9
"""Where it is not known: half the width that is visible by half the height at the viewpoint."""
PHONE, COVERED = 576, 0.45
"""Width (pixels) up to which viser draws the controls over the scene, and the share of the window,
from below, that they cover."""
ECHO = 0.5
"""Seconds in which a camera that was turned with another one reports where it has been."""


@dataclass
class Aim:
    """What the camera of one client was told: the last places, for which aspect, and when (s); and
    whether its user has turned it since."""

    places: list[Array]
    aspect: float
    time: float
    turned: bool = False

    def explains(self, place: Array) -> bool:
        """Whether the client may report `place` without its user: it was told so, or just now."""
        told = any(np.allclose(place, each, atol=1e-3) for each in self.places[-3:])
        return told or time.monotonic() - self.time < ECHO


class SceneCameras:
    """`set` moves the cameras of clients that are connected and of those to come; who has not
    turned his camera keeps the scene in his window, whatever its shape becomes.

    The window is one of `halves` beside each other. Where one browser is open, the camera of `mate`
    turns with this one.
    """

    def __init__(self, server: ViserServer, halves: int = 1) -> None:
        self.server, self.halves = server, halves
        self.eye: Viewpoint | None = None
        self.mate: SceneCameras | None = None
        self.aims: dict[int, Aim] = {}  # by client
        server.on_client_connect(self._connected)

    def set(self, eye: Viewpoint) -> None:
        self.eye = eye
        self.aims.clear()
        turn(self.server.initial_camera, eye)
        for client in self.server.get_clients().values():
            self._aim(client)

    def follow(self, camera: CameraHandle) -> None:
        """Turn the camera of the only client as `camera` is."""
        clients = list(self.server.get_clients().values())
        if len(clients) == 1 and (aim := self.aims.get(clients[0].client_id)) is not None:
            aim.places.append(camera.position)
            aim.time, aim.turned = time.monotonic(), True
            clients[0].camera.position = camera.position
            clients[0].camera.look_at = camera.look_at

    def _connected(self, client: ClientHandle) -> None:
        self._aim(client)
        client.camera.on_update(lambda _: self._moved(client))

    def _aim(self, client: ClientHandle) -> None:
        if self.eye is None:
            return
        camera = client.camera
        covered = COVERED if camera.image_width * self.halves <= PHONE else 0.0
        eye = fitted(self.eye, camera.aspect, covered)
        before = self.aims.get(client.client_id)
        places = [self.eye.place] if before is None else before.places
        self.aims[client.client_id] = Aim([*places, eye.place], camera.aspect, time.monotonic())
        turn(camera, eye)

    def _moved(self, client: ClientHandle) -> None:
        camera, aim = client.camera, self.aims.get(client.client_id)
        if self.eye is None or aim is None:
            return
        # A page may take the viewpoint that is sent to all clients after its own.
        late = np.allclose(camera.position, self.eye.place, atol=1e-3)
        late = late and not np.allclose(aim.places[-1], self.eye.place, atol=1e-3)
        if not aim.turned and (camera.aspect != aim.aspect or late):
            self._aim(client)
        elif not aim.explains(camera.position):
            aim.turned = True
            if self.mate is not None and len(self.server.get_clients()) == 1:
                self.mate.follow(camera)


def turn(camera: InitialCameraConfig | CameraHandle, eye: Viewpoint) -> None:
    camera.position, camera.look_at = eye.place, eye.target
    if eye.fov is not None:
        camera.fov = eye.fov


def fitted(eye: Viewpoint, aspect: float, covered: float = 0.0) -> Viewpoint:
    """`eye` as far away, in its direction, as what should be seen needs in a window of `aspect`
    (width by height); in the middle of the part above the lower one that is `covered`."""
    offset = eye.place - eye.target
    far = float(np.linalg.norm(offset))
    ahead = -offset / far
    right = np.cross(ahead, (0.0, 0.0, 1.0))
    right = right / max(float(np.linalg.norm(right)), 1e-9)
    axes = np.stack([right, np.cross(right, ahead), ahead])
    target, half = eye.target, tangent(eye.fov) * (1.0 - covered)
    if eye.seen is None:
        far *= max(1.0, SIDES / aspect, 1.0 / (1.0 - covered))
    else:
        places = (eye.seen - target) @ axes.T
        middle = (places.min(0) + places.max(0)) / 2
        target = target + middle @ axes
        across, up, deeper = (places - middle).T
        around = eye.around * float(np.ptp(places, axis=0).max())
        wide, high = np.abs(across) + around, np.abs(up) + around
        sides = np.maximum(wide / (tangent(eye.fov) * aspect), high / half)
        far = float((sides / FILL - deeper).max())
    target = target - axes[1] * covered * far * tangent(eye.fov)
    return Viewpoint(target - far * ahead, target, eye.fov)


def tangent(fov: float | None) -> float:
    """Half the visible height by the distance."""
    return float(np.tan((FOV if fov is None else fov) / 2))
