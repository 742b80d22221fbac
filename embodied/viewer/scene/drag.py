"""Dragging bodies and pushing robot links with the mouse.

A free body that is dragged is pulled by the simulation while it plays; a clicked link of the robot
is pushed away from the viewpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from viser import MeshHandle

from embodied.viewer.controls import Controls
from embodied.viewer.scene.viser_scene import ViserScene
from embodied.viewer.session.disturbances import ROBOT
from embodied.viewer.session.player import Player


class DragControls:
    """Mouse handlers on the meshes of `scene`, the scene of `player`."""

    def __init__(
        self, viewer: Controls, scene: ViserScene, player: Player, strength: Callable[[], float]
    ) -> None:
        self.viewer, self.scene, self.player, self.strength = viewer, scene, player, strength
        self.loose = {name for name in player.pushes.names if name != ROBOT}
        self.links = set(player.pushes.links())
        if self.loose or self.links:
            scene.on_mesh(self._attach)

    def _attach(self, body: int, mesh: MeshHandle) -> None:
        name = self.scene.bodies[body].partition("_")[2]
        if name in self.loose:
            self._draggable(body, name, mesh)
        elif name in self.links:
            self._clickable(name, mesh)

    def _draggable(self, body: int, name: str, mesh: MeshHandle) -> None:
        viewer, player = self.viewer, self.player

        # Runs in order on the server's thread, as viser requires for gestures.
        async def dragged(event: Any) -> None:
            shown = self.scene.place(body)
            if event.phase == "end" or shown is None:
                viewer.press(lambda: viewer.let_go(player))
                return
            way = np.subtract(event.end_position, event.start_position)
            place = shown + way
            viewer.press(lambda: viewer.hold(player, name, place))

        mesh.on_drag(dragged)

    def _clickable(self, name: str, mesh: MeshHandle) -> None:
        viewer, player = self.viewer, self.player

        async def clicked(event: Any) -> None:
            way = np.asarray(event.ray_direction, np.float64)
            viewer.press(lambda: viewer.shove(player, name, way, self.strength()))

        mesh.on_click(clicked)
