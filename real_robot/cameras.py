"""Cameras: the newest picture and when it was taken, from a thread that waits for the device.

A picture is stamped right after it was grabbed; older ones are thrown away. A camera that stalls,
freezes or dies is said, never papered over with its last picture.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError, Node, build

Frame = NDArray[np.uint8]


class CameraError(RuntimeError):
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

    def close(self) -> None: ...


class Camera:
    """A source and its thread; use as a context. `repeats`: a picture may come so often in a row,
    to the last bit, before the camera counts as frozen (0: any number, for rendered ones)."""

    def __init__(
        self, source: Source, repeats: int = 10, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source, self.repeats, self.clock = source, repeats, clock
        self._picture: Picture | None = None
        self._fault, self._same = "", 0
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.source.open()
        self._opened = self.clock()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(2.0)  # a device that hangs is left to its thread

    def newest(self, age: float) -> Picture:
        """The newest picture, which must not be older than `age` s."""
        with self._changed:
            picture, fault = self._picture, self._fault
        if fault:
            raise CameraError(fault)
        since = self.clock() - (self._opened if picture is None else picture.t)
        if picture is None or since > age:
            raise CameraError(
                f"camera {self.source.name} has shown nothing new for {since:.2f} s: look at its "
                "cable and its light"
            )
        return picture

    def next(self, number: int, patience: float) -> Picture:
        """The first picture after number `number`, waited for up to `patience` s."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._fault) or (self._picture and self._picture.number > number),
                patience,
            )
        return self.newest(patience)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._take(self.source.grab(), self.clock())
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


@dataclass(frozen=True)
class VideoConfig:
    """A V4L2 device (`/dev/v4l/by-id/...` keeps its name), or a film's file. `exposure` and
    `white` switch the automatics off (None: they stay, and pictures change by themselves)."""

    device: str
    width: int = 640
    height: int = 480
    fps: int = 30
    exposure: float | None = None
    white: float | None = None


class Video:
    """OpenCV's reader; a film is played at its `fps`, and ends with an error."""

    def __init__(self, config: VideoConfig) -> None:
        self.config, self.name = config, config.device
        self._due = 0.0

    def open(self) -> None:
        cv2, config = _cv2(), self.config
        self._film = Path(config.device).is_file()
        device = int(config.device) if config.device.isdigit() else config.device
        reader: Any = cv2.VideoCapture(device, cv2.CAP_ANY if self._film else cv2.CAP_V4L2)
        if not reader.isOpened():
            raise CameraError(f"camera {self.name} cannot be opened: is it there, is it in use?")
        if not self._film:
            self._set(cv2, reader)
        self._reader, self._due = reader, time.monotonic()

    def grab(self) -> Frame:
        if self._film:
            self._due += 1 / self.config.fps
            time.sleep(max(0.0, self._due - time.monotonic()))
        good, frame = self._reader.read()
        if not good:
            raise CameraError(f"camera {self.name} gives no more pictures: look at its cable")
        return np.ascontiguousarray(frame[:, :, ::-1])

    def close(self) -> None:
        self._reader.release()

    def _set(self, cv2: Any, reader: Any) -> None:
        """Compressed before the size, or many refuse it; one buffer, or pictures are old."""
        config = self.config
        wanted = {
            cv2.CAP_PROP_FOURCC: cv2.VideoWriter.fourcc(*"MJPG"),
            cv2.CAP_PROP_FRAME_WIDTH: config.width,
            cv2.CAP_PROP_FRAME_HEIGHT: config.height,
            cv2.CAP_PROP_FPS: config.fps,
            cv2.CAP_PROP_BUFFERSIZE: 1,
        }
        if config.exposure is not None:
            wanted |= {cv2.CAP_PROP_AUTO_EXPOSURE: 1, cv2.CAP_PROP_EXPOSURE: config.exposure}
        if config.white is not None:
            wanted |= {cv2.CAP_PROP_AUTO_WB: 0, cv2.CAP_PROP_WB_TEMPERATURE: config.white}
        for key, value in wanted.items():
            reader.set(key, value)
        size = int(reader.get(cv2.CAP_PROP_FRAME_WIDTH)), int(reader.get(cv2.CAP_PROP_FRAME_HEIGHT))
        if size != (config.width, config.height):
            reader.release()
            raise CameraError(
                f"camera {self.name} has no {config.width} x {config.height} pictures, but "
                f"{size[0]} x {size[1]}"
            )


@dataclass(frozen=True)
class RenderedConfig:
    """`scene`: a node of something with `picture() -> uint8 [height, width, 3]`. Pictures come
    `fps` times a second, `latency` s after they were true, a share `lost` of them never, with
    `noise` (grey levels, deviation)."""

    scene: Node
    fps: float = 30.0
    latency: float = 0.0
    lost: float = 0.0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.fps > 0 and self.latency >= 0 and 0 <= self.lost < 1 and self.noise >= 0):
            raise ConfigError("a rendered camera needs fps above 0, latency, lost, noise from 0 on")


class Rendered:
    """A picture of a simulated scene, as late and as noisy as a real camera's."""

    name = "rendered"

    def __init__(self, config: RenderedConfig) -> None:
        self.config, self.scene = config, build(config.scene)
        self.random = np.random.default_rng(config.seed)

    def open(self) -> None:
        self._due = time.monotonic()

    def grab(self) -> Frame:
        config = self.config
        lost = 1
        while self.random.random() < config.lost:
            lost += 1
        self._due = max(self._due + lost / config.fps, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))
        frame: Frame = self.scene.picture()
        time.sleep(config.latency)
        if config.noise:
            rough = frame + self.random.normal(0, config.noise, frame.shape)
            frame = np.clip(np.rint(rough), 0, 255).astype(np.uint8)
        return frame

    def close(self) -> None:
        """A scene that holds something lets go of it."""
        if (let_go := getattr(self.scene, "close", None)) is not None:
            let_go()


def fitted(frame: Frame, height: int, width: int) -> Frame:
    """The middle of `frame` in the shape of `height` x `width`, at that size."""
    cv2 = _cv2()
    tall, wide = frame.shape[:2]
    share = min(tall / height, wide / width)
    rows, columns = round(height * share), round(width * share)
    top, left = (tall - rows) // 2, (wide - columns) // 2
    middle = frame[top : top + rows, left : left + columns]
    return cv2.resize(middle, (width, height), interpolation=cv2.INTER_AREA)


def _cv2() -> Any:
    try:
        import cv2
    except ModuleNotFoundError as error:
        raise CameraError("OpenCV is not installed; type: pip install opencv-python") from error
    return cv2
