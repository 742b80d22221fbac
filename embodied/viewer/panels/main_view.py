"""The middle of the page: a scene in 3D where the world has one, else its picture, else nothing.

A rival's is beside it.
"""

from __future__ import annotations

import numpy as np
from viser import CameraHandle, InitialCameraConfig, ViserServer

from embodied.viewer.scene.image_plane import Screen
from embodied.viewer.scene.images import Picture
from embodied.viewer.scene.types import Array, Eye, Look
from embodied.viewer.scene.viser_scene import Place, Scene
from embodied.viewer.session.player import Player
from embodied.viewer.session.session import Session
from embodied.viewer.session.snapshot import Packed

ROOTS = ("/world", "/rival")
GAP = 12
"""Pixels between two pictures."""


class Stage:
    """`draw` sends what moved; a world without a camera is shown as the largest image among its
    observations."""

    def __init__(self, server: ViserServer, session: Session) -> None:
        self.server, self.session = server, session
        looks = [each.witness.look for each in session.both]
        looks = [look for look in looks if look is not None]
        self.scenes = self._scenes(looks)
        self.scene = self.scenes[0] if self.scenes else None
        self._hung = self._pictures()
        self.screen = Screen(server, beside(self._hung)) if self._hung else None

    @property
    def empty(self) -> bool:
        return self.scene is None and self.screen is None

    def begin(self) -> None:
        """A new episode: objects may have other shapes."""
        for scene in self.scenes:
            scene.restyle()

    def follow(self, on: bool) -> None:
        """Whether the eye goes along with what is followed."""
        for scene in self.scenes:
            scene.follow = on

    def draw(self, share: float = 1.0) -> None:
        """Send the moment that is looked at; with a `share` below 1, what was that much of the way
        there from the moment before."""
        for scene, each in zip(self.scenes, self.session.both, strict=False):
            if (poses := poses_at(each, share)) is not None:
                scene.show(*poses)
        pictures = self._pictures()
        if self.screen is not None and pictures and pictures != self._hung:
            self.screen.show(beside(pictures))
            self._hung = pictures

    def _pictures(self) -> list[Packed]:
        seen = [each.now.sight.picture for each in self.session.both]
        return [picture for picture in seen if picture is not None]

    def _scenes(self, looks: list[Look]) -> list[Scene]:
        if not looks:
            return []
        eye = looks[0].eye()
        step = apart(looks[0], eye) if len(looks) > 1 else np.zeros(3)
        places: list[Place] = [(0.0, 0.0, 0.0), (float(step[0]), float(step[1]), float(step[2]))]
        scenes = [Scene(self.server, *each) for each in zip(looks, ROOTS, places, strict=False)]
        away = (eye.place - eye.target) * (1.35 if len(looks) > 1 else 1.0)
        target = eye.target + step / 2
        aim(self.server, Eye(target + away, target, eye.fov))
        return scenes


def poses_at(player: Player, share: float) -> tuple[Array, Array] | None:
    """Places [N, 3] and turns [N, 4] between two moments; None without a scene."""
    moments = player.episode.moments
    at = min(player.at, len(moments) - 1)
    now, before = moments[at].sight, moments[max(at - 1, 0)].sight
    if now.places is None or now.turns is None:
        return None
    if share >= 1.0 or before.places is None or before.turns is None or player.at > at:
        return now.places, now.turns
    # The nearer of the two quaternions that mean the same turn.
    sign = np.sign((now.turns * before.turns).sum(1, keepdims=True) + 1e-12)
    turns = share * sign * now.turns + (1 - share) * before.turns
    turns /= np.maximum(np.linalg.norm(turns, axis=1, keepdims=True), 1e-9)
    return share * now.places + (1 - share) * before.places, turns


def aim(server: ViserServer, eye: Eye) -> None:
    """Look from there: whoever opens the page, and whoever did before there was anything to see."""

    def turn(camera: InitialCameraConfig | CameraHandle) -> None:
        camera.position, camera.look_at = eye.place, eye.target
        if eye.fov is not None:
            camera.fov = eye.fov

    turn(server.initial_camera)
    server.on_client_connect(lambda client: turn(client.camera))


def apart(look: Look, eye: Eye) -> np.ndarray:
    """How far to the right of the first scene the second one stands [3], m."""
    places = look.poses()[0]
    size = float(np.linalg.norm(np.ptp(places[1:] if len(places) > 1 else places, axis=0)))
    right = np.cross(eye.target - eye.place, (0.0, 0.0, 1.0))
    return right / max(float(np.linalg.norm(right)), 1e-9) * max(1.3 * size, 0.6)


def beside(pictures: list[Packed]) -> Picture:
    """Pictures side by side, with a gap; the same size, as they are of the same world."""
    shown = [packed.picture() for packed in pictures]
    gap = np.full((len(shown[0]), GAP, 3), 255, np.uint8)
    parts = [part for picture in shown for part in (gap, picture)][1:]
    return np.ascontiguousarray(np.concatenate(parts, 1))
