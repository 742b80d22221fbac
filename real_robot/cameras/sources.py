"""Cameras: a thread that reads the newest image and its capture time, from one of these sources: a
V4L2 device, a video file, a folder of images, a rendered scene.

An image is stamped right after it was grabbed, or with the time that its device says; older ones
are dropped. A camera that stalls, freezes or dies raises CameraError; its last image is never
reused in silence.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from embodied.core.bounds import Bound, Positive
from embodied.core.build import Node, build
from embodied.core.errors import RobotError
from embodied.real_robot.kernel.mailbox import Mailbox

Frame = NDArray[np.uint8]
Side = Annotated[int, Bound(1, 4096)]  # pixels of one side of an image


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
        fault = ""
        if self.repeats and self._same >= self.repeats:
            fault = f"camera {self.source.name} is frozen: the same picture {self._same + 1} times"
        with self._changed:
            self._picture = Picture(frame, t, 1 if before is None else before.number + 1)
            self._fault = fault
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


FIRST_IMAGE = 30.0  # s until a camera has shown something
FROZEN = 10  # pictures in a row that are the same to the last bit


def make_camera(node: Node) -> Camera:
    """Of a source's node; what is rendered repeats itself where nothing moves, and so do files."""
    source = build(node, Source)
    return Camera(source, 0 if isinstance(source, Rendered | Folder) else FROZEN)


SHARED: dict[str, Camera] = {}


def shared_camera(node: Node) -> Camera:
    """The camera that this process has for the node: a device can be opened once only."""
    key = json.dumps(node, sort_keys=True)
    if key not in SHARED:
        SHARED[key] = make_camera(node)
    return SHARED[key]


@dataclass(frozen=True)
class VideoConfig:
    """Settings of a V4L2 device, or of a film's file."""

    device: str  # /dev/v4l/by-id/... (keeps its name), or a film's file
    width: Side = 640  # pixels
    height: Side = 480  # pixels
    fps: Annotated[int, Bound(1, 1000)] = 30  # pictures a second
    exposure: Positive | None = None  # as V4L2 counts it; null: automatic, pictures change
    white: Positive | None = None  # white balance, K; null: automatic


class Video(Source):
    """OpenCV's reader; a film is played at its `fps`, and ends with an error."""

    def __init__(self, config: VideoConfig) -> None:
        self.config = config
        self.name = config.device
        self._due = 0.0

    def open(self) -> None:
        cv2, config = opencv(), self.config
        self._film = Path(config.device).is_file()
        device = int(config.device) if config.device.isdigit() else config.device
        reader: Any = cv2.VideoCapture(device, cv2.CAP_ANY if self._film else cv2.CAP_V4L2)
        if not reader.isOpened():
            raise CameraError(f"camera {self.name} cannot be opened: is it there, is it in use?")
        if not self._film:
            self._set(cv2, reader)
        self._reader = reader
        self._due = time.monotonic()

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


def wait_until(due: float) -> float:
    """Sleep until `due` (s, monotonic clock), and return it, or now where that is over."""
    due = max(due, time.monotonic())
    time.sleep(max(0.0, due - time.monotonic()))
    return due


@dataclass(frozen=True)
class FolderConfig:
    """Settings of a folder of pictures."""

    path: str  # folder of PNG or JPEG files, shown in the order of their names
    fps: Annotated[float, Bound(above=0.0, high=1000.0)] = 30.0  # pictures a second
    loop: bool = True  # whether the first follows the last; false: an error then


class Folder(Source):
    """Files of pictures as a camera, to try out what sees without one."""

    def __init__(self, config: FolderConfig) -> None:
        self.config = config
        self.name = config.path
        self._files: list[Path] = []

    def open(self) -> None:
        endings = (".png", ".jpg", ".jpeg")
        folder = Path(self.config.path)
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        self._files = [file for file in found if file.suffix.lower() in endings]
        if not self._files:
            raise CameraError(f"camera {self.name}: no PNG or JPEG files are there")
        self._next = 0
        self._due = time.monotonic()

    def grab(self) -> Frame:
        if self._next == len(self._files):
            if not self.config.loop:
                raise CameraError(f"camera {self.name}: all {self._next} pictures were shown")
            self._next = 0
        self._due = wait_until(self._due + 1 / self.config.fps)
        file = self._files[self._next]
        self._next += 1
        if (frame := opencv().imread(str(file))) is None:
            raise CameraError(f"camera {self.name}: {file.name} is no picture that can be read")
        return np.ascontiguousarray(frame[:, :, ::-1])

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class RenderedConfig:
    """Settings of a camera that draws its pictures."""

    scene: Node  # node of something with picture() -> uint8 [height, width, 3]
    fps: Annotated[float, Bound(above=0.0, high=1000.0)] = 30.0  # pictures a second


class Rendered(Source):
    """Pictures of a simulated scene."""

    name = "rendered"

    def __init__(self, config: RenderedConfig) -> None:
        self.config = config
        self.scene = build(config.scene, Scene)

    def open(self) -> None:
        self._due = time.monotonic()

    def grab(self) -> Frame:
        self._due = wait_until(self._due + 1 / self.config.fps)
        return self.scene.picture()

    def close(self) -> None:
        let_go(self.scene)


def let_go(scene: Any) -> None:
    """A scene that holds something lets go of it."""
    if (close := getattr(scene, "close", None)) is not None:
        close()


LOOK = 0.02  # s


class MeasuredScene:
    """`scene` at the joints of the newest `state` message, with the things that are `sensed` there
    by name, and `given` (which counts before that, and may change)."""

    def __init__(
        self, scene: Any, state: Mailbox, sensed: Sequence[str], given: Mapping[str, float]
    ) -> None:
        self.scene = scene
        self.state = state
        self.sensed = tuple(sensed)
        self.given = given

    def picture(self) -> Frame:
        """The first one waits for the first measurement."""
        while not self.state.receive() and not self.state.seen:
            time.sleep(LOOK)
        fields = self.state.fields[0]
        values = {**dict(zip(self.sensed, fields["sensed"].tolist(), strict=True)), **self.given}
        self.scene.show(np.array(fields["q"]), float(fields["width"]), values)
        return self.scene.picture()

    def close(self) -> None:
        let_go(self.scene)


def measured_scene(
    camera: Camera, state: Mailbox, sensed: Sequence[str], given: Mapping[str, float]
) -> MeasuredScene | None:
    """For a `camera` that draws; None for one that takes pictures."""
    scene = getattr(camera.source, "scene", None)
    if isinstance(scene, MeasuredScene):
        scene = scene.scene
    return None if scene is None else MeasuredScene(scene, state, sensed, given)
