"""Cameras: the newest picture with its stamp; what stalls, freezes or ends is said (a RealSense is
the SDK's own software device, where it is installed); and a policy that sees: its pictures come
from cameras, or it says nothing."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, allow, parse
from embodied.core.spec import Leaf
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.real_robot.cameras import sources
from embodied.real_robot.cameras.policy_images import PolicyImages
from embodied.real_robot.cameras.realsense import Config, DeviceClock, RealSense
from embodied.real_robot.cameras.sources import (
    Camera,
    CameraError,
    Folder,
    FolderConfig,
    Frame,
    Scene,
    Source,
    Video,
    VideoConfig,
)
from embodied.real_robot.policy.decider import Decider
from embodied.real_robot.policy.observer import Observer
from embodied.real_robot.recorder import recorded_spec
from tests.builders import Clock, make_policy, node_of, rendered, wait_until
from tests.real_robot.test_control import Bench
from tests.real_robot.test_decide import GOAL, SPEC, tool
from tests.real_robot.trouble import Trouble

PATIENT = 60.0


class Fake(Source):
    """Shows the grey level that it is told to, when it is told to; None: it ends."""

    name = "fake"

    def __init__(self) -> None:
        self.greys: Queue[int | None] = Queue()
        self.show = self.greys.put
        self.closed = False

    def open(self) -> None:
        """Always there."""

    def grab(self) -> Frame:
        if (grey := self.greys.get()) is None:
            raise CameraError("camera fake gives no more pictures")
        return np.full((4, 6, 3), grey, np.uint8)

    def close(self) -> None:
        self.closed = True


class Wall(Scene):
    """A world whose picture counts."""

    def __init__(self) -> None:
        self.shown = 0

    def picture(self) -> Frame:
        self.shown += 1
        return np.full((4, 6, 3), 100 + self.shown % 100, np.uint8)


def test_newest_and_its_stamp() -> None:
    fake, clock = Fake(), Clock(5.0)
    with Camera(fake, clock=clock) as camera:
        clock.now = 5.2
        with pytest.raises(CameraError, match=r"nothing new for 0.20 s"):
            camera.newest(0.1)
        fake.show(1)
        first = camera.next(0, PATIENT)
        assert (first.number, first.t, first.frame[0, 0, 0]) == (1, 5.2, 1)
        clock.now = 5.3
        fake.show(2)
        assert camera.next(first.number, PATIENT).frame[0, 0, 0] == 2
        clock.now = 5.5
        assert camera.newest(0.3).t == 5.3
        with pytest.raises(CameraError, match=r"fake has shown nothing new for 0.20 s"):
            camera.newest(0.1)
        fake.show(None)
        for look in (lambda: camera.next(2, PATIENT), lambda: camera.newest(1e9)):
            with pytest.raises(CameraError, match="gives no more pictures"):
                look()
    assert fake.closed


def test_frozen_and_thawed() -> None:
    fake = Fake()
    with Camera(fake, repeats=3, clock=Clock(5.0)) as camera:
        for k in range(4):
            fake.show(7)
            if k < 3:
                camera.next(k, PATIENT)
        with pytest.raises(CameraError, match="fake is frozen: the same picture 4 times"):
            camera.next(3, PATIENT)
        fake.show(8)
        wait_until(lambda: not camera._fault)
        assert camera.newest(1.0).number == 5
        camera._over.set()
        fake.show(9)
    assert fake.closed


def test_a_film_in_its_colours(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    path = str(tmp_path / "film.avi")
    writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"MJPG"), 30, (64, 48))
    for _ in range(3):
        writer.write(np.full((48, 64, 3), (0, 0, 200), np.uint8))  # OpenCV has blue first: red
    writer.release()
    film = Video(VideoConfig(path, fps=1000))
    film.open()
    frame = film.grab()
    film.close()
    assert frame.shape == (48, 64, 3) and frame[10, 10, 0] > 180 and frame[10, 10, 2] < 20
    ended = pytest.raises(CameraError, match="no more pictures")
    with Camera(film, repeats=0) as camera, ended:
        camera.next(1000, PATIENT)
    with pytest.raises(CameraError, match="cannot be opened"):
        Video(VideoConfig("/dev/no")).open()


def test_a_picture_is_cut_to_its_middle_square() -> None:
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:, 8:56] = 200
    small = sources.fitted(picture, 12, 12)
    assert small.shape == (12, 12, 3) and (small == 200).all()


def test_files_of_a_folder_in_their_order(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    for name, red in (("b.jpg", 200), ("a.png", 100), ("c.PNG", 50)):
        cv2.imwrite(str(tmp_path / name), np.full((8, 8, 3), (0, 0, red), np.uint8))
    (tmp_path / "notes.txt").write_text("no picture")

    def folder(**more: Any) -> Folder:
        return Folder(FolderConfig(str(tmp_path), fps=500, **more))

    source = folder()
    source.open()
    shown = np.stack([source.grab() for _ in range(4)])
    assert shown[:, 0, 0, 0].tolist() == pytest.approx([100, 200, 50, 100], abs=2)
    assert shown[..., 1:].max() < 20, "red first"
    once = Camera(folder(loop=False), repeats=0)
    for _ in range(2):  # opened again, from the first on
        with once, pytest.raises(CameraError, match="all 3 pictures were shown"):
            once.next(1000, PATIENT)
    with Camera(folder(), repeats=0) as camera:
        with camera:
            before = camera.next(0, PATIENT).number
        assert camera.next(before, PATIENT).number > before, "others still look through it"
    with camera:
        assert camera.next(0, PATIENT).number > 0, "it can be opened again"
    (tmp_path / "a.png").write_bytes(b"half of one")
    source.open()
    with pytest.raises(CameraError, match=r"a\.png is no picture"):
        source.grab()
    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere"):
        with pytest.raises(CameraError, match="no PNG or JPEG files"):
            Folder(FolderConfig(str(tmp_path / place))).open()
    with pytest.raises(ConfigError) as error:
        parse(FolderConfig, {"path": "x", "fps": 0}, "camera")
    assert (error.value.key, error.value.value) == ("fps", 0)


def test_rendered_pictures_come_at_their_rate() -> None:
    allow("tests.")
    node = {"_target_": "tests.real_robot.test_cameras.Wall"}
    camera = sources.Rendered(sources.RenderedConfig(node, fps=100))
    camera.open()
    began = time.monotonic()
    frames = [camera.grab() for _ in range(10)]
    assert time.monotonic() - began >= 0.1
    assert [int(frame[0, 0, 0]) for frame in frames] == list(range(101, 111))


needs_sdk = pytest.mark.skipif(
    importlib.util.find_spec("pyrealsense2") is None, reason="pyrealsense2 is not installed"
)
WIDE, HIGH, FPS = 64, 48, 30
SMALL: dict[str, Any] = {"width": WIDE, "height": HIGH, "fps": FPS}
HARDWARE, GLOBAL = "hardware_clock", "global_time"


def test_a_device_clock_is_mapped_by_the_shortest_delay() -> None:
    clock, offset = DeviceClock(), 1000.0
    stamps = np.arange(4) / FPS
    came = offset + stamps + [0.030, 0.008, 0.050, 0.012]
    taken = list(map(clock, stamps.tolist(), came.tolist()))
    assert np.array(taken) - offset - stamps == pytest.approx([0.030, 0.008, 0.008, 0.008])
    assert clock(0.5, offset + 90.0) == pytest.approx(offset + 90.0), "it began anew"


def test_a_missing_sdk_and_wrong_settings_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyrealsense2", None)
    with pytest.raises(CameraError, match=r'pip install "embodied-rl\[realsense\]"'):
        RealSense(Config()).open()
    with pytest.raises(ConfigError, match="width=0 should be at least 1"):
        parse(Config, {"width": 0}, "camera")


class Soft:
    """A camera of the SDK that this process plays: real sensor, real queue, real frames."""

    def __init__(self, serial: str, domain: str) -> None:
        import pyrealsense2

        self.sdk: Any = pyrealsense2
        self.domain = getattr(self.sdk.timestamp_domain, domain)
        self.device = self.sdk.software_device()
        self.device.register_info(self.sdk.camera_info.serial_number, serial)
        self.sensor = self.device.add_sensor("RGB Camera")
        stream = self.sdk.video_stream()
        stream.type, stream.fmt = self.sdk.stream.color, self.sdk.format.rgb8
        stream.width, stream.height, stream.fps, stream.bpp = WIDE, HIGH, FPS, 3
        self.profile = self.sensor.add_video_stream(stream).as_video_stream_profile()
        self.number = 0

    def show(self, grey: int, stamp: float) -> None:
        """A frame that was taken at `stamp` (s), by its own clock."""
        self.number += 1
        frame = self.sdk.software_video_frame()
        frame.stride, frame.bpp, frame.frame_number = 3 * WIDE, 3, self.number
        frame.timestamp, frame.domain, frame.profile = 1000 * stamp, self.domain, self.profile
        pixels = np.full((HIGH, WIDE, 3), grey, np.uint8)
        pixels[:, :, 0] = 250  # red first
        frame.pixels = pixels
        self.sensor.on_video_frame(frame)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the SDK's context finds plugged in."""
    import pyrealsense2

    devices: list[Any] = []
    context = SimpleNamespace(query_devices=lambda: devices)
    monkeypatch.setattr(pyrealsense2, "context", lambda: context)
    return devices


