"""Sight: what RealEnv sees: the pictures of the policy, and those that rewards look at."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError, Node
from embodied.core.spec import Spec
from real_robot.cameras.camera import Camera, CameraError, Frame
from real_robot.cameras.policy_images import Eyes
from real_robot.cameras.rendered import Posed, posed
from real_robot.cameras.sources import FIRST, lent
from real_robot.deployment import Deployment

AGAIN = 0.5  # s between two tries to open a camera


class Sight:
    """The deployment's cameras for the pictures of `spec`, and `watch` for rewards (both may be one
    device); none of a picture older than `age` s. ConfigError where a picture has no camera."""

    def __init__(self, spec: Spec, deployment: Deployment, watch: Node | None, age: float) -> None:
        self.eyes, self.deployment, self.age = Eyes(spec, deployment.cameras, age), deployment, age
        self.watch: Camera | None = None if watch is None else lent(watch)
        self.watching, self.looks = ExitStack(), False
        self.drawn: list[tuple[Any, Posed]] = []

    def follow(self, folder: Path, given: Mapping[str, float]) -> None:
        """Drawn pictures are of what is measured in the daemon's `folder`, and `given`."""
        cameras = [*self.eyes.own, *([] if self.watch is None else [self.watch])]
        for each in cameras:
            state = self.deployment.boxes(folder).state
            if (scene := posed(each, state, self.deployment.sensed, given)) is not None:
                self.drawn.append((each.source, scene))
        self.mine()

    def mine(self) -> None:
        """Drawn pictures are of this one's episode from now on, where others look as well."""
        for source, scene in self.drawn:
            source.scene = scene

    def begin(self, rest: Callable[[], None]) -> None:
        """Open the policy's cameras, where they are not; that takes its time, and so the arm comes
        to `rest` before. ConfigError where one cannot be opened."""
        if self.eyes.opened:
            return
        rest()
        try:
            self.eyes.begin()
        except CameraError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def look(self) -> dict[str, Frame]:
        """The newest pictures of the policy, as large as it wants them; CameraError."""
        return self.eyes.look()

    def wait(self, error: CameraError, patience: float) -> dict[str, Frame]:
        """What is seen once whoever looks after the cameras has put right what `error` says;
        CameraError where nobody did in `patience` s."""
        print(f"the arm is held: {error}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + patience
        while True:
            self.close()
            try:
                return self.look()
            except CameraError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN)

    def after(self, t: float) -> Frame:
        """What rewards look at, taken at `t` (s, monotonic clock) or later; the first look opens
        it. CameraError where none comes within `age` s."""
        if self.watch is None:
            raise NotImplementedError("this arm has no camera: env.camera")
        if not self.looks:
            self.looks = True
            self.watching.enter_context(self.watch)
            self.watch.next(0, FIRST)
        last = self.watch.newest(FIRST)
        if hasattr(self.watch.source, "scene"):  # the next one may have been begun before
            return self.watch.next(last.number + 1, self.age).frame
        if last.t >= t:
            return last.frame
        return self.watch.next(last.number, self.age).frame

    def close(self) -> None:
        """Let go of the devices; the next look opens them again."""
        self.looks = self.eyes.opened = False
        self.watching.close()
        self.eyes.open.close()
