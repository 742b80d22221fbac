"""ImagePlane: an image as large as the page, for environments without a 3D scene."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from viser import CameraHandle, ClientHandle, ImageHandle, InitialCameraConfig, ViserServer

Picture = NDArray[np.uint8]
HEIGHT = 1.0
FOV = 0.6
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
        distance = size / 2 / np.tan(FOV / 2) / FILL
        camera.position, camera.look_at = (0.0, -distance, 0.0), (0.0, 0.0, 0.0)
        camera.fov = FOV

    def _add(self, picture: Picture) -> ImageHandle:
        high, wide = picture.shape[:2]
        # A node of the same name replaces the previous one.
        return self.server.scene.add_image(
            "/picture", picture, HEIGHT * wide / high, HEIGHT, jpeg_quality=92, wxyz=UPRIGHT
        )
