"""A serial port as a raw file descriptor, with reads that end at a deadline."""

from __future__ import annotations

import fcntl
import os
import select
import termios
import time
from pathlib import Path

from embodied.real_robot.drivers.driver import DriverError

CHUNK, OLD = 4096, 16  # bytes at once, and how often before a write
DEVICES = Path("/sys/bus/usb-serial/devices")


class SerialPort:
    """A serial port that one process owns. With `echo`, the adapter sends back what was written:
    as many bytes are dropped of what is read after a write."""

    def __init__(self, path: str, baud: int) -> None:
        self.path = path
        self.baud = baud
        self.echo = False
        self._file = -1
        self._skip = 0
        self._poll = select.poll()

    def open(self) -> None:
        """8 data bits, no parity, nothing interpreted. DriverError with what to look at."""
        speed = getattr(termios, f"B{self.baud}", None)
        if speed is None:
            raise DriverError(f"this system has no serial rate of {self.baud} baud")
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            settings = [0, 0, termios.CS8 | termios.CREAD | termios.CLOCAL, 0, speed, speed]
            controls = [b"\x00"] * len(termios.tcgetattr(self._file)[6])
            termios.tcsetattr(self._file, termios.TCSANOW, [*settings, controls])
            termios.tcflush(self._file, termios.TCIOFLUSH)
        except BlockingIOError as error:
            self.close()
            raise DriverError(f"{self.path} is in use by another process: stop that") from error
        except PermissionError as error:
            raise DriverError(
                f"{self.path} may not be opened: join its group (often 'dialout') and log in again"
            ) from error
        except (OSError, termios.error) as error:
            self.close()
            raise DriverError(
                f"{self.path} is no serial port that is there ({error.args[-1]}): "
                "check the cable, and the name with ls /dev/serial/by-id"
            ) from error
        self._poll.register(self._file, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Write all of `data`, after dropping bytes that were not asked for. DriverError."""
        if self._file < 0:
            raise DriverError(f"{self.path} is not open: connect first")
        try:
            for _ in range(OLD):
                if not self._poll.poll(0):
                    break
                self._skip = max(0, self._skip - len(os.read(self._file, CHUNK)))
            sent = os.write(self._file, data)
        except OSError as error:
            raise self._gone(error) from error
        if sent < len(data):
            raise DriverError(f"{self.path} takes no more: the adapter hangs, plug it in again")
        self._skip += len(data) if self.echo else 0

    def read(self, deadline: float) -> bytes:
        """Read the bytes that have come, as soon as there are some; empty from `deadline` (s,
        monotonic) on. DriverError where the port is gone."""
        while (left := deadline - time.monotonic()) > 0:
            if not self._poll.poll(left * 1000):
                continue
            try:
                data = os.read(self._file, CHUNK)
            except OSError as error:
                raise self._gone(error) from error
            if not data:
                raise self._gone(EOFError("end of file"))
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            if len(data) > dropped:
                return data[dropped:]
        return b""

    def drain(self, quiet: float, most: float) -> None:
        """Drop what comes until nothing did for `quiet` s, for `most` s at the longest."""
        end = time.monotonic() + most
        while self.read(min(end, time.monotonic() + quiet)):
            pass
        self._skip = 0

    def latency(self) -> str:
        """The command to type where the adapter delays bytes by more than 1 ms; else empty."""
        file = DEVICES / Path(self.path).resolve().name / "latency_timer"
        if not file.exists() or int(file.read_text()) <= 1:
            return ""
        return f"; its adapter holds bytes back, type: echo 1 | sudo tee {file}"

    def close(self) -> None:
        """Safe to call twice."""
        if self._file >= 0:
            self._poll = select.poll()
            os.close(self._file)
            self._file = -1

    def _gone(self, error: Exception) -> DriverError:
        return DriverError(f"{self.path} is gone ({error.args[-1]}): check the cable to the servos")
