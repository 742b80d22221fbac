"""The middle of the page: a scene in 3D where the world has one, else its picture, else nothing."""

from __future__ import annotations

from viser import ViserServer

from embodied.viewer.look import NoScene, look_at
from embodied.viewer.pictures import Picture, picture_of
from embodied.viewer.scene import Scene
from embodied.viewer.screen import Screen
from embodied.viewer.session import Session

LARGE, SMALL = (640, 480), (384, 288)
"""Width and height in pixels."""


class Stage:
    """`draw` sends what moved; `trouble` says why there is no picture, where there is none.

    `flat` says why a world with a scene is not drawn in 3D. A world without a camera is shown as
    the largest image among its observations.
    """

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.session, self.trouble, self.scene, self.flat = session, "", None, ""
        try:
            if (look := look_at(session.env)) is not None:
                self.scene = Scene(server, look)
        except NoScene as error:
            self.flat = f"No 3D scene: {error}"
        first = None if self.scene is not None else self._picture()
        self.screen = None if first is None else Screen(server, first)

    @property
    def empty(self) -> bool:
        return self.scene is None and self.screen is None

    def begin(self) -> None:
        """A new episode: objects may have other shapes."""
        if self.scene is not None:
            self.scene.restyle()

    def draw(self) -> None:
        if self.scene is not None:
            self.scene.show()
        elif self.screen is not None and (picture := self._picture()) is not None:
            self.screen.show(picture)

    def camera(self, size: tuple[int, int] = SMALL) -> Picture | None:
        """What the world's own camera sees, [height, width, 3]; None, and why, where it cannot."""
        try:
            picture = self.session.env.render(0, *size).cpu().numpy()
        except (NotImplementedError, RuntimeError, ImportError) as error:
            # No camera, or no way to draw on this machine: the rest of the page goes on.
            self.trouble = f"No picture: {error}"
            return None
        self.trouble = ""
        return picture

    def _picture(self) -> Picture | None:
        seen = self._image()
        if self.trouble:
            return seen
        drawn = self.camera(LARGE)
        return seen if drawn is None else drawn

    def _image(self) -> Picture | None:
        leaves = self.session.env.spec.obs
        images = [name for name, leaf in leaves.items() if leaf.is_image]
        if not images:
            return None
        name = max(images, key=lambda name: leaves[name].size)
        return picture_of(self.session.shown[name][0], leaves[name])
