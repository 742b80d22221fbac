"""The monitoring page of a deployment: measured arm, plan, status; it has no controls."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import ViserServer

from embodied.viewer.panels.page import Refresh
from embodied.viewer.panels.plans import CHOSEN, GONE, segments
from embodied.viewer.panels.plots import plot
from embodied.viewer.robot.arm import RobotArm
from embodied.viewer.robot.describe import figures, headline, notes
from embodied.viewer.robot.history import PLOTS, RobotHistory
from embodied.viewer.robot.monitor import RobotMonitor
from embodied.viewer.scene.cameras import SceneCameras
from embodied.viewer.scene.shapes import ball
from embodied.viewer.scene.types import Array, view_of
from embodied.viewer.scene.viser_scene import ViserScene

ROOT, RADIUS = "/world", 0.012
PLAN, TRAIL = "/paths/plan", "/paths/trail"
LINES = {PLAN: (CHOSEN, 5.0), TRAIL: (GONE, 2.5)}
WRAP = "<style>pre, pre code { white-space: pre-wrap; overflow-wrap: anywhere; }</style>"
"""Text from the deployment is in code blocks, which viser would cut at the panel's edge."""
MARK, TOOL = (22, 163, 74), (213, 94, 0)


class RobotPage:
    """`show_deployment` for every new deployment, `changed` after a tick, `refresh` often."""

    def __init__(self, server: ViserServer, monitor: RobotMonitor) -> None:
        self.server, self.monitor = server, monitor
        self.cameras = SceneCameras(server)
        self.arm: RobotArm | None = None
        self.history, self.scene = RobotHistory(()), None
        self.plots: dict[str, Any] = {}
        self.lines: list[str] = []
        self.marks: dict[str, Any] = {}
        self.missing = ""
        server.gui.add_html(WRAP)
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

    def show_deployment(self) -> None:
        """A new deployment, perhaps of another arm."""
        about = self.monitor.deployment
        assert about is not None
        self.history, self.arm, self.missing = RobotHistory(self.monitor.stages), None, ""
        if self.folder is not None:
            self.folder.remove()
        self.folder = self.server.gui.add_folder("Last two minutes")
        stages = list(self.history.stages)
        with self.folder:
            title = "interventions (% of ticks)"
            self.interventions = plot(self.server, title, stages, 150, None)
            self.plots = {name: plot(self.server, name, [name], 110, None) for name in PLOTS}
        if self.scene is not None:
            self.scene.root.remove()
        for name in self.lines:
            self.server.scene.remove_by_name(name)
        for mark in self.marks.values():
            mark.remove()
        self.scene, self.lines, self.marks = None, [], {}
        try:
            self.arm = RobotArm(about)
        except Exception as error:  # whatever a robot's own files raise; the numbers are shown
            self.missing = f"the arm cannot be drawn: {str(error) or type(error).__name__}"
        else:
            self.missing = self.arm.missing

    def add(self) -> None:
        """Record a tick."""
        state = self.monitor.state
        if state is not None:
            tool = None if self.arm is None else self.arm.tool(state)
            self.history.add(state, self.monitor.chunk, tool)

    def changed(self) -> None:
        for part in self.parts:
            part.stale = True

    def refresh(self, force: bool = False) -> None:
        """Redraw what is stale and due."""
        for part in self.parts:
            part(force)

    def words(self) -> str:
        """All text of the page."""
        return "\n".join((self.head.content, self.figures.content, self.notes.content))

    def _draw_scene(self) -> None:
        state, arm = self.monitor.state, self.arm
        if state is None or arm is None:
            return
        marks = arm.put(state)
        if arm.model is None:
            marks["tool"] = arm.tool(state)
        if self.scene is None and arm.model is not None:
            self.scene = ViserScene(self.server, arm.model, ROOT)
            eye = arm.model.viewpoint()
            if np.linalg.norm(eye.place - eye.target) > 3.0:
                eye = view_of(arm.model.poses()[0][1:])
            self.cameras.set(eye)
        elif self.scene is not None and arm.model is not None:
            self.scene.show(*arm.model.poses())
        for name, place in marks.items():
            if name in self.marks:
                self.marks[name].position = place
                continue
            node, colour = f"/marks/{name.replace('/', '.')}", TOOL if name == "tool" else MARK
            self.marks[name] = self.server.scene.add_mesh_simple(
                node, *ball(RADIUS), color=colour, position=place
            )

    def _draw_paths(self) -> None:
        state, arm = self.monitor.state, self.arm
        if state is None or arm is None:
            return
        plan = arm.plan(state, self.monitor.chunk) if self.monitor.alive else None
        self._line(PLAN, plan)
        self._line(TRAIL, self.history.trail())

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
        rate = self.history.curve(PLOTS[0])[-1]
        self.head.content = headline(self.monitor)
        self.figures.content = "\n\n".join(
            filter(None, (figures(self.monitor, rate), self.missing))
        )
        self.notes.content = notes(self.monitor)

    def _draw_plots(self) -> None:
        if not self.history.rows:
            return
        times = self.history.times()
        self.interventions.data = (
            times,
            *(self.history.intervention_share(stage) for stage in self.history.stages),
        )
        for name, handle in self.plots.items():
            handle.data = (times, self.history.curve(name))
