"""RealSense cameras (Intel's SDK, `pyrealsense2`): the colour stream as an image source.

A frame is stamped with its own time. In the domains `global_time` and `system_time` the SDK says it
in the host's wall clock; a hardware clock is mapped by the smallest delay that was seen lately.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import numpy as np

from embodied.core.bounds import Bound, Positive
from embodied.real_robot.cameras.sources import CameraError, Frame, Side, Source

TIMEOUT = 2000  # ms without a frame, after which the camera is gone
FIRST = 10  # times as long for the first one, while the camera starts
NEWEST = 1  # frames that the SDK keeps for us


@dataclass(frozen=True)
class Config:
    """Settings of a RealSense camera."""

    serial: str = ""  # number on the camera; empty: the first one that is found
    width: Side = 640  # pixels
    height: Side = 480  # pixels
    fps: Annotated[int, Bound(1, 1000)] = 30  # pictures a second
    exposure: Positive | None = None  # us; null: automatic, pictures change by themselves
    white: Positive | None = None  # white balance, K; null: automatic


class DeviceClock:
    """Times of a clock that began elsewhere, on the host's. A frame arrives after it was taken, so
    the smallest difference of `KEPT` frames is nearest to the truth: too late by the shortest way
    of a picture to the host. A clock that began anew is followed at once."""

    KEPT, JUMP = 300, 1.0  # frames; s

    def __init__(self) -> None:
        self.apart: deque[float] = deque(maxlen=self.KEPT)

    def __call__(self, device: float, arrived: float) -> float:
        """The host's time (s) of what the device says was at `device` (s) and came at
        `arrived` (s)."""
        apart = arrived - device
        if self.apart and abs(apart - min(self.apart)) > self.JUMP:
            self.apart.clear()
        self.apart.append(apart)
        return device + min(self.apart)


class RealSense(Source):
    """Colour only: the bridge has no place for depth."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.name = f"RealSense {config.serial}".strip()
        self._sensor: Any = None
        self._taken: float | None = None

    def open(self) -> None:
        self._sdk = sdk = _sdk()
        device = self._device()
        self._device_clock = DeviceClock()
        self._timeout = FIRST * TIMEOUT
        sensor, profile = self._profile(device)
        self._queue = sdk.frame_queue(NEWEST)
        try:
            sensor.open(profile)
            self._sensor = sensor
            option, config = self._sdk.option, self.config
            if config.exposure is not None:
                sensor.set_option(option.enable_auto_exposure, 0)
                sensor.set_option(option.exposure, config.exposure)
            if config.white is not None:
                sensor.set_option(option.enable_auto_white_balance, 0)
                sensor.set_option(option.white_balance, config.white)
            sensor.start(self._queue)
        except RuntimeError as error:
            self.close()
            raise CameraError(f"camera {self.name} cannot be opened: {error}") from error

    def grab(self) -> Frame:
        try:
            frame = self._queue.wait_for_frame(self._timeout)
        except RuntimeError as error:
            raise CameraError(
                f"camera {self.name} gives no more pictures: look at its cable ({error})"
            ) from error
        self._timeout = TIMEOUT
        now, said = self.clock(), frame.get_timestamp() / 1000
        if frame.get_frame_timestamp_domain() == self._sdk.timestamp_domain.hardware_clock:
            self._taken = self._device_clock(said, now)
        else:
            self._taken = said - (time.time() - now)
        return np.array(frame.get_data(), np.uint8)

    def taken(self) -> float | None:
        return self._taken

    def close(self) -> None:
        sensor = self._sensor
        self._sensor = None
        if sensor is None:
            return
        for end in (sensor.stop, sensor.close):
            try:
                end()
            except RuntimeError:
                continue  # it was not started, or the camera is gone

    def _device(self) -> Any:
        """Of that serial number, or the first. CameraError lists those that are there."""
        number = self._sdk.camera_info.serial_number
        found = {each.get_info(number): each for each in self._sdk.context().query_devices()}
        if not found:
            raise CameraError(f"camera {self.name}: no RealSense camera is connected")
        serial = self.config.serial or next(iter(found))
        if serial not in found:
            raise CameraError(f"camera {self.name} is not connected; there are: {', '.join(found)}")
        self.name = f"RealSense {serial}"
        return found[serial]

    def _profile(self, device: Any) -> tuple[Any, Any]:
        """The sensor with colour of that size and rate; some cameras have it in the stereo module.
        CameraError lists what the camera has."""
        config, others = self.config, set[str]()
        for sensor in device.query_sensors():
            for each in sensor.get_stream_profiles():
                if (each.stream_type(), each.format()) != (
                    self._sdk.stream.color,
                    self._sdk.format.rgb8,
                ):
                    continue
                video = each.as_video_stream_profile()
                mode = (video.width(), video.height(), each.fps())
                if mode == (config.width, config.height, config.fps):
                    return sensor, each
                others.add("{} x {} at {}".format(*mode))
        raise CameraError(
            f"camera {self.name} has no colour of {config.width} x {config.height} at "
            f"{config.fps} pictures a second, but {', '.join(sorted(others)) or 'none'}"
        )


def _sdk() -> Any:
    try:
        return import_module("pyrealsense2")
    except ModuleNotFoundError as error:
        raise CameraError('RealSense cameras need: pip install "embodied-rl[realsense]"') from error
