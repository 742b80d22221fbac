"""Camera frames in shared memory: one writer process, any number of readers.

    camera.NAME   when the camera began, or why it has failed
    frames.NAME   its newest images in a ring buffer: number, time, frame

A device can be opened only once, so the camera process writes and the policy and the recorder
read. No process waits for another.

A recorded frame gets the newest image that is not later than its measurement, with the image's own
time. The images that the policy decided on are recorded bit by bit. No frame is given an image
older than `age`: the episode is cut before it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from embodied.real_robot.cameras.sources import CameraError, Frame, Picture, fitted, fresh
from embodied.real_robot.ipc.channels import CAMERA
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import VERSION

MOST = 32 << 20  # bytes of a ring
FEWEST, MANY = 8, 64  # pictures in one
LOOK = 0.003  # s
TRIES = 10  # reads of an image that is being written


def camera_mailbox(folder: Path, name: str, create: bool = False, write: bool = False) -> Mailbox:
    """Where the process of that camera says how it does."""
    return Mailbox(folder / f"camera.{_file_name(name)}", CAMERA, VERSION, create, write)


def frames_path(folder: Path, name: str) -> Path:
    """The file of its pictures."""
    return folder / f"frames.{_file_name(name)}"


class FrameWriter:
    """The writer's side, of the camera `name` of the daemon in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = frames_path(folder, name)
        self.mailbox = camera_mailbox(folder, name, write=True)
        self.ring: BlackBox | None = None

    def add(self, picture: Picture) -> None:
        """Let others see it; CameraError where it is of another size than those before."""
        if self.ring is None:
            # A new ring, which is there at once and whole; `t` is in s on the monotonic clock
            # that all processes of one machine share.
            size = (*picture.frame.shape[:2], 3)
            record = np.dtype([("number", "<i8"), ("t", "<f8"), ("frame", "u1", size)])
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


KEPT = 256  # pictures of each camera that are taken_at back upon


class FrameHistory:
    """`take` often. Of each reader height and width as in `sizes`; `seen` are those that the policy
    looks at as well; `age` in s."""

    def __init__(
        self,
        readers: Mapping[str, FrameReader],
        sizes: Mapping[str, tuple[int, int]],
        policy_names: Sequence[str],
        age: float,
    ) -> None:
        self.readers = readers
        self.sizes = dict(sizes)
        self.policy_names = tuple(policy_names)
        self.age = age
        self.kept: dict[str, OrderedDict[float, Frame]] = {name: OrderedDict() for name in sizes}

    def update(self) -> None:
        """What has come since."""
        for name, reader in self.readers.items():
            for picture in reader.since():
                self.add(name, picture.t, fitted(picture.frame, *self.sizes[name]))

    def add(self, name: str, t: float, frame: Frame) -> None:
        """`frame` as large as it is kept; pictures come in the order of their times."""
        kept = self.kept[name]
        kept[t] = frame
        if len(kept) > KEPT:
            kept.popitem(last=False)

    def at(self, measured: float) -> dict[str, Any]:
        """`obs/NAME` and `stamp/NAME` (s) of all cameras at that time; black and 0 where there is
        none."""
        made: dict[str, Any] = {}
        for name, kept in self.kept.items():
            t = next((t for t in reversed(kept) if t <= measured), 0.0)
            made |= {f"obs/{name}": self._frame(name, t), f"stamp/{name}": t}
        return made

    def decided(self, taken_at: Mapping[str, float]) -> dict[str, Any]:
        """`decided/NAME` and `stamp/decided/NAME` of the pictures that the policy saw, by their
        times; black and 0 where one is not here any more, or was never known."""
        made: dict[str, Any] = {}
        for name in self.policy_names:
            t = taken_at.get(name, 0.0)
            t = t if t in self.kept[name] else 0.0
            made |= {f"decided/{name}": self._frame(name, t), f"stamp/decided/{name}": t}
        return made

    def stale(self, moments: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
        """The first of `moments` (with `stamp/measured`) for which a camera had nothing new, and
        which; None where all is well."""
        for k, moment in enumerate(moments):
            for name in self.sizes:
                old = moment["stamp/measured"] - moment[f"stamp/{name}"]
                if old > self.age:
                    since = f"for {old:.2f} s" if moment[f"stamp/{name}"] else "yet"
                    return k, f"camera {name} had shown nothing new {since} at step {k}"
        return None

    def _frame(self, name: str, t: float) -> Frame:
        frame = self.kept[name].get(t)
        return np.zeros((*self.sizes[name], 3), np.uint8) if frame is None else frame
