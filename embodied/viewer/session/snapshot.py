"""SnapshotRecorder: poses or image of parallel env 0 at one step, stored so that it can be shown
again."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.viewer.scene.decimate import DecimatedScene
from embodied.viewer.scene.detect import detect_scene
from embodied.viewer.scene.images import Picture, picture_of
from embodied.viewer.scene.types import Array, NoScene, SceneModel, Shape

LARGE, SMALL = (640, 480), (384, 288)
"""Width and height of rendered images, in pixels."""


@dataclass(frozen=True, slots=True)
class CompressedImage:
    """An image of `shape`, compressed fast (zlib level 1), as one is stored for every step."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, picture: Picture) -> CompressedImage:
        return cls(zlib.compress(picture.tobytes(), 1), picture.shape)

    def picture(self) -> Picture:
        """The image, uint8 [height, width, 3]."""
        return np.frombuffer(zlib.decompress(self.data), np.uint8).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class EnvSnapshot:
    """What the environment looked like at one step.

    `places` [N, 3] (m) and `turns` [N, 4] (quaternion w, x, y, z) are the poses of all bodies;
    without a 3D scene there is a `picture` instead, if the environment has one. `words` is the
    environment's description. `film` is the camera's image of an environment with a 3D scene, if
    `filming`.
    """

    places: Array | None = None
    turns: Array | None = None
    picture: CompressedImage | None = None
    words: str = ""
    film: CompressedImage | None = None


class SnapshotRecorder:
    """Records snapshots of parallel env 0 of `env`.

    `scene` is its 3D scene; None if it has none, and `no_scene_reason` says why. Then the snapshot
    has the image of the environment's camera, else the largest image observation. `render_error`
    says why the camera gives no image. While `filming`, the camera is rendered for every
    environment.

    Environments reset themselves inside the step that ends an episode; a hook records the final
    snapshot just before.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env, self.no_scene_reason, self.render_error, self.filming = env, "", "", False
        self.scene: SceneModel | None = None
        self.described = True
        self._last: EnvSnapshot | None = None
        try:
            found = detect_scene(env)
            self.scene = None if found is None else DecimatedScene(found)
        except NoScene as error:
            self.no_scene_reason = f"No 3D scene: {error}"
        env.add_pre_reset_hook(self._before_reset)

    def capture(self, shown: Tensors) -> EnvSnapshot:
        """The snapshot of the current state; `shown` are its observations, used if there is no
        camera."""
        if self.scene is not None:
            places, turns = self.scene.poses()
            shot = self._rendered() if self.filming else None
            film = None if shot is None else CompressedImage.of(shot)
            return EnvSnapshot(places, turns, None, self._words(), film)
        picture = self._rendered()
        picture = self._image(shown) if picture is None else picture
        packed = None if picture is None else CompressedImage.of(picture)
        return EnvSnapshot(None, None, packed, self._words())

    def shapes(self) -> list[Shape]:
        """All shapes with their meshes made: later the environment may have changed their sizes."""
        shapes = [] if self.scene is None else list(self.scene.shapes())
        return [shape for shape in shapes if shape.mesh() is not None]

    def after_step(self, shown: Tensors, ended: bool, before: EnvSnapshot) -> EnvSnapshot:
        """The snapshot after a step. If the episode ended and the environment (in another process)
        cannot be observed before its reset, the last snapshot `before` is used."""
        last, self._last = self._last, None
        if not ended:
            return self.capture(shown)
        last = before if last is None else last
        if self.scene is None and (self.render_error or last.picture is None):
            picture = self._image(shown)
            last = replace(last, picture=None if picture is None else CompressedImage.of(picture))
        return last

    def camera(self, size: tuple[int, int] = SMALL) -> Picture | None:
        """The image of the environment's camera, [height, width, 3]; None if it cannot be rendered,
        and `render_error` says why."""
        try:
            picture = self.env.render(0, *size).cpu().numpy()
        except (NotImplementedError, RuntimeError, ImportError) as error:
            # No camera, or no way to draw on this machine: the rest of the page goes on.
            self.render_error = f"No image: {error}"
            return None
        self.render_error = ""
        return picture

    def _before_reset(self, rows: Tensor) -> None:
        if bool(rows[0]):
            self._last = self.capture({})

    def _words(self) -> str:
        if not self.described:
            return ""
        try:
            return self.env.describe(0)
        except NotImplementedError:
            self.described = False
            return ""

    def _rendered(self) -> Picture | None:
        return None if self.render_error else self.camera(LARGE)

    def _image(self, shown: Tensors) -> Picture | None:
        leaves = self.env.spec.obs
        images = [name for name, leaf in leaves.items() if leaf.is_image and name in shown]
        if not images:
            return None
        name = max(images, key=lambda name: leaves[name].size)
        return picture_of(shown[name][0], leaves[name])
