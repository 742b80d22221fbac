"""The heat panel: for policies that see pictures, what in them their decision hangs on."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import GuiImageHandle, ViserServer

from embodied.core.actor import Actor
from embodied.viewer.session.saliency import heated, pictures_of, saliency
from embodied.viewer.session.session import Session


class HeatPanel:
    """A switch, which is there where who acts sees pictures, and while it is on a picture below
    for each of theirs: as the decision that is followed saw it, orange where it hangs on."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session = session
        self.switch = server.gui.add_checkbox(
            "Saliency",
            False,
            hint="which parts of its pictures the decision hangs on (grey patches; takes time)",
            visible=False,
        )
        blank = np.zeros((2, 2, 3), np.uint8)
        names = [name for name, leaf in session.spec.obs.items() if leaf.is_image]
        self.images: dict[str, GuiImageHandle] = {
            name: server.gui.add_image(blank, label=name, visible=False) for name in names
        }
        self._last: tuple[Any, ...] = ()

    def draw(self) -> None:
        """Of the decision that is followed at the moment that is looked at."""
        session = self.session
        number, moments = session.deciding, session.episode.moments
        mind = None if number is None else moments[number].mind
        if mind is not None and mind.who != session.chosen:
            number = None  # another one's decision, which is over
        acting = session.made[session.chosen]
        policy = acting.policy if isinstance(acting, Actor) else None
        seen = [] if policy is None else pictures_of(policy)
        self.switch.visible = bool(seen)
        now = (self.switch.value, number, id(policy), id(moments[0]))
        if now == self._last:
            return
        self._last = now
        shown = policy is not None and self.switch.value and number is not None
        for name, image in self.images.items():
            image.visible = shown and name in seen
        if policy is None or number is None or not shown:
            return
        before, after = moments[number - 1 : number + 1]
        found = saliency(policy, before, after)
        most = max(float(change.max()) for change in found.values())
        for name, change in found.items():
            leaf = session.spec.obs[name]
            self.images[name].image = heated(before.obs[name][0], leaf, change, most)
            peak = float(change.max())
            self.images[name].label = f"{name}: a grey patch moves the action by up to {peak:.2g}"
