"""The steering panel: the latent noise of a steering policy, and the image that was rewarded."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import ViserServer

from embodied.core.actor import Actor
from embodied.viewer.scene.images import SMALL, Picture
from embodied.viewer.session.noise import chooses_noise, decisions, describe, noise_picture
from embodied.viewer.session.reward_image import SCORE
from embodied.viewer.session.session import Session

DECISIONS = 60
"""How many decisions are shown at once."""


class SteeringPanel:
    """Images that appear once there is something to show."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session = session
        blank = np.zeros((2, 2, 3), np.uint8)
        self.noise = server.gui.add_image(blank, label="latent noise", visible=False)
        self.reward_image = server.gui.add_image(blank, label="reward image", visible=False)
        self._last: tuple[Any, ...] = ()

    def draw(self) -> None:
        """Send the displayed step and the decisions around it."""
        now = (id(self.session.now), len(self.session.episode.moments), self.session.chosen)
        if now == self._last:
            return
        self._last = now
        self._draw_noise()
        self._draw_reward_image()

    def _draw_noise(self) -> None:
        session = self.session
        found = decisions(session.episode.moments)
        acting = session.made[session.chosen]
        policy = acting.policy if isinstance(acting, Actor) else None
        number = session.decision_index
        self.noise.visible = bool(found) and chooses_noise(policy) and number is not None
        if number is None or not found or not chooses_noise(policy):
            return
        at = max((i for i, (moment, _) in enumerate(found) if moment <= number), default=0)
        begin = max(0, min(at - DECISIONS // 2, len(found) - DECISIONS))
        shown = [noise for _, noise in found[begin : begin + DECISIONS]]
        act = session.spec.act
        names = act.names or tuple(f"action {i}" for i in range(act.size))
        self.noise.image = noise_picture(shown, at - begin, policy.bound, names)
        self.noise.label = describe(shown[at - begin])

    def _draw_reward_image(self) -> None:
        now = self.session.now
        self.reward_image.visible = now.reward_image is not None
        if now.reward_image is None:
            return
        self.reward_image.image = enlarged(now.reward_image.picture())
        score = now.numbers.get(SCORE)
        text = "" if score is None else f": {score:.3f}"
        self.reward_image.label = f"image that the reward scored, step {now.step}{text}"


def enlarged(picture: Picture) -> Picture:
    """A small image, each pixel as a square."""
    times = -(-SMALL // len(picture))
    return np.ascontiguousarray(picture.repeat(times, 0).repeat(times, 1))
