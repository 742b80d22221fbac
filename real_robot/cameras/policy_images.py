"""Images from the cameras that a deployment names: a policy's observations, and RealEnv's, with the
camera that rewards look through.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from embodied.core.build import ConfigError, Node
from embodied.core.spec import Spec, hidden
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.cameras.shared_frames import FrameReader
from embodied.real_robot.cameras.sources import (
    FIRST_IMAGE,
    Camera,
    CameraError,
    Frame,
    MeasuredScene,
    fitted,
    measured_scene,
    shared_camera,
)
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import MOST_CAMERAS


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


AGAIN = 0.5  # s between two tries to open a camera


class EnvImages:
    """The deployment's cameras for the pictures of `spec`, and `watch` for rewards (both may be one
    device); none of a picture older than `age` s. ConfigError where a picture has no camera."""

    def __init__(
        self, spec: Spec, deployment: Deployment, reward_camera: Node | None, age: float
    ) -> None:
        self.images = PolicyImages(spec, deployment.cameras, age)
        self.deployment = deployment
        self.age = age
        self.reward_camera = None if reward_camera is None else shared_camera(reward_camera)
        self._opened_reward_camera = ExitStack()
        self.reward_opened = False
        self.scenes: list[tuple[Any, MeasuredScene]] = []

    def attach_state(self, folder: Path, given: Mapping[str, float]) -> None:
        """Drawn pictures are of what is measured in the daemon's `folder`, and `given`."""
        own = [] if self.reward_camera is None else [self.reward_camera]
        for each in [*self.images.local_cameras, *own]:
            state = open_channels(self.deployment, folder).state
            if (scene := measured_scene(each, state, self.deployment.sensed, given)) is not None:
                self.scenes.append((each.source, scene))
        self.use_own_state()

    def use_own_state(self) -> None:
        """Drawn pictures are of this one's episode from now on, where others look as well."""
        for source, scene in self.scenes:
            source.scene = scene

    def open(self, rest: Callable[[], None]) -> None:
        """Open the policy's cameras, where they are not; that takes its time, and so the arm comes
        to `rest` before. ConfigError where one cannot be opened."""
        if self.images.opened:
            return
        rest()
        try:
            self.images.open()
        except CameraError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def read(self) -> dict[str, Frame]:
        """The newest pictures of the policy, as large as it wants them; CameraError."""
        return self.images.read()

    def wait(self, error: CameraError, patience: float) -> dict[str, Frame]:
        """What is seen once an operator has put right what `error` says; CameraError where it
        goes on for `patience` s."""
        print(f"the arm is held: {error}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + patience
        while True:
            self.close()
            try:
                return self.read()
            except CameraError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN)

    def reward_image(self, t: float) -> Frame:
        """What rewards look at, taken at `t` (s, monotonic clock) or later; the first look opens
        it. CameraError where none comes within `age` s."""
        if self.reward_camera is None:
            raise NotImplementedError("this arm has no camera: env.camera")
        if not self.reward_opened:
            self.reward_opened = True
            self._opened_reward_camera.enter_context(self.reward_camera)
            self.reward_camera.next(0, FIRST_IMAGE)
        last = self.reward_camera.newest(FIRST_IMAGE)
        if hasattr(self.reward_camera.source, "scene"):  # the next one may have been begun before
            return self.reward_camera.next(last.number + 1, self.age).frame
        if last.t >= t:
            return last.frame
        return self.reward_camera.next(last.number, self.age).frame

    def close(self) -> None:
        """Let go of the devices; the next look opens them again."""
        self.reward_opened = False
        self._opened_reward_camera.close()
        self.images.close()
