"""The page: controls, status, plots and pictures; each part is redrawn when stale, not too often.

Buttons and sliders only hand the viewer's thread what to do; everything else here runs in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from viser import Icon, ViserServer

from embodied.viewer.controls import Controls
from embodied.viewer.export.export import replay_of
from embodied.viewer.panels.disturbances import TrialPanel
from embodied.viewer.panels.main_view import Stage
from embodied.viewer.panels.observations import Sights
from embodied.viewer.panels.plans import Checkpoints, Plans
from embodied.viewer.panels.plots import Judged, Plots
from embodied.viewer.panels.status import status
from embodied.viewer.panels.steering import MindPanel
from embodied.viewer.panels.task import TaskPanel
from embodied.viewer.panels.timeline import Timeline
from embodied.viewer.scene.drag import Touch

SPEEDS = (0.1, 5.0)


class Refresh:
    """One part of the page: drawn when stale, every `period` s at most, and in no more than
    `share` of the time, as pictures without a graphics card are slow."""

    def __init__(self, draw: Callable[[], None], period: float, share: float = 0.25) -> None:
        self.draw, self.period, self.share = draw, period, share
        self.stale, self.due = True, 0.0

    def __call__(self, force: bool = False) -> None:
        start = time.monotonic()
        if not self.stale or (start < self.due and not force):
            return
        self.stale = False
        self.draw()
        end = time.monotonic()
        # By the clock, not from whenever it was late, or a rate of 40 would be one of 30.
        begun = self.due if start - self.due < self.period else start
        self.due = max(begun + self.period, end + (end - start) * (1 / self.share - 1))


class Page:
    """Everything that one sees; `changed` and `begun` say what became stale."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.server, self.viewer, self.session = server, viewer, viewer.session
        self.spec = self.session.spec
        self.stage = Stage(server, self.session)
        self.scene = self.stage.scene
        self._status_part()
        self._play_part()
        self._policy_part()
        self.task = TaskPanel(server, viewer)
        self.sliders = self.task.sliders
        self.trials = TrialPanel(server, viewer)
        self.touch = [
            Touch(viewer, scene, each, lambda: self.trials.strength.value)
            for scene, each in zip(self.stage.scenes, self.session.both, strict=False)
        ]
        self._camera_part()
        with server.gui.add_folder("Episode"):
            self.plots = Plots(server, self.spec)
        self.mind = MindPanel(server, self.session)
        self.judged = Judged(server, self.spec.dt)
        self.sights = Sights(server, self.session, alone=self.stage.empty)
        self._bind(self.sights.heat.switch, lambda _: self.changed())
        self.parts = [
            Refresh(self._draw_stage, 1 / 40, share=0.5),
            Refresh(self._draw_status, 0.1),
            Refresh(self.sights.pictures, 0.1),
            Refresh(self._draw_plots, 0.2),
            Refresh(self._draw_camera, 0.25),
            Refresh(self.plans.draw, 0.1, share=0.2),
            Refresh(self.mind.draw, 0.1, share=0.2),
            Refresh(self.sights.saliency, 0.1, share=0.25),
        ]
        self.begun()

    @property
    def due(self) -> float:
        """When there is something to draw (s, monotonic); infinite where nothing is stale."""
        return min((part.due for part in self.parts if part.stale), default=math.inf)

    def changed(self) -> None:
        """The session has moved on, or a setting is another."""
        for part in self.parts:
            part.stale = True

    def begun(self) -> None:
        """A new episode: objects may have other shapes, and the task vector other values."""
        self.stage.begin()
        self.seed.value = self.session.episode.seed
        self.task.begun()

    def refresh(self, force: bool = False) -> None:
        """Draw what is stale and due."""
        for part in self.parts:
            part(force)

    def _status_part(self) -> None:
        text = self.session.title
        self.server.gui.add_markdown(f"**{text[:1].upper()}{text[1:]}**")
        self.status = self.server.gui.add_markdown("")
        self.note = self.server.gui.add_markdown(
            "This world has no 3D scene and no picture: its observations are on the left.",
            visible=self.stage.empty,
        )

    def _play_part(self) -> None:
        gui, viewer = self.server.gui, self.viewer
        self.play = gui.add_button("Play", icon=Icon.PLAYER_PLAY)
        self.play.on_click(lambda _: viewer.press(viewer.toggle))
        self.timeline = Timeline(self.server, viewer)
        self._buttons("Step", {"Back": viewer.back, "Step": viewer.step, "Newest": viewer.newest})
        self._buttons("Episode", {"Restart": viewer.reset, "Next": viewer.next})
        self.onward = gui.add_button(
            "Go on from here", hint="forget what came later (key B)", visible=False
        )
        self.onward.on_click(lambda _: viewer.press(viewer.branch))
        self.save = gui.add_button(
            "Save replay", icon=Icon.DOWNLOAD, hint="this episode as a page that needs no server"
        )
        self.save.on_click(self._save)
        self.speed = gui.add_slider(
            "Speed", *SPEEDS, 0.1, 1.0, hint="simulated seconds in a second"
        )
        self._bind(self.speed, viewer.set_speed)
        self.seed = gui.add_number(
            self.session.counts.title(), 0, min=0, step=1, hint="the start of this episode"
        )
        self._bind(self.seed, viewer.reset)
        self.plans = Plans(self.server, self.session)
        if self.plans.there:
            plan = gui.add_checkbox(
                "Plan", True, hint="where its plan and other draws of its noise lead, and the past"
            )
            self._bind(plan, self._plan)
        if self.scene is not None and self.scene.followed is not None:
            self.stage.follow(True)
            follow = gui.add_checkbox("Follow", True)
            self._bind(follow, self._follow)

    def _policy_part(self) -> None:
        gui = self.server.gui
        self.policy = gui.add_dropdown(
            "Policy", tuple(self.session.choices), initial_value=self.session.chosen
        )
        self._bind(self.policy, self.viewer.choose)
        run = self.session.run
        self.checkpoints = (
            None if run is None else Checkpoints(self.server, run, self.viewer.choose)
        )
        self.explore = gui.add_checkbox("Explore", False, hint="add exploration noise")
        self._bind(self.explore, self.viewer.explore)

    def _camera_part(self) -> None:
        """The world's own camera, where it is not what the page shows anyway."""
        gui, shown = self.server.gui, self.scene is not None
        self.camera = gui.add_checkbox(
            "Camera", False, hint="the world's own; slow without a graphics card", visible=shown
        )
        self._bind(self.camera, lambda _: self.changed())
        self.picture = gui.add_image(np.zeros((2, 2, 3), np.uint8), visible=False)

    def _bind(self, control: Any, action: Callable[[Any], None]) -> None:
        """Hand a control's value to the viewer's thread when a person changes it."""

        async def pressed(event: Any) -> None:
            # At once, on the server's own thread: a refresh may write the old value back at any
            # time. Values that we set ourselves come back here too, without a client.
            value = control.value
            if event.client_id is not None:
                self.viewer.press(lambda: action(value))

        control.on_update(pressed)

    def _buttons(self, label: str, actions: dict[str, Callable[[], None]]) -> None:
        row = self.server.gui.add_button_group(label, tuple(actions))
        row.on_click(lambda event: self.viewer.press(actions[event.target.value]))

    def _save(self, event: Any) -> None:
        """Send the episode, as far as it is kept, to the browser that asked."""
        client = event.client
        if client is None:
            return

        def send() -> None:
            page = replay_of(self.session).html().encode()
            name = f"replay_{self.session.episode.seed}.html"
            client.send_file_download(name, page, save_immediately=True)

        self.viewer.press(send)

    def _plan(self, on: bool) -> None:
        self.plans.on = on
        self.changed()

    def _follow(self, on: bool) -> None:
        self.stage.follow(on)
        self.changed()

    def _draw_stage(self) -> None:
        self.stage.draw(self.viewer.share)
        self.timeline.show(self.session)
        if self.viewer.playing and self.scene is not None:
            self.parts[0].stale = True  # Between two steps there is more to see.

    def _draw_plots(self) -> None:
        self.plots.draw(self.session.episode)
        self.judged.draw(self.session.episode)
        self.sights.plots()
        if self.checkpoints is not None:
            self.checkpoints.show(self.session.chosen)

    def _draw_status(self) -> None:
        self.status.content = self.status_text()
        self.sights.words()
        viewer = self.viewer
        self.play.label, self.play.icon = (
            ("Pause", Icon.PLAYER_PAUSE) if viewer.playing else ("Play", Icon.PLAYER_PLAY)
        )
        self.policy.value, self.speed.value = self.session.chosen, viewer.speed
        self.explore.value = self.session.explore
        self.onward.visible = not self.session.live and self.session.now.state is not None
        self.task.show()

    def status_text(self) -> str:
        """Step, time, return, success and who acts, as Markdown."""
        undrawn = 0 if self.scene is None else self.scene.undrawn
        known = "" if self.checkpoints is None else self.checkpoints.words(self.session.chosen)
        return status(self.session, undrawn, known, self.viewer.problem)

    def _draw_camera(self) -> None:
        self.picture.visible = self.camera.value
        if not self.camera.value or not self.session.live or self.session.episode.end:
            return  # The camera sees where the world is, which is another moment.
        picture = self.session.witness.camera()
        if picture is None:
            self.camera.value = self.picture.visible = False
            self._draw_status()
        else:
            self.picture.image = picture
