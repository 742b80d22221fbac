"""The disturbances panel: observation delay, removed observations, pushes."""

from __future__ import annotations

from typing import Any

from viser import ViserServer

from embodied.viewer.controls import Controls
from embodied.viewer.session.disturbances import LATEST

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
