"""The mind panel: what a policy that steers another chose, and the picture that a reward scored."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import ViserServer

from embodied.core.actor import Actor
from embodied.viewer.scene.images import SMALL, Picture
from embodied.viewer.session.noise import Chooses, decisions, noise_picture, said
from embodied.viewer.session.reward_image import SCORE
from embodied.viewer.session.session import Session

DECISIONS = 60
"""Decisions that are shown at once."""


class MindPanel:
    """Pictures that are there once there is something to show; `draw` sends what is new."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session = session
        blank = np.zeros((2, 2, 3), np.uint8)
        self.noise = server.gui.add_image(blank, label="noise chosen", visible=False)
        self.photo = server.gui.add_image(blank, label="scored", visible=False)
        self._last: tuple[Any, ...] = ()

    def draw(self) -> None:
        """The moment that is looked at, and the decisions up to it and after it."""
        now = (id(self.session.now), len(self.session.episode.moments), self.session.chosen)
        if now == self._last:
            return
        self._last = now
        self._draw_noise()
        self._draw_photo()

    def _draw_noise(self) -> None:
        session = self.session
        found = decisions(session.episode.moments)
        acting = session.made[session.chosen]
        policy = acting.policy if isinstance(acting, Actor) else None
        number = session.deciding
        self.noise.visible = bool(found) and isinstance(policy, Chooses) and number is not None
        if number is None or not found or not isinstance(policy, Chooses):
            return
        at = max((i for i, (moment, _) in enumerate(found) if moment <= number), default=0)
        begin = max(0, min(at - DECISIONS // 2, len(found) - DECISIONS))
        shown = [noise for _, noise in found[begin : begin + DECISIONS]]
        act = session.spec.act
        names = act.names or tuple(f"action {i}" for i in range(act.size))
        self.noise.image = noise_picture(shown, at - begin, policy.bound, names)
        self.noise.label = said(shown[at - begin])

    def _draw_photo(self) -> None:
        now = self.session.now
        self.photo.visible = now.photo is not None
        if now.photo is None:
            return
        self.photo.image = enlarged(now.photo.picture())
        score = now.numbers.get(SCORE)
        said = "" if score is None else f": {score:.3f}"
        self.photo.label = f"what the reward scored at step {now.step}{said}"


def enlarged(picture: Picture) -> Picture:
    """A small picture, each pixel a square."""
    times = -(-SMALL // len(picture))
    return np.ascontiguousarray(picture.repeat(times, 0).repeat(times, 1))
