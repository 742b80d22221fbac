"""The page: controls, status, plots and pictures; each part is redrawn when stale, not too often.

Buttons and sliders only hand the viewer's thread what to do; everything else here runs in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from viser import Icon, ViserServer

from embodied.viewer.look import look_at
from embodied.viewer.plots import Plots
from embodied.viewer.scene import Scene

if TYPE_CHECKING:
    from embodied.viewer.viewer import Viewer

SPEEDS = (0.1, 5.0)
OFF, CAMERA = "off", "camera"
PICTURE = (384, 288)


class Refresh:
    """One part of the page: drawn when stale, every `period` s at most, and in no more than
    `share` of the time, as pictures without a graphics card are slow."""

    def __init__(self, draw: Callable[[], None], period: float, share: float = 0.25) -> None:
        self.draw, self.period, self.share = draw, period, share
        self.stale, self._next = True, 0.0

    def __call__(self, force: bool = False) -> None:
        start = time.monotonic()
        if not self.stale or (start < self._next and not force):
            return
        self.stale = False
        self.draw()
        end = time.monotonic()
        self._next = max(start + self.period, end + (end - start) * (1 / self.share - 1))


class Page:
    """Everything that one sees; `changed` and `begun` say what became stale."""

    def __init__(self, server: ViserServer, viewer: Viewer) -> None:
        self.server, self.viewer, self.session = server, viewer, viewer.session
        self.spec, self.trouble = self.session.env.spec, ""
        look = look_at(self.session.env)
        self.scene = None if look is None else Scene(server, look)
        _theme(server)
        self._status_part()
        self._play_part()
        self._policy_part()
        self._task_part()
        self._picture_part()
        self._plot_part()
        self.parts = [
            Refresh(self._draw_scene, 1 / 30),
            Refresh(self._draw_status, 0.1),
            Refresh(lambda: self.plots.draw(self.session.episode), 0.2),
            Refresh(self._draw_picture, 0.25),
        ]
        self.begun()

    @property
    def stale(self) -> bool:
        return any(part.stale for part in self.parts)

    @property
    def rests(self) -> bool:
        """Whether the page stays at the end of an episode: the environment itself is already at
        its next start, which would be shown too early."""
        return bool(self.session.episode.end)

    def changed(self) -> None:
        """The session has moved on, or a setting is another."""
        for part in self.parts:
            part.stale = True

    def begun(self) -> None:
        """A new episode: objects may have other shapes, and the task vector other values."""
        if self.scene is not None:
            self.scene.restyle()
        self.seed.value = self.session.episode.seed
        drawn = self.session.drawn_task
        if drawn is not None:
            for slider, value, (low, high) in zip(self.sliders, drawn, self.ranges, strict=True):
                slider.value = low + value * (high - low)

    def refresh(self, force: bool = False) -> None:
        """Draw what is stale and due."""
        for part in self.parts:
            part(force)

    def _status_part(self) -> None:
        env = self.session.env
        text = self.spec.text or getattr(getattr(env, "config", None), "id", type(env).__name__)
        self.server.gui.add_markdown(f"**{text[:1].upper()}{text[1:]}**")
        self.status = self.server.gui.add_markdown("")
        self.note = self.server.gui.add_markdown(
            "This environment is not MuJoCo: there is no 3D scene, only its own picture, if any.",
            visible=self.scene is None,
        )

    def _play_part(self) -> None:
        gui, viewer = self.server.gui, self.viewer
        self.play = gui.add_button("Play", icon=Icon.PLAYER_PLAY)
        self.play.on_click(
            lambda _: viewer.press(lambda: viewer.pause() if viewer.playing else viewer.play())
        )
        row = gui.add_button_group("Episode", ("Step", "Restart", "Next"))
        actions = {"Step": viewer.step, "Restart": viewer.reset, "Next": self._next}
        row.on_click(lambda event: viewer.press(actions[event.target.value]))
        self.speed = gui.add_slider(
            "Speed", *SPEEDS, 0.1, 1.0, hint="simulated seconds in a second"
        )
        self._bind(self.speed, viewer.set_speed)
        self.seed = gui.add_number("Seed", 0, min=0, step=1, hint="the start of this episode")
        self._bind(self.seed, viewer.reset)
        if self.scene is not None and self.scene.followed is not None:
            self.scene.follow = True
            follow = gui.add_checkbox("Follow", True)
            self._bind(follow, self._follow)

    def _policy_part(self) -> None:
        gui = self.server.gui
        self.policy = gui.add_dropdown(
            "Policy", tuple(self.session.choices), initial_value=self.session.chosen
        )
        self._bind(self.policy, self.viewer.choose)
        self.explore = gui.add_checkbox("Explore", False, hint="add exploration noise")
        self._bind(self.explore, self.viewer.explore)

    def _task_part(self) -> None:
        self.sliders: list[Any] = []
        self.ranges: list[tuple[float, float]] = []
        if self.spec.task is None:
            return
        with self.server.gui.add_folder("Task", expand_by_default=False):
            self.fixed = self.server.gui.add_checkbox(
                "Fixed", False, hint="off: drawn anew for each episode"
            )
            self._bind(self.fixed, lambda _: self._take_task())
            for name, low, high, unit in task_ranges(self.session.env):
                slider = self.server.gui.add_slider(
                    name, low, high, (high - low) / 200, low, hint=f"{low:g} to {high:g} {unit}"
                )
                self._bind(slider, lambda _: self._move_task())
                self.sliders.append(slider)
                self.ranges.append((low, high))

    def _picture_part(self) -> None:
        gui = self.server.gui
        views = [name for name, leaf in self.spec.obs.items() if leaf.is_image]
        with gui.add_folder("Picture", expand_by_default=True):
            start = OFF if self.scene is not None else CAMERA
            self.view = gui.add_dropdown(
                "View",
                (OFF, CAMERA, *views),
                initial_value=start,
                hint="slow without a graphics card",
            )
            self._bind(self.view, lambda _: self.changed())
            self.picture = gui.add_image(np.zeros((2, 2, 3), np.uint8), visible=False)

    def _plot_part(self) -> None:
        with self.server.gui.add_folder("Episode"):
            self.plots = Plots(self.server, self.spec)
            self.words = self.server.gui.add_markdown("")

    def _bind(self, control: Any, action: Callable[[Any], None]) -> None:
        """Hand a control's value to the viewer's thread when a person changes it."""

        def pressed(event: Any) -> None:
            # Values that we set ourselves come back here too, without a client.
            if event.client_id is not None:
                self.viewer.press(lambda: action(control.value))

        control.on_update(pressed)

    def _next(self) -> None:
        self.viewer.reset(self.session.episode.seed + 1)

    def _follow(self, on: bool) -> None:
        if self.scene is not None:
            self.scene.follow = on
            self.changed()

    def _move_task(self) -> None:
        self.fixed.value = True
        self._take_task()

    def _take_task(self) -> None:
        """Begin again with what the sliders show now; of many moves only the last one counts."""
        if not self.fixed.value:
            return self.viewer.set_task(None)
        task = [
            min(max((slider.value - low) / (high - low), 0.0), 1.0)
            for slider, (low, high) in zip(self.sliders, self.ranges, strict=True)
        ]
        before = self.session.task
        if before is None or not torch.equal(before, torch.tensor(task, dtype=torch.float32)):
            self.viewer.set_task(task)

    def _draw_scene(self) -> None:
        if self.scene is not None and not self.rests:
            self.scene.show()

    def _draw_status(self) -> None:
        self.status.content = self.status_text()
        if not self.rests:
            self.words.content = self.session.describe()
        viewer = self.viewer
        self.play.label, self.play.icon = (
            ("Pause", Icon.PLAYER_PAUSE) if viewer.playing else ("Play", Icon.PLAYER_PLAY)
        )
        self.policy.value, self.speed.value = self.session.chosen, viewer.speed
        self.explore.value = self.session.explore
        if self.spec.task is not None:
            self.fixed.value = self.session.task is not None

    def status_text(self) -> str:
        """Step, time, return, success and who acts, as Markdown."""
        episode = self.session.episode
        success = {None: "unknown", True: "**yes**", False: "no"}[episode.success]
        lines = [
            f"Step **{episode.steps}** · {episode.steps * self.spec.dt:.2f} s"
            + (f" · *{episode.end}*" if episode.end else ""),
            f"Return **{sum(episode.rewards):.3g}** · success {success}",
            f"Acting: {self.session.chosen}",
        ]
        if self.scene is not None and self.scene.undrawn:
            lines.append(f"{self.scene.undrawn} height fields or other shapes are not drawn")
        if self.trouble:
            lines.append(self.trouble)
        if self.viewer.problem:
            lines.append(f"**Stopped:** {self.viewer.problem}")
        return "  \n".join(lines)

    def _draw_picture(self) -> None:
        view = self.view.value
        self.picture.visible = view != OFF
        if view == OFF or self.rests:
            return
        try:
            self.picture.image = self._picture(view)
        except (NotImplementedError, RuntimeError, ImportError) as error:
            # No camera, or no way to draw on this machine: the rest of the page goes on.
            self.view.value, self.picture.visible = OFF, False
            self.trouble = f"No picture: {error}"
            self._draw_status()

    def _picture(self, view: str) -> NDArray[np.uint8]:
        if view == CAMERA:
            return self.session.env.render(0, *PICTURE).cpu().numpy()
        return self.session.obs[view][0].cpu().numpy()


def task_ranges(env: Any) -> list[tuple[str, float, float, str]]:
    """Name, native low and high, and unit of each element of the task vector.

    From `env.parameters` (our FR3 tasks declare them), else the plain [0, 1] of the vector.
    """
    leaf = env.spec.task
    names = leaf.names or tuple(f"task {i}" for i in range(leaf.size))
    known = {each.name: each for each in getattr(env, "parameters", ())}
    return [
        (name, known[name].low, known[name].high, known[name].unit)
        if name in known
        else (name, 0.0, 1.0, "")
        for name in names
    ]


def _theme(server: ViserServer) -> None:
    # Sharing would open a tunnel to the internet.
    server.gui.configure_theme(
        show_logo=False, show_share_button=False, control_width="large", brand_color=(37, 99, 235)
    )
    server.gui.main_panel.dock_right()
