"""Image observations of a policy, taken from the cameras that the deployment names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from embodied.core.build import ConfigError, Node
from embodied.core.spec import Spec, hidden
from embodied.real_robot.cameras.camera import Camera, Frame, fitted
from embodied.real_robot.cameras.shared_frames import FrameReader
from embodied.real_robot.cameras.sources import FIRST_IMAGE, shared_camera
from embodied.real_robot.ipc.messages import MOST_CAMERAS


class PolicyImages:
    """As a context: a camera for every picture of `spec`, opened by the first `look`; with `folder`
    what the cameras' own processes of the daemon there show. ConfigError where a picture has no
    camera, or is none that one takes (of other than 3 channels).

    `taken_at` are the times (s, monotonic clock) of the pictures of the last `look`, by name."""

    def __init__(
        self, spec: Spec, cameras: Mapping[str, Node], age: float, folder: Path | None = None
    ) -> None:
        self.age = age
        self._devices = ExitStack()
        self.taken_at: dict[str, float] = {}
        self.sizes = image_sizes(spec)
        if missing := [name for name in self.sizes if name not in cameras]:
            raise ConfigError(
                f"the policy has image observations ({missing[0]}): name a camera for it "
                f"(robot.cameras.{missing[0]}={{_target_: "
                "embodied.real_robot.cameras.sources.Video, device: ...}})"
            )
        self.cameras: dict[str, Camera | FrameReader] = {
            name: shared_camera(cameras[name]) if folder is None else FrameReader(folder, name)
            for name in self.sizes
        }
        self.opened = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._devices.close()

    @property
    def local_cameras(self) -> list[Camera]:
        """The cameras that this process has opened, or will."""
        return [each for each in self.cameras.values() if isinstance(each, Camera)]

    @property
    def scenes(self) -> list[Any]:
        """What is drawn and not taken."""
        found = (getattr(each.source, "scene", None) for each in self.local_cameras)
        return [scene for scene in found if scene is not None]

    def open(self) -> None:
        """Open what is not open, and wait until all have shown something; CameraError."""
        if not self.opened:
            self.opened = True
            for each in self.cameras.values():
                self._devices.enter_context(each)
            for each in self.cameras.values():
                each.next(0, FIRST_IMAGE)

    def close(self) -> None:
        """Close the cameras; the next `read` opens them again."""
        self.opened = False
        self._devices.close()

    def read(self) -> dict[str, Frame]:
        """The middle of each one's newest picture, uint8 [height, width, 3], as large as the policy
        wants it. CameraError where that is older than `age` s."""
        self.open()
        seen = {name: each.newest(self.age) for name, each in self.cameras.items()}
        self.taken_at = {name: picture.t for name, picture in seen.items()}
        return {name: fitted(seen[name].frame, *size) for name, size in self.sizes.items()}


def image_sizes(spec: Spec) -> dict[str, tuple[int, int]]:
    """Height and width of every picture that a policy of `spec` sees; ConfigError."""
    found: dict[str, tuple[int, int]] = {}
    for name, leaf in spec.obs.items():
        if leaf.is_image and not hidden(name):
            height, width, channels = leaf.shape
            if channels != 3:
                raise ConfigError(f"no camera takes pictures of {channels} channels ({name})")
            found[name] = (height, width)
    if len(found) > MOST_CAMERAS:
        raise ConfigError(f"a policy on a robot sees up to {MOST_CAMERAS} pictures")
    return found
