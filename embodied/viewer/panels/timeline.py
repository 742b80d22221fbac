"""The timeline: every kept moment of the episode under one slider, and the keys that move it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from viser import Icon, ViserServer
from viser._messages import GuiSliderMark

from embodied.viewer.controls import Controls
from embodied.viewer.session.episode import Episode
from embodied.viewer.session.session import Session

MARKS = 12
"""Successes, and times that safety began to act, that are marked: more would hide the slider."""


class Timeline:
    """`show` sends where the session is."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.server, self.viewer = server, viewer
        self.slider = server.gui.add_slider(
            "Moment",
            0,
            1,
            1,
            0,
            hint="any step of this episode; ticks: what happened (arrow keys)",
        )
        self.marked: tuple[tuple[int, str], ...] = ()
        self.keys = [self._key(*each) for each in self._meanings()]

        async def moved(event: Any) -> None:
            value = self.slider.value
            if event.client_id is not None:
                viewer.press(lambda: viewer.scrub(value))

        self.slider.on_update(moved)

    def show(self, session: Session) -> None:
        """The slider's range, its place and its marks."""
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

    def _meanings(self) -> list[tuple[str, Any, Any, Callable[[], None]]]:
        """What each key does, with its name in the page's list of commands."""
        viewer = self.viewer
        return [
            ("Play or pause", "space", Icon.PLAYER_PLAY, viewer.toggle),
            ("One step on", "arrowright", Icon.PLAYER_TRACK_NEXT, viewer.step),
            ("One step back", "arrowleft", Icon.PLAYER_TRACK_PREV, viewer.back),
            ("To the start of the episode", "home", Icon.CHEVRONS_LEFT, lambda: viewer.scrub(0)),
            ("To the newest moment", "end", Icon.CHEVRONS_RIGHT, viewer.newest),
            ("Restart the episode", "R", Icon.REFRESH, viewer.reset),
            ("Next episode", "N", Icon.PLAYER_SKIP_FORWARD, viewer.next),
            ("Earlier checkpoint", "pageup", Icon.ARROW_UP, lambda: viewer.other_checkpoint(-1)),
            ("Later checkpoint", "pagedown", Icon.ARROW_DOWN, lambda: viewer.other_checkpoint(1)),
            ("Go on from here", "B", Icon.GIT_BRANCH, viewer.branch),
        ]

    def _key(self, label: str, key: Any, icon: Any, action: Callable[[], None]) -> Any:
        command = self.server.gui.add_command(label, hotkey=key, icon=icon)
        command.on_trigger(lambda _: self.viewer.press(action))
        return command


def marks_of(episode: Episode) -> tuple[tuple[int, str], ...]:
    """The newest steps with a mark, and what it says: successes, and stages of safety where they
    began to act."""
    said: dict[int, list[str]] = {}
    for step, stage in episode.interventions[-MARKS:]:
        said.setdefault(step, []).append(stage)
    for step in episode.wins[-MARKS:]:
        said.setdefault(step, []).append("success")
    return tuple((step, ", ".join(words)) for step, words in sorted(said.items()))
