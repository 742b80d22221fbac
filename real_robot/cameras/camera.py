"""A camera read by a thread: the newest image and its capture time.

An image is stamped right after it was grabbed, or with the time that its device says; older ones
are dropped. A camera that stalls,
freezes or dies raises CameraError; its last image is never reused in silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Bound
from embodied.core.errors import RobotError

Frame = NDArray[np.uint8]
Side = Annotated[int, Bound(1, 4096)]
"""Pixels of one side of an image."""


class CameraError(RobotError):
    """No picture that may be used: one line that says which camera and what to look at."""


@dataclass(frozen=True)
class Picture:
    """`frame` [height, width, 3], red first, taken at `t` (s, monotonic clock); the `number`th."""

    frame: Frame
    t: float
    number: int


class Source(Protocol):
    """Where frames come from. `grab` waits for the next one; CameraError where there is none."""

    name: str

    def open(self) -> None: ...

    def grab(self) -> Frame: ...

    def taken(self) -> float | None:
        """When the frame that `grab` gave last was taken (s, monotonic clock), where the device
        says so; None: it is stamped as it is grabbed."""
        return None

    def close(self) -> None: ...


class Scene(Protocol):
    """What a rendered camera (`embodied.real_robot.cameras.sources.Rendered`) looks at."""

    def picture(self) -> Frame:
        """Its image now, uint8 [height, width, 3]."""
        ...


class Camera:
    """A source and its thread; use as a context, opened with the first who enters (or again, where
    it has ended meanwhile) and closed with the last who leaves. `repeats`: a picture may come so
    often in a row, to the last bit, before the camera counts as frozen (0: any number, for rendered
    ones)."""

    def __init__(
        self, source: Source, repeats: int = 10, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = source
        self.repeats = repeats
        self.clock = clock
        self._picture: Picture | None = None
        self._fault = ""
        self._same = 0
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._users = 0
        self._opened = clock()

    def __enter__(self) -> Self:
        if not self._users or not self._thread.is_alive():
            self.source.open()
            self._opened = self.clock()
            self._picture = None
            self._fault = ""
            self._over = threading.Event()  # a thread that hangs since before keeps its own
            self._thread = threading.Thread(target=self._run, args=(self._over,), daemon=True)
            self._thread.start()
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            self._over.set()
            self._thread.join(2.0)  # a device that hangs is left to its thread

    def newest(self, age: float) -> Picture:
        """The newest picture, which must not be older than `age` s."""
        with self._changed:
            picture, fault = self._picture, self._fault
        if fault:
            raise CameraError(fault)
        return fresh(picture, age, self.clock(), self._opened, self.source.name)

    def next(self, number: int, patience: float) -> Picture:
        """The first picture after number `number`, waited for up to `patience` s."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._fault) or (self._picture and self._picture.number > number),
                patience,
            )
        return self.newest(patience)

    def _run(self, over: threading.Event) -> None:
        try:
            while not over.is_set():
                frame, now = self.source.grab(), self.clock()
                taken = self.source.taken()
                self._take(frame, now if taken is None else min(taken, now))
        except CameraError as error:
            with self._changed:
                self._fault = str(error)
                self._changed.notify_all()
        finally:
            self.source.close()  # here: what draws can only be let go of by its own thread

    def _take(self, frame: Frame, t: float) -> None:
        before = self._picture
        same = before is not None and np.array_equal(before.frame, frame)
        self._same = self._same + 1 if same else 0
        with self._changed:
            self._picture = Picture(frame, t, 1 if before is None else before.number + 1)
            frozen = bool(self.repeats) and self._same >= self.repeats
            self._fault = (
                f"camera {self.source.name} is frozen: the same picture {self._same + 1} times"
                if frozen
                else ""
            )
            self._changed.notify_all()


def fresh(picture: Picture | None, age: float, now: float, opened: float, name: str) -> Picture:
    """`picture`; CameraError where none came since `opened` (s), or it is older than `age` s."""
    since = now - (opened if picture is None else picture.t)
    if picture is None or since > age:
        raise CameraError(
            f"camera {name} has shown nothing new for {since:.2f} s: look at its cable, its light "
            "and its log"
        )
    return picture


def fitted(frame: Frame, height: int, width: int) -> Frame:
    """The middle of `frame` in the shape of `height` x `width`, at that size."""
    cv2 = opencv()
    tall, wide = frame.shape[:2]
    share = min(tall / height, wide / width)
    rows, columns = round(height * share), round(width * share)
    top, left = (tall - rows) // 2, (wide - columns) // 2
    middle = frame[top : top + rows, left : left + columns]
    return cv2.resize(middle, (width, height), interpolation=cv2.INTER_AREA)


def opencv() -> Any:
    try:
        import cv2
    except ModuleNotFoundError as error:
        raise CameraError("OpenCV is not installed; type: pip install opencv-python") from error
    return cv2
