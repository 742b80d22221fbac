"""The viewpoint of everyone who looks at the page; farther away on a narrow screen."""

from __future__ import annotations

import numpy as np
from viser import CameraHandle, ClientHandle, InitialCameraConfig, ViserServer

from embodied.viewer.scene.types import Array, Viewpoint

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
