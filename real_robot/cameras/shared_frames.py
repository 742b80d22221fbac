"""Camera frames in shared memory: one writer process, any number of readers.

    camera.NAME   when the camera began, or why it has failed
    frames.NAME   its newest images in a ring buffer: number, time, frame

A device can be opened only once, so the camera process writes and the policy and the recorder
read. No process waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from embodied.real_robot.cameras.camera import CameraError, Picture, fresh
from embodied.real_robot.ipc.mailbox import Mailbox
from embodied.real_robot.ipc.messages import CAMERA, VERSION
from embodied.real_robot.ipc.ring_buffer import BlackBox

MOST = 32 << 20  # bytes of a ring
FEWEST, MANY = 8, 64  # pictures in one
LOOK = 0.003  # s
TRIES = 10  # reads of an image that is being written


def camera_mailbox(folder: Path, name: str, create: bool = False) -> Mailbox:
    """Where the process of that camera says how it does."""
    return Mailbox(folder / f"camera.{_file_name(name)}", CAMERA, VERSION, create)


def frames_path(folder: Path, name: str) -> Path:
    """The file of its pictures."""
    return folder / f"frames.{_file_name(name)}"


def frame_record(height: int, width: int) -> np.dtype[Any]:
    """One picture; `t` in s on the monotonic clock that all processes of one machine share."""
    return np.dtype([("number", "<i8"), ("t", "<f8"), ("frame", "u1", (height, width, 3))])


class FrameWriter:
    """The writer's side, of the camera `name` of the daemon in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = frames_path(folder, name)
        self.mailbox = camera_mailbox(folder, name)
        self.ring: BlackBox | None = None

    def add(self, picture: Picture) -> None:
        """Let others see it; CameraError where it is of another size than those before."""
        if self.ring is None:
            # A new ring, which is there at once and whole
            record = frame_record(*picture.frame.shape[:2])
            part = self.path.with_name(f".{self.path.name}")
            part.unlink(missing_ok=True)
            slots = min(MANY, max(FEWEST, MOST // record.itemsize))
            self.record = np.zeros(1, record)
            self.ring = BlackBox(part, record, slots, create=True)
            part.replace(self.path)
        assert self.ring is not None
        frame = self.record["frame"][0]
        if picture.frame.shape != frame.shape:
            raise CameraError(
                f"camera {self.path.suffix[1:]}: pictures of {frame.shape[:2]}, then of "
                f"{picture.frame.shape[:2]}: they should all have one size"
            )
        self.record["number"], self.record["t"] = picture.number, picture.t
        frame[:] = picture.frame
        self.ring.add(self.record)
        if not self.mailbox.fields["began"][0]:
            self.mailbox.fields["began"] = time.monotonic_ns()
            self.mailbox.send()

    def fail(self, reason: str) -> None:
        """Say why there are no more."""
        self.mailbox.fields["fault"] = reason.encode()[:239]
        self.mailbox.send()


class FrameReader:
    """A reader's side; as a context, like a Camera. It also finds a camera that begins anew."""

    def __init__(
        self, folder: Path, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.clock = clock
        self.path = frames_path(folder, name)
        self.mailbox = camera_mailbox(folder, name)
        self.ring: BlackBox | None = None
        self._opened = clock()
        self._began = 0
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.mailbox.close()
        self._release()

    def newest(self, age: float) -> Picture:
        """The newest picture, which must not be older than `age` s; CameraError."""
        self._update()
        if fault := bytes(self.mailbox.fields["fault"][0]).decode(errors="replace"):
            raise CameraError(fault)
        return fresh(self._newest(), age, self.clock(), self._opened, self.name)

    def next(self, number: int, patience: float) -> Picture:
        """The first picture after number `number`, waited for up to `patience` s; CameraError."""
        deadline = self.clock() + patience
        while self.clock() < deadline and not self.mailbox.fields["fault"][0]:
            self._update()
            picture = self._newest()
            if picture is not None and picture.number > number:
                return picture
            time.sleep(LOOK)
        return self.newest(patience)

    def since(self) -> list[Picture]:
        """Those that came since this was asked last, as far as they are still there."""
        self._update()
        if self.ring is None:
            return []
        records, self._count = self.ring.since(self._count)
        return [_picture(record) for record in records]

    def _update(self) -> None:
        """At the ring of the process that shows pictures now."""
        if not self.mailbox.receive() or int(self.mailbox.fields["began"][0]) in (0, self._began):
            return
        self._release()
        self._began = int(self.mailbox.fields["began"][0])
        self._count = 0
        self.ring = BlackBox.left(self.path)

    def _newest(self) -> Picture | None:
        for _ in range(TRIES):
            if self.ring is None or not self.ring.count:
                return None
            records, _ = self.ring.since(self.ring.count - 1)
            if len(records):  # else it was overwritten meanwhile, or is not to be seen yet
                return _picture(records[-1])
        return None

    def _release(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.ring = None


def _picture(record: np.void) -> Picture:
    return Picture(record["frame"], float(record["t"]), int(record["number"]))


def _file_name(name: str) -> str:
    return name.replace("/", ".")
