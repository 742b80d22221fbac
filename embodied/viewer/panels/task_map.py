"""The controls for the task map, and the map in the scene."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import ViserServer

from embodied.teachers import episode_log
from embodied.viewer.controls import Controls
from embodied.viewer.panels.task_image import Axis, Board, map_picture, meant
from embodied.viewer.scene.types import Eye

NODE = "/task_map"


class MapPanel:
    """For tasks of two elements or more; it is made in the folder that is open. Sliders and clicks
    set the same task."""

    def __init__(
        self, server: ViserServer, viewer: Controls, ranges: list[tuple[str, float, float, str]]
    ) -> None:
        self.server, self.viewer, self.session = server, viewer, viewer.session
        self.axes = {each[0]: Axis(i, *each) for i, each in enumerate(ranges)}
        self.board: Board | None = None
        self._last: tuple[Any, ...] = ()
        self.there = len(self.axes) > 1
        if not self.there:
            return
        first, second, *_ = names = tuple(self.axes)
        gui = server.gui
        self.switch = gui.add_checkbox("Map", False, hint="in the scene; a click on it is a task")
        self.across = gui.add_dropdown("Across", names, initial_value=first, visible=False)
        self.up = gui.add_dropdown("Up", names, initial_value=second, visible=False)
        run = self.session.run
        past = None if run is None else episode_log.read(run.folder)
        self.sampled = None if past is None else past.task
        for control in (self.switch, self.across, self.up):
            control.on_update(lambda _: viewer.press(lambda: viewer.redraw()))

    def draw(self) -> None:
        """The map as it is now, while it is switched on."""
        if not self.there:
            return
        task = self.session.drawn_task
        now = (self.switch.value, self.across.value, self.up.value, str(task))
        if now == self._last:
            return
        self._last = now
        self.across.visible = self.up.visible = self.switch.value
        if not self.switch.value:
            self.server.scene.remove_by_name(NODE)
            self.board = None
            return
        picture = map_picture(
            self.axes[self.across.value], self.axes[self.up.value], task, self.sampled
        )
        if self.board is None:
            self._hang(picture)
        else:
            self.image.image = picture

    def _hang(self, picture: np.ndarray) -> None:
        camera = self.server.initial_camera
        self.board = board = Board.beside(Eye(camera.position, camera.look_at))
        self.image = self.server.scene.add_image(
            NODE, picture, board.side, board.side, wxyz=board.turn, position=board.middle
        )

        async def clicked(event: Any) -> None:
            place = board.hit(np.array(event.ray_origin), np.array(event.ray_direction))
            wanted = None if place is None else meant(*place)
            if wanted is not None:
                self.viewer.press(lambda: self.pick(*wanted))

        self.image.on_click(clicked)

    def pick(self, x: float, y: float) -> None:
        """Begin again with the running task, but for the elements across and up, in [0, 1]."""
        drawn = self.session.drawn_task
        task = [0.5] * len(self.axes) if drawn is None else list(drawn)
        task[self.axes[self.across.value].number] = x
        task[self.axes[self.up.value].number] = y
        self.viewer.set_task(task)