@needs_sdk
@pytest.mark.parametrize("domain", [HARDWARE, GLOBAL])
def test_frames_have_the_time_when_they_were_taken(connected: list[Any], domain: str) -> None:
    soft = Soft("0123", domain)
    connected.append(soft.device)
    camera = RealSense(Config("0123", **SMALL))
    camera.open()
    stamps = np.arange(5) / FPS + (3.0 if domain == HARDWARE else time.time())
    taken: list[Any] = []
    for k, stamp in enumerate(stamps.tolist()):
        began = time.monotonic()
        soft.show(10 + k, stamp)
        frame = camera.grab()
        assert frame.shape == (HIGH, WIDE, 3) and frame[0, 0].tolist() == [250, 10 + k, 10 + k]
        taken.append(camera.taken())
        if k == 0 and domain == HARDWARE:
            assert began <= taken[0] <= time.monotonic()
    if domain == GLOBAL:
        assert np.array(taken) - stamps == pytest.approx(time.monotonic() - time.time(), abs=0.01)
    camera.close()
    camera.close()


@needs_sdk
def test_a_camera_of_the_bridge(connected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread, its newest picture with the device's stamp, and the line when it is lost."""
    monkeypatch.setattr("embodied.real_robot.cameras.realsense.TIMEOUT", 300)
    soft = Soft("0123", GLOBAL)
    connected.append(soft.device)
    node = node_of("real_robot.cameras.realsense.RealSense", **SMALL)
    with sources.make_camera(node) as camera:
        over = threading.Event()

        def play() -> None:
            while not over.wait(1 / FPS):
                soft.show((soft.number + 1) % 200, time.time() - 0.2)

        thread = threading.Thread(target=play)
        thread.start()
        picture = camera.next(3, 20.0)
        assert 0.15 < time.monotonic() - picture.t < 5.0, "taken 0.2 s before it came"
        assert camera.source.name == "RealSense 0123", "the first one that is found"
        over.set()
        thread.join()
        with pytest.raises(CameraError, match="RealSense 0123 gives no more pictures: look at its"):
            for _ in range(100):
                camera.newest(60.0)
                time.sleep(0.1)


@needs_sdk
def test_what_is_not_there_is_one_line(connected: list[Any]) -> None:
    with pytest.raises(CameraError, match="no RealSense camera is connected"):
        RealSense(Config()).open()
    connected.append(Soft("0123", HARDWARE).device)
    with pytest.raises(CameraError, match="RealSense 77 is not connected; there are: 0123"):
        RealSense(Config("77")).open()
    with pytest.raises(CameraError, match=r"no colour of 640 x 480 at 30 .* but 64 x 48 at 30"):
        RealSense(Config()).open()
    # A software device has no exposure; a camera says so in the same way.
    with pytest.raises(CameraError, match="RealSense 0123 cannot be opened"):
        RealSense(Config(**SMALL, exposure=100.0)).open()


SEEING = SPEC.with_obs(front=Leaf((4, 6, 3), "uint8", 0, 255))


@pytest.fixture
def camera(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    allow("tests")
    Trouble(tmp_path / "trouble", create=True)
    target = "tests.real_robot.troubled.TroubledCamera"
    return {"_target_": target, "trouble": str(tmp_path / "trouble")}


def test_pictures_reach_the_policy_as_large_as_it_wants_them(
    tmp_path: Path, camera: dict[str, Any]
) -> None:
    bench = Bench(tmp_path)
    observer = Observer(SEEING, 7, tool, GOAL, pictures=("front",))
    policy = make_policy("scripted.fr3.Scripted", SEEING, task="reach", quality=1.0)
    boxes = bench.there.state, bench.there.chunk
    with PolicyImages(SEEING, {"front": camera}, PATIENT) as eyes:
        decider = Decider(policy, observer, *boxes, lambda sent: tool(sent[None])[0], eyes)
        bench.control.turn()
        assert decider.turn()
        seen = decider.seen["front"]
        assert seen.shape == (1, 4, 6, 3) and seen.float().std() == 0 and int(seen.max()) > 0
        Trouble(tmp_path / "trouble").dark = 1
        with pytest.raises(CameraError, match="gives no more pictures"):
            while True:
                bench.control.turn()
                decider.turn()


def test_rendered_scenes_show_what_was_measured() -> None:
    """The same picture as the world draws of itself, with the same joints and the same cube."""
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    settings = {"objects": "privileged", "cameras": ("front",), "image_size": 32, "threads": 1}
    world = Fr3(Fr3Config("lift", 1, drawing="light", **settings))  # pyright: ignore[reportArgumentType]
    obs = world.reset(4)
    names = world.spec.obs["privileged/state"].names
    values = dict(zip(names, obs["privileged/state"][0].double().tolist(), strict=True))
    with PolicyImages(world.spec, {"front": rendered("lift", 32, 20.0)}, PATIENT) as eyes:
        assert len(eyes.scenes) == 1
        with pytest.raises(RuntimeError, match="show"):
            eyes.scenes[0].picture()
        q = np.array([values[f"q{i}"] for i in range(1, 8)])
        eyes.scenes[0].show(q, values["width"], values)
        ours, theirs = eyes.read()["front"], obs["front"][0].numpy()
    world.close()
    assert np.abs(ours.astype(int) - theirs).mean() < 0.2 and np.ptp(ours) > 100


def test_what_no_camera_takes_is_one_line(camera: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"observations \(front\): name a camera for it \(robot"):
        PolicyImages(SEEING, {"wrist": camera}, 1.0)
    stack = SPEC.with_obs(front=Leaf((4, 6, 9), "uint8", 0, 255))
    with pytest.raises(ConfigError, match="9 channels"):
        PolicyImages(stack, {"front": camera}, 1.0)
    assert PolicyImages(SPEC, {"front": camera}, 1.0).read() == {}, "nobody wants it: closed"
    recorded = recorded_spec(SEEING, {"side": (6, 4), "front": (9, 9)}).obs
    assert [*recorded] == ["state", "front", "side"]
    assert recorded["front"].shape == (4, 6, 3), "as it is seen"
