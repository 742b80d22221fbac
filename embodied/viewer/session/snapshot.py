"""Witness: all there is to see of row 0 at one moment, kept so that it can be shown again."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.viewer.scene.decimate import LightLook
from embodied.viewer.scene.detect import detect_scene
from embodied.viewer.scene.images import Picture, picture_of
from embodied.viewer.scene.types import Array, Look, NoScene, Shape

LARGE, SMALL = (640, 480), (384, 288)
"""Width and height in pixels."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A picture of `shape`, smaller: fast to pack, as it is done at every step."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, picture: Picture) -> Packed:
        return cls(zlib.compress(picture.tobytes(), 1), picture.shape)

    def picture(self) -> Picture:
        """[height, width, 3]"""
        return np.frombuffer(zlib.decompress(self.data), np.uint8).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen: `places` [N, 3] (m) and `turns` [N, 4] (w, x, y, z) of all bodies, or, where
    there is no scene, a `picture`, if there is one; and the world in `words`. `film` is what the
    camera sees of a world with a scene, where that was asked for."""

    places: Array | None = None
    turns: Array | None = None
    picture: Packed | None = None
    words: str = ""
    film: Packed | None = None


class Witness:
    """Looks at row 0 of `env`.

    `look` is its scene in 3D, None where it has none, and `flat` says why it is not drawn; then the
    picture is that of the world's own camera, else the largest image among the observations.
    `trouble` says why that camera gives none. While `filming`, it is used in any world.

    Worlds begin rows anew inside the step that ends them: the witness looks just before that.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env, self.flat, self.trouble, self.filming = env, "", "", False
        self.look: Look | None = None
        self.described = True
        self._last: Sight | None = None
        try:
            found = detect_scene(env)
            self.look = None if found is None else LightLook(found)
        except NoScene as error:
            self.flat = f"No 3D scene: {error}"
        env.add_pre_reset_hook(self._leaving)

    def see(self, shown: Tensors) -> Sight:
        """What is there now; `shown` are the observations, for worlds that are looked at so."""
        if self.look is not None:
            places, turns = self.look.poses()
            shot = self._drawn() if self.filming else None
            film = None if shot is None else Packed.of(shot)
            return Sight(places, turns, None, self._words(), film)
        picture = self._drawn()
        picture = self._image(shown) if picture is None else picture
        packed = None if picture is None else Packed.of(picture)
        return Sight(None, None, packed, self._words())

    def shapes(self) -> list[Shape]:
        """What there is to draw, meshes made: later the world may have changed its sizes."""
        shapes = [] if self.look is None else list(self.look.shapes())
        return [shape for shape in shapes if shape.mesh() is not None]

    def after(self, shown: Tensors, ended: bool, before: Sight) -> Sight:
        """What a step led to. Worlds in other processes begin rows anew unseen: the last that was
        seen `before` stays."""
        last, self._last = self._last, None
        if not ended:
            return self.see(shown)
        last = before if last is None else last
        if self.look is None and (self.trouble or last.picture is None):
            picture = self._image(shown)
            last = replace(last, picture=None if picture is None else Packed.of(picture))
        return last

    def camera(self, size: tuple[int, int] = SMALL) -> Picture | None:
        """What the world's own camera sees, [height, width, 3]; None, and why, where it cannot."""
        try:
            picture = self.env.render(0, *size).cpu().numpy()
        except (NotImplementedError, RuntimeError, ImportError) as error:
            # No camera, or no way to draw on this machine: the rest of the page goes on.
            self.trouble = f"No picture: {error}"
            return None
        self.trouble = ""
        return picture

    def _leaving(self, rows: Tensor) -> None:
        if bool(rows[0]):
            self._last = self.see({})

    def _words(self) -> str:
        if not self.described:
            return ""
        try:
            return self.env.describe(0)
        except NotImplementedError:
            self.described = False
            return ""

    def _drawn(self) -> Picture | None:
        return None if self.trouble else self.camera(LARGE)

    def _image(self, shown: Tensors) -> Picture | None:
        leaves = self.env.spec.obs
        images = [name for name, leaf in leaves.items() if leaf.is_image and name in shown]
        if not images:
            return None
        name = max(images, key=lambda name: leaves[name].size)
        return picture_of(shown[name][0], leaves[name])
