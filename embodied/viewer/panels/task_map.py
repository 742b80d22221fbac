"""The controls of the task map, and the map in the scene."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import ViserServer

from embodied.teachers import episode_log
from embodied.viewer.controls import Controls
from embodied.viewer.panels.task_image import MapAxis, MapPlane, map_picture, task_at
from embodied.viewer.scene.types import Viewpoint

NODE = "/task_map"


class MapPanel:
    """For tasks of two or more elements; it is added to the open folder. Sliders and clicks set the
    same task."""

    def __init__(
        self, server: ViserServer, viewer: Controls, ranges: list[tuple[str, float, float, str]]
    ) -> None:
        self.server, self.viewer, self.session = server, viewer, viewer.session
        self.axes = {each[0]: MapAxis(i, *each) for i, each in enumerate(ranges)}
        self.plane: MapPlane | None = None
        self._last: tuple[Any, ...] = ()
        self.available = len(self.axes) > 1
        if not self.available:
            return
        first, second, *_ = names = tuple(self.axes)
        gui = server.gui
        self.switch = gui.add_checkbox(
            "Map", False, hint="in the scene; click on it to set the task"
        )
        self.across = gui.add_dropdown("Across", names, initial_value=first, visible=False)
        self.up = gui.add_dropdown("Up", names, initial_value=second, visible=False)
        run = self.session.run
        past = None if run is None else episode_log.read(run.folder)
        self.sampled = None if past is None else past.task
        for control in (self.switch, self.across, self.up):
            control.on_update(lambda _: viewer.press(lambda: viewer.redraw()))

    def draw(self) -> None:
        """Update the map while it is switched on."""
        if not self.available:
            return
        task = self.session.current_task
        now = (self.switch.value, self.across.value, self.up.value, str(task))
        if now == self._last:
            return
        self._last = now
        self.across.visible = self.up.visible = self.switch.value
        if not self.switch.value:
            self.server.scene.remove_by_name(NODE)
            self.plane = None
            return
        picture = map_picture(
            self.axes[self.across.value], self.axes[self.up.value], task, self.sampled
        )
        if self.plane is None:
            self._add_image(picture)
        else:
            self.image.image = picture

    def _add_image(self, picture: np.ndarray) -> None:
        camera = self.server.initial_camera
        self.plane = plane = MapPlane.beside(Viewpoint(camera.position, camera.look_at))
        self.image = self.server.scene.add_image(
            NODE, picture, plane.side, plane.side, wxyz=plane.turn, position=plane.middle
        )

        async def clicked(event: Any) -> None:
            place = plane.hit(np.array(event.ray_origin), np.array(event.ray_direction))
            wanted = None if place is None else task_at(*place)
            if wanted is not None:
                self.viewer.press(lambda: self.pick(*wanted))

        self.image.on_click(clicked)

    def pick(self, x: float, y: float) -> None:
        """Restart with the current task, but with the elements across and up set to values in [0,
        1]."""
        current = self.session.current_task
        task = [0.5] * len(self.axes) if current is None else list(current)
        task[self.axes[self.across.value].number] = x
        task[self.axes[self.up.value].number] = y
        self.viewer.set_task(task)
