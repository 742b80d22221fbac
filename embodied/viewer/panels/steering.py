"""The steering panel (the latent noise of a steering policy, the image that was rewarded) and the
sliders of disturbances."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import ViserServer

from embodied.core.actor import Actor
from embodied.viewer.scene.types import SMALL, Picture
from embodied.viewer.session.disturbances import LATEST
from embodied.viewer.session.overlays import SCORE
from embodied.viewer.session.player import chooses_noise, decisions, describe, noise_picture
from embodied.viewer.session.session import Controls, Session

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


NONE = "none"


class DisturbancePanel:
    """Settings apply from the next step on."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.viewer, self.session = viewer, viewer.session
        if self.session.counts != "seed":
            return  # recorded episodes cannot be disturbed
        names = [name for name, leaf in self.session.spec.obs.items() if leaf.size]
        with server.gui.add_folder("Disturbances", expand_by_default=False):
            self.late = server.gui.add_slider(
                "Delay", 0, LATEST, 1, 0, hint="observation delay, in steps"
            )
            self.off = server.gui.add_dropdown("Remove", (NONE, *names))
            self.late.on_update(lambda event: self._changed(event))
            self.off.on_update(lambda event: self._changed(event))
            if not self.session.pushes.names:
                return
            self.which = server.gui.add_dropdown("Push", tuple(self.session.pushes.names))
            self.strength = server.gui.add_slider("Strength", 0.1, 5.0, 0.1, 1.0, hint="m/s")
            button = server.gui.add_button("Push now", hint="adds a velocity at the newest step")
            button.on_click(
                lambda _: viewer.press(lambda: viewer.push(self.which.value, self.strength.value))
            )

    def _changed(self, event: Any) -> None:
        if event.client_id is not None:
            off = set() if self.off.value == NONE else {self.off.value}
            self.viewer.press(lambda: self.viewer.disturb_observations(self.late.value, off))
