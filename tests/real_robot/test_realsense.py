"""RealSense cameras: the driver on the SDK's own software device, where it is installed; and what
does not need it."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from embodied.core.build import ConfigError, parse
from embodied.real_robot.cameras.realsense import Config, DeviceClock, RealSense
from embodied.real_robot.cameras.sources import CameraError, make_camera

needs_sdk = pytest.mark.skipif(
    importlib.util.find_spec("pyrealsense2") is None, reason="pyrealsense2 is not installed"
)
WIDE, HIGH, FPS = 64, 48, 30
HARDWARE, GLOBAL = "hardware_clock", "global_time"


def test_a_device_clock_is_mapped_by_the_shortest_delay() -> None:
    clock, offset = DeviceClock(), 1000.0
    delays = (0.030, 0.008, 0.050, 0.012)
    taken = [clock(k / FPS, offset + k / FPS + late) for k, late in enumerate(delays)]
    late = [t - offset - k / FPS for k, t in enumerate(taken)]
    assert late == pytest.approx([0.030, 0.008, 0.008, 0.008])
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


class Connected:
    """In place of the SDK's context, which finds what is plugged in."""

    devices: list[Any] = []  # noqa: RUF012

    def query_devices(self) -> list[Any]:
        return self.devices


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    import pyrealsense2

    sdk: Any = pyrealsense2
    monkeypatch.setattr(sdk, "context", Connected)
    Connected.devices.clear()
    yield Connected.devices
    Connected.devices.clear()


@needs_sdk
@pytest.mark.parametrize("domain", [HARDWARE, GLOBAL])
def test_frames_have_the_time_when_they_were_taken(connected: list[Any], domain: str) -> None:
    soft = Soft("0123", domain)
    connected.append(soft.device)
    camera = RealSense(Config("0123", WIDE, HIGH, FPS))
    camera.open()
    begin = 3.0 if domain == HARDWARE else time.time()
    taken = []
    for k in range(5):
        began = time.monotonic()
        soft.show(10 + k, begin + k / FPS)
        frame = camera.grab()
        assert frame.shape == (HIGH, WIDE, 3) and frame[0, 0].tolist() == [250, 10 + k, 10 + k]
        at = camera.taken()
        assert at is not None
        taken.append(at)
        if k == 0 and domain == HARDWARE:
            assert began <= at <= time.monotonic()
    if domain == GLOBAL:
        apart = np.array(taken) - np.arange(5) / FPS - (begin - time.time() + time.monotonic())
        assert np.abs(apart).max() < 0.01
    camera.close()
    camera.close()


@needs_sdk
def test_a_camera_of_the_bridge(connected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread, its newest picture with the device's stamp, and the line when it is lost."""
    monkeypatch.setattr("embodied.real_robot.cameras.realsense.TIMEOUT", 300)
    soft = Soft("0123", GLOBAL)
    connected.append(soft.device)
    node = {"_target_": "embodied.real_robot.cameras.realsense.RealSense"}
    with make_camera({**node, "width": WIDE, "height": HIGH, "fps": FPS}) as camera:
        over = threading.Event()

        def play() -> None:
            grey = 0
            while not over.wait(1 / FPS):
                grey = (grey + 1) % 200
                soft.show(grey, time.time() - 0.2)

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
        RealSense(Config(width=WIDE, height=HIGH, fps=FPS, exposure=100.0)).open()
