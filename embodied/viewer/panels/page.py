"""The page: controls, status, plots and images; each part is redrawn when stale, at a limited rate.

Buttons and sliders only hand commands to the viewer's thread; everything else here runs in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from viser import Icon, ViserServer
from viser._messages import GuiSliderMark

from embodied.viewer.controls import SPEEDS, Controls
from embodied.viewer.panels.main_view import Checkpoints, DragControls, MainView
from embodied.viewer.panels.pair import Half
from embodied.viewer.panels.plots import ObservationPanel, Plots, ValuePlots, is_discrete
from embodied.viewer.panels.task import DisturbancePanel, SteeringPanel, TaskPanel
from embodied.viewer.session.episode import success_by
from embodied.viewer.session.session import Session


class Refresh:
    """One part of the page: redrawn when stale, at most every `period` s, and in at most `share` of
    the time, as rendering without a GPU is slow."""

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
        # Scheduled by the clock, not from a late start: else 40 per second would become 30.
        begun = self.due if start - self.due < self.period else start
        self.due = max(begun + self.period, end + (end - start) * (1 / self.share - 1))


class Parts:
    """What is drawn by `parts`."""

    parts: Sequence[Refresh]

    def changed(self) -> None:
        for part in self.parts:
            part.stale = True

    def refresh(self, force: bool = False) -> None:
        for part in self.parts:
            part(force)


class Page(Parts):
    """The whole page; `changed` and `episode_started` mark parts as stale."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.server, self.viewer, self.session = server, viewer, viewer.session
        self.spec = self.session.spec
        self.main_view = MainView(server, self.session, len(self.session.sessions))
        self.scene, self.views, self.half = self.main_view.scene, [self.main_view], None
        if self.session.other is not None:
            self.half = Half(viewer.page_server, self.main_view, self.session.other)
            self.views.append(self.half.view)
        self._status_part()
        self._play_part()
        self._policy_part()
        self.task = TaskPanel(server, viewer)
        self.sliders = self.task.sliders
        self.disturbances = DisturbancePanel(server, viewer)
        self.drag = [
            DragControls(viewer, each.scene, each.session, lambda: self.disturbances.strength.value)
            for each in self.views
            if each.scene is not None
        ]
        self._camera_part()
        with server.gui.add_folder("Episode"):
            self.plots = Plots(server, self.spec)
        self.steering = SteeringPanel(server, self.session)
        self.value_plots = ValuePlots(server, self.spec.dt)
        self.observations = ObservationPanel(
            server, self.session, wide=self.main_view.empty, folded=self.half is not None
        )
        self.viewer.bind(self.observations.saliency_panel.switch, lambda _: self.changed())
        self.parts = [
            Refresh(self._draw_stage, 1 / 40, share=0.5),
            Refresh(self._draw_status, 0.1),
            Refresh(self.observations.pictures, 0.1),
            Refresh(self._draw_plots, 0.2),
            Refresh(self._draw_camera, 0.25),
            *(Refresh(each.draw, 0.1, share=0.2) for each in self.plans),
            Refresh(self.steering.draw, 0.1, share=0.2),
            Refresh(self.observations.saliency, 0.1, share=0.25),
        ]
        self.episode_started()

    @property
    def due(self) -> float:
        """When the next stale part is due (s, monotonic); infinite if none is stale."""
        return min((part.due for part in self.parts if part.stale), default=math.inf)

    def episode_started(self) -> None:
        """A new episode: bodies may have other shapes, and the task vector other values."""
        for each in self.views:
            each.episode_started()
        self.seed.value = self.session.episode.seed
        self.task.episode_started()

    def _status_part(self) -> None:
        text = self.session.title
        self.server.gui.add_markdown(f"**{text[:1].upper()}{text[1:]}**")
        self.status = self.server.gui.add_markdown("")
        self.note = self.server.gui.add_markdown(
            "This environment has no 3D scene and no image; its observations are on the left.",
            visible=self.main_view.empty,
        )

    def _play_part(self) -> None:
        gui, viewer = self.server.gui, self.viewer
        self.play = gui.add_button("Play", icon=Icon.PLAYER_PLAY)
        self.play.on_click(lambda _: viewer.press(viewer.toggle))
        self.timeline = Timeline(self.server, viewer)
        add_shortcuts(self.server, viewer)
        if self.half is not None:
            add_shortcuts(self.half.server, viewer)
        self._buttons(
            "Step", {"Back": viewer.back, "Forward": viewer.step, "Newest": viewer.newest}
        )
        self._buttons("Episode", {"Restart": viewer.reset, "Next": viewer.next})
        self.onward = gui.add_button(
            "Continue from here", hint="discards the later steps (key B)", visible=False
        )
        self.onward.on_click(lambda _: viewer.press(viewer.branch))
        self.speed = gui.add_slider("Speed", *SPEEDS, 0.1, 1.0, hint="simulated seconds per second")
        self.viewer.bind(self.speed, viewer.set_speed)
        self.seed = gui.add_number(
            self.session.counts.title(), 0, min=0, step=1, hint="number of this episode"
        )
        self.viewer.bind(self.seed, viewer.reset)
        self.plans = [each.plans for each in self.views]
        if any(each.available for each in self.plans):
            plan = gui.add_checkbox(
                "Plan",
                True,
                hint="tool path of the action chunk, of other noise samples, and the past path",
            )
            viewer.bind(plan, self._plan)
        if self.scene is not None and self.scene.followed is not None:
            for each in self.views:
                each.follow(True)
            self.viewer.bind(gui.add_checkbox("Follow", True), self._follow)

    def _policy_part(self) -> None:
        gui = self.server.gui
        self.policy = gui.add_dropdown(
            "Policy", tuple(self.session.choices), initial_value=self.session.chosen
        )
        self.viewer.bind(self.policy, self.viewer.choose)
        run = self.session.run
        self.checkpoints = (
            None if run is None else Checkpoints(self.server, run, self.viewer.choose)
        )
        self.explore = gui.add_checkbox(
            "Explore", False, hint="add exploration noise", visible=not self.session.recorded
        )
        self.viewer.bind(self.explore, self.viewer.explore)

    def _camera_part(self) -> None:
        """The environment's camera, if the page does not show its image anyway."""
        gui, shown = self.server.gui, self.scene is not None
        self.camera = gui.add_checkbox(
            "Camera", False, hint="the environment's camera; slow without a GPU", visible=shown
        )
        self.viewer.bind(self.camera, lambda _: self.changed())
        self.picture = gui.add_image(np.zeros((2, 2, 3), np.uint8), visible=False)

    def _buttons(self, label: str, actions: dict[str, Callable[[], None]]) -> None:
        row = self.server.gui.add_button_group(label, tuple(actions))
        row.on_click(lambda event: self.viewer.press(actions[event.target.value]))

    def _plan(self, on: bool) -> None:
        for each in self.plans:
            each.on = on
        self.changed()

    def _follow(self, on: bool) -> None:
        for each in self.views:
            each.follow(on)
        self.changed()

    def _draw_stage(self) -> None:
        for each in self.views:
            each.draw(self.viewer.share)
        self.timeline.show(self.session)
        if self.viewer.playing and self.scene is not None:
            self.parts[0].stale = True  # interpolated frames between two steps

    def _draw_plots(self) -> None:
        self.plots.draw(self.session.episode)
        self.value_plots.draw(self.session.episode)
        self.observations.plots()
        if self.checkpoints is not None:
            self.checkpoints.show(self.session.chosen)

    def _draw_status(self) -> None:
        self.status.content = self.status_text()
        if self.half is not None:
            self.half.show(self.session.sessions)
        self.observations.words()
        viewer = self.viewer
        self.play.label, self.play.icon = (
            ("Pause", Icon.PLAYER_PAUSE) if viewer.playing else ("Play", Icon.PLAYER_PLAY)
        )
        self.policy.value, self.speed.value = self.session.chosen, viewer.speed
        self.explore.value = self.session.explore
        known = self.session.now.state is not None and not self.session.recorded
        self.onward.visible = known and not self.session.live
        self.task.show()

    def status_text(self) -> str:
        undrawn = 0 if self.scene is None else self.scene.undrawn
        known = "" if self.checkpoints is None else self.checkpoints.words(self.session.chosen)
        return status(self.session, undrawn, known, self.viewer.problem)

    def _draw_camera(self) -> None:
        self.picture.visible = self.camera.value
        if not self.camera.value or not self.session.live or self.session.episode.end:
            return  # the camera shows the newest step, not the displayed one
        picture = self.session.recorder.camera()
        if picture is None:
            self.camera.value = self.picture.visible = False
            self._draw_status()
        else:
            self.picture.image = picture


