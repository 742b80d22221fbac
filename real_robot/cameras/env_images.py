"""Images for RealEnv: the policy's observations, and the camera that rewards look through."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError, Node
from embodied.core.spec import Spec
from embodied.real_robot.assemble import open_channels
from embodied.real_robot.cameras.camera import Camera, CameraError, Frame
from embodied.real_robot.cameras.policy_images import PolicyImages
from embodied.real_robot.cameras.sources import (
    FIRST_IMAGE,
    MeasuredScene,
    measured_scene,
    shared_camera,
)
from embodied.real_robot.deployment import Deployment

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
        self.reward_camera: Camera | None = (
            None if reward_camera is None else shared_camera(reward_camera)
        )
        self._opened_reward_camera = ExitStack()
        self.reward_opened = False
        self.scenes: list[tuple[Any, MeasuredScene]] = []

    def attach_state(self, folder: Path, given: Mapping[str, float]) -> None:
        """Drawn pictures are of what is measured in the daemon's `folder`, and `given`."""
        cameras = [
            *self.images.local_cameras,
            *([] if self.reward_camera is None else [self.reward_camera]),
        ]
        for each in cameras:
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
