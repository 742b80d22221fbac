"""The saliency panel: which image patches change the policy's action chunk most."""

from __future__ import annotations

from typing import Any

import numpy as np
from viser import GuiImageHandle, ViserServer

from embodied.core.actor import Actor
from embodied.viewer.session.saliency import heated, pictures_of, saliency
from embodied.viewer.session.session import Session


class SaliencyPanel:
    """A switch, visible if the policy uses images. While it is on, an image per camera is shown: as
    it was at the running decision, orange where patches matter most."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session = session
        self.switch = server.gui.add_checkbox(
            "Saliency",
            False,
            hint="image patches that change the action most (occlusion; slow)",
            visible=False,
        )
        blank = np.zeros((2, 2, 3), np.uint8)
        names = [name for name, leaf in session.spec.obs.items() if leaf.is_image]
        self.images: dict[str, GuiImageHandle] = {
            name: server.gui.add_image(blank, label=name, visible=False) for name in names
        }
        self._last: tuple[Any, ...] = ()

    def draw(self) -> None:
        """Of the decision that is executed at the displayed step."""
        session = self.session
        number, moments = session.decision_index, session.episode.moments
        policy_state = None if number is None else moments[number].policy_state
        if policy_state is not None and policy_state.name != session.chosen:
            number = None  # the decision of another policy
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
