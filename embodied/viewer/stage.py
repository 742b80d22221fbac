"""The middle of the page: a scene in 3D where the world has one, else its picture, else nothing."""

from __future__ import annotations

from viser import ViserServer

from embodied.viewer.scene import Scene
from embodied.viewer.screen import Screen
from embodied.viewer.witness import Sight, Witness


class Stage:
    """`draw` sends what moved; a world without a camera is shown as the largest image among its
    observations."""

    def __init__(self, server: ViserServer, witness: Witness, first: Sight) -> None:
        look = witness.look
        self.scene = None if look is None else Scene(server, look)
        self.screen = None if first.picture is None else Screen(server, first.picture.picture())
        self._hung = first.picture

    @property
    def empty(self) -> bool:
        return self.scene is None and self.screen is None

    def begin(self) -> None:
        """A new episode: objects may have other shapes."""
        if self.scene is not None:
            self.scene.restyle()

    def draw(self, sight: Sight) -> None:
        if self.scene is not None and sight.places is not None and sight.turns is not None:
            self.scene.show(sight.places, sight.turns)
        elif self.screen is not None and sight.picture not in (None, self._hung):
            assert sight.picture is not None
            self.screen.show(sight.picture.picture())
            self._hung = sight.picture
