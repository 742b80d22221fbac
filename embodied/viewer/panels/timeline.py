"""The timeline: a slider over all stored steps of the episode, and the keyboard shortcuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from viser import Icon, ViserServer
from viser._messages import GuiSliderMark

from embodied.viewer.controls import Controls
from embodied.viewer.session.episode import Episode
from embodied.viewer.session.session import Session

MARKS = 12
"""How many successes, and safety interventions, are marked."""
KEEP_CAMERA = """<img src="data:," alt="" hidden onerror="
document.documentElement.addEventListener('keydown', event => {
  if (event.code === 'ArrowLeft' || event.code === 'ArrowRight') event.stopPropagation();
})">"""
"""viser turns the camera while an arrow key is held, and cannot be set not to: the shortcuts listen
on the page's root, the camera above it. A script element would not run in inserted HTML."""


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
        self.keys = [self._key(*each) for each in self._shortcuts()]
        server.gui.add_html(KEEP_CAMERA)

        async def moved(event: Any) -> None:
            value = self.slider.value
            if event.client_id is not None:
                viewer.press(lambda: viewer.scrub(value))

        self.slider.on_update(moved)

    def show(self, session: Session) -> None:
        """Update the slider's range, value and marks."""
        episode = session.episode
        first = episode.moments[0].step
        last = first + max(session.length - 1, 1)
        if (self.slider.min, self.slider.max) != (first, last):
            self.slider.min, self.slider.max = first, last
        self.slider.value = first + session.at
        marks = marks_of(episode)
        if marks != self.marked:
            self.marked = marks
            self.slider._marks = tuple(GuiSliderMark(*mark) for mark in marks)

    def _shortcuts(self) -> list[tuple[str, Any, Any, Callable[[], None]]]:
        """Label, key, icon and action of each shortcut."""
        viewer = self.viewer
        return [
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

    def _key(self, label: str, key: Any, icon: Any, action: Callable[[], None]) -> Any:
        command = self.server.gui.add_command(label, hotkey=key, icon=icon)
        command.on_trigger(lambda _: self.viewer.press(action))
        return command


def marks_of(episode: Episode) -> tuple[tuple[int, str], ...]:
    """The newest marks, step and text: successes, and safety stages that began to act."""
    said: dict[int, list[str]] = {}
    for step, stage in episode.interventions[-MARKS:]:
        said.setdefault(step, []).append(stage)
    for step in episode.success_steps[-MARKS:]:
        said.setdefault(step, []).append("success")
    return tuple((step, ", ".join(words)) for step, words in sorted(said.items()))
