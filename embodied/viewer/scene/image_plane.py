"""A picture large in the page, for worlds without a scene in 3D: a plane with the eye before it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from viser import CameraHandle, ClientHandle, ImageHandle, InitialCameraConfig, ViserServer

Picture = NDArray[np.uint8]
HEIGHT = 1.0
FOV = 0.6
FILLS = 0.94
"""Share of the window that the picture takes."""
UPRIGHT = (0.5**0.5, -(0.5**0.5), 0.0, 0.0)
"""Columns of a picture along x, its rows down."""


class Screen:
    """The node `/picture`; `show` puts another picture there."""

    def __init__(self, server: ViserServer, picture: Picture) -> None:
        self.server = server
        self.picture = self._hang(picture)
        self._aim(server.initial_camera, 1.0)
        server.on_client_connect(self._fit)

    def show(self, picture: Picture) -> None:
        """Send `picture` [H, W, 3]; another form than before is hung anew."""
        if picture.shape == self.picture.image.shape:
            self.picture.image = picture
        else:
            self.picture = self._hang(picture)

    def _fit(self, client: ClientHandle) -> None:
        """Fill the window of `client` now, and whenever its form changes."""
        aspects: list[float] = []

        @client.camera.on_update
        def moved(camera: CameraHandle) -> None:
            if aspects[-1:] != [camera.aspect]:
                aspects.append(camera.aspect)
                self._aim(camera, camera.aspect)

    def _aim(self, camera: InitialCameraConfig | CameraHandle, aspect: float) -> None:
        """Before the picture, as far away as the narrower side of the window asks for."""
        size = max(HEIGHT, self.picture.render_width / aspect)
        distance = size / 2 / np.tan(FOV / 2) / FILLS
        camera.position, camera.look_at = (0.0, -distance, 0.0), (0.0, 0.0, 0.0)
        camera.fov = FOV

    def _hang(self, picture: Picture) -> ImageHandle:
        high, wide = picture.shape[:2]
        # A node of the same name replaces the one before.
        return self.server.scene.add_image(
            "/picture", picture, HEIGHT * wide / high, HEIGHT, jpeg_quality=92, wxyz=UPRIGHT
        )
