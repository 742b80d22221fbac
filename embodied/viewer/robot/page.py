"""The page of a deployment: the arm as measured, its plan, how it is; nothing can be pressed."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import ViserServer

from embodied.viewer.panels.page import Refresh
from embodied.viewer.panels.plans import CHOSEN, GONE, segments
from embodied.viewer.panels.plots import plot
from embodied.viewer.robot.arm import DeployedArm
from embodied.viewer.robot.describe import figures, headline, notes
from embodied.viewer.robot.history import PLOTS, Past
from embodied.viewer.robot.monitor import Deployed
from embodied.viewer.scene.shapes import ball
from embodied.viewer.scene.types import Array, around
from embodied.viewer.scene.viser_scene import Scene

ROOT, RADIUS = "/world", 0.012
PLAN, TRAIL = "/paths/plan", "/paths/trail"
LINES = {PLAN: (CHOSEN, 5.0), TRAIL: (GONE, 2.5)}
MARK, TOOL = (22, 163, 74), (213, 94, 0)


class DeployedPage:
    """`begin` with every deployment, `changed` when there is something new, `refresh` often."""

    def __init__(self, server: ViserServer, seen: Deployed) -> None:
        self.server, self.seen = server, seen
        self.arm: DeployedArm | None = None
        self.past, self.scene = Past(()), None
        self.plots: dict[str, Any] = {}
        self.lines: list[str] = []
        self.marks: dict[str, Any] = {}
        self.lacks = ""
        self.head = server.gui.add_markdown("")
        self.figures = server.gui.add_markdown("")
        self.folder: Any = None
        panel = server.gui.add_panel()
        with panel.add_tab("Notes"):
            self.notes = server.gui.add_markdown("")
        self.parts = [
            Refresh(self._draw_scene, 1 / 25, share=0.3),
            Refresh(self._draw_paths, 0.1),
            Refresh(self._draw_words, 0.25),
            Refresh(self._draw_plots, 0.5),
        ]

    def begin(self) -> None:
        """Another deployment: perhaps of another arm, with other stages."""
        about = self.seen.deployment
        assert about is not None
        self.past, self.arm, self.lacks = Past(self.seen.stages), None, ""
        self._begin_plots()
        self._clear()
        try:
            self.arm = DeployedArm(about)
        except Exception as error:  # whatever a robot's own files raise; its numbers are shown
            self.lacks = f"it cannot be drawn: {str(error) or type(error).__name__}"
        else:
            self.lacks = self.arm.lacks

    def add(self) -> None:
        """Take note of a tick."""
        state = self.seen.state
        if state is not None:
            tool = None if self.arm is None else self.arm.tool(state)
            self.past.add(state, self.seen.chunk, tool)

    def changed(self) -> None:
        for part in self.parts:
            part.stale = True

    def refresh(self, force: bool = False) -> None:
        """Draw what is stale and due."""
        for part in self.parts:
            part(force)

    def words(self) -> str:
        """All that is said, for who does not look at the page."""
        return "\n".join((self.head.content, self.figures.content, self.notes.content))

    def _begin_plots(self) -> None:
        if self.folder is not None:
            self.folder.remove()
        self.folder = self.server.gui.add_folder("The last two minutes")
        stages = list(self.past.stages)
        with self.folder:
            title = "interventions (% of ticks)"
            self.acted = plot(self.server, title, stages, 150, None)
            self.plots = {name: plot(self.server, name, [name], 110, None) for name in PLOTS}

    def _clear(self) -> None:
        if self.scene is not None:
            self.scene.root.remove()
        for name in self.lines:
            self.server.scene.remove_by_name(name)
        for mark in self.marks.values():
            mark.remove()
        self.scene, self.lines, self.marks = None, [], {}

    def _draw_scene(self) -> None:
        state, arm = self.seen.state, self.arm
        if state is None or arm is None:
            return
        marks = arm.put(state)
        if arm.look is None:
            marks["tool"] = arm.tool(state)
        if self.scene is None and arm.look is not None:
            self.scene = Scene(self.server, arm.look, ROOT)
            self._aim(arm)
        elif self.scene is not None and arm.look is not None:
            self.scene.show(*arm.look.poses())
        for name, place in marks.items():
            self._mark(name, place)

    def _draw_paths(self) -> None:
        state, arm = self.seen.state, self.arm
        if state is None or arm is None:
            return
        plan = arm.plan(state, self.seen.chunk) if self.seen.alive else None
        self._line(PLAN, plan)
        self._line(TRAIL, self.past.trail())

    def _aim(self, arm: DeployedArm) -> None:
        assert arm.look is not None
        eye, camera = arm.look.eye(), self.server.initial_camera
        if np.linalg.norm(eye.place - eye.target) > 3.0:
            eye = around(arm.look.poses()[0][1:])
        views = [camera, *(client.camera for client in self.server.get_clients().values())]
        for view in views:  # of those who come, and of those who are there
            view.position, view.look_at = eye.place, eye.target
            if eye.fov is not None:
                view.fov = eye.fov

    def _mark(self, name: str, place: Array) -> None:
        if name in self.marks:
            self.marks[name].position = place
            return
        node, colour = f"/marks/{name.replace('/', '.')}", TOOL if name == "tool" else MARK
        made = self.server.scene.add_mesh_simple(node, *ball(RADIUS), color=colour, position=place)
        self.marks[name] = made

    def _line(self, name: str, path: Array | None) -> None:
        if path is None or len(path) < 2:
            if name in self.lines:
                self.lines.remove(name)
                self.server.scene.remove_by_name(name)
            return
        colour, width = LINES[name]
        self.server.scene.add_line_segments(
            name, segments([path]), colour, thickness=width, thickness_units="screen"
        )
        if name not in self.lines:
            self.lines.append(name)

    def _draw_words(self) -> None:
        rate = self.past.curve(PLOTS[0])[-1]
        self.head.content = headline(self.seen)
        self.figures.content = "\n\n".join(filter(None, (figures(self.seen, rate), self.lacks)))
        self.notes.content = notes(self.seen)

    def _draw_plots(self) -> None:
        if not self.past.rows:
            return
        times = self.past.times()
        self.acted.data = (times, *(self.past.acted(stage) for stage in self.past.stages))
        for name, handle in self.plots.items():
            handle.data = (times, self.past.curve(name))