def status(session: Session, undrawn: int, known: str, problem: str) -> str:
    """The status as Markdown; `undrawn` is the number of shapes that cannot be drawn, `known` what
    the run measured of the policy, `problem` the error that stopped playback."""
    step = session.episode.moments[0].step + session.at
    lines = [f"Step **{step}** of {session.length - 1} · {step * session.spec.dt:.2f} s"]
    if session.other is None:
        lines.append(standing(session))
    whose = f" of {session.name}" if len(session.sessions) > 1 and session.name else ""
    lines.append(f"Policy{whose}: {session.chosen}{last_action(session)}")
    if undrawn:
        lines.append(f"{undrawn} shapes are not drawn (height fields, for example)")
    trial = session.trial and f"Disturbances: {session.trial}"
    recorder = session.recorder
    lines += filter(
        None, (known, recorder.no_scene_reason, recorder.render_error, session.trouble, trial)
    )
    if problem:
        lines.append(f"**Stopped:** {problem}")
    return "  \n".join(lines)


def standing(session: Session) -> str:
    past = session.episode.moments[: session.at + 1]
    success = {None: "unknown", True: "**yes**", False: "no"}[success_by(past)]
    text = f"Return **{sum(moment.reward for moment in past):.3g}** · success {success}"
    return f"{text} · *{past[-1].end}*" if past[-1].end else text


def last_action(session: Session) -> str:
    moments, act = session.episode.moments, session.spec.act
    action = moments[min(session.at, len(moments) - 1)].action
    if not (is_discrete(act) and act.names and action):
        return ""
    return f" · **{act.names[int(action[0])]}**"


MARKS, SUCCESS = 12, "✓"
"""How many successes, and safety interventions, are marked; how a success is."""
KEEP_CAMERA = """<img src="data:," alt="" hidden onerror="
document.documentElement.addEventListener('keydown', event => {
  if (event.code === 'ArrowLeft' || event.code === 'ArrowRight') event.stopPropagation();
})">"""
"""viser turns the camera while an arrow key is held, and cannot be set not to: the shortcuts listen
on the page's root, the camera above it. A script element would not run in inserted HTML."""


class Viewer(Controls):
    """The page and its session.

    The page is reachable from this machine only, unless `host` is another address; then it requires
    the token in `url`. `page_server` is a server that is already open, if any.
    """

    def setup(self) -> None:
        super().setup()
        self.page = Page(self.server, self)
        self.page.refresh(force=True)


class Timeline:
    """`show` sends the session's position."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.server, self.viewer = server, viewer
        self.slider = server.gui.add_slider(
            "Step",
            0,
            1,
            1,
            0,
            hint="any step of this episode (arrow keys); marks: successes, safety",
        )
        self.marked: tuple[tuple[int, str], ...] = ()
        viewer.bind(self.slider, viewer.scrub)

    def show(self, session: Session) -> None:
        """Update the slider's range, value and marks: the newest successes, and safety stages that
        began to act."""
        episode = session.episode
        first = episode.moments[0].step
        last = first + max(session.length - 1, 1)
        if (self.slider.min, self.slider.max) != (first, last):
            self.slider.min, self.slider.max = first, last
        self.slider.value = first + session.at
        said: dict[int, list[str]] = {}
        for step, stage in episode.interventions[-MARKS:]:
            said.setdefault(step, []).append(stage)
        for step in episode.success_steps[-MARKS:]:
            said.setdefault(step, []).append(SUCCESS)
        marks = tuple((step, ", ".join(words)) for step, words in sorted(said.items()))
        if marks != self.marked:
            self.marked = marks
            self.slider._marks = tuple(GuiSliderMark(*mark) for mark in marks)


def add_shortcuts(server: ViserServer, viewer: Controls) -> None:
    """The keys of the page, which reach it from each half of it."""
    shortcuts: list[tuple[str, Any, Any, Callable[[], None]]] = [
        ("Play or pause", "space", Icon.PLAYER_PLAY, viewer.toggle),
        ("Step forward", "arrowright", Icon.PLAYER_TRACK_NEXT, viewer.step),
        ("Step back", "arrowleft", Icon.PLAYER_TRACK_PREV, viewer.back),
        ("Start of the episode", "home", Icon.CHEVRONS_LEFT, lambda: viewer.scrub(0)),
        ("Newest step", "end", Icon.CHEVRONS_RIGHT, viewer.newest),
        ("Restart the episode", "R", Icon.REFRESH, viewer.reset),
        ("Next episode", "N", Icon.PLAYER_SKIP_FORWARD, viewer.next),
        ("Previous checkpoint", "pageup", Icon.ARROW_UP, lambda: viewer.other_checkpoint(-1)),
        ("Next checkpoint", "pagedown", Icon.ARROW_DOWN, lambda: viewer.other_checkpoint(1)),
        ("Continue from here", "B", Icon.GIT_BRANCH, viewer.branch),
    ]
    for label, key, icon, action in shortcuts:
        command = server.gui.add_command(label, hotkey=key, icon=icon)
        command.on_trigger(lambda _, action=action: viewer.press(action))
    server.gui.add_html(KEEP_CAMERA)
