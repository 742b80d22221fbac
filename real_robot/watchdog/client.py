"""Client of the hardware watchdog: the control loop's beats to it, and what it says of its relay.

    to the board   A5, counter (2 bytes), CRC (2)              one beat in every tick
    from it        5A, state (1), limit in ms (2), CRC (2)     after every beat

Numbers are little-endian, the CRC is CRC-16/CCITT-FALSE of the bytes before it. Firmware:
`real_robot/watchdog/watchdog.c`; wiring: docs/watchdog.md.
"""

from __future__ import annotations

import binascii
import os
import struct
import termios
import threading
import time
import tty
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from embodied.real_robot.drivers.driver import Wait
from embodied.real_robot.kernel.driver import DriverError

BEAT, STATUS = 0xA5, 0x5A
STATUS_SIZE = 6
COUNTERS = 1 << 16
PERIOD = 0.02  # s between beats while nothing moves
SILENT = 0.5  # s without a status after which the board is gone
LONGEST = 30.0  # s for which beats go on while a robot connects or recovers
TICKS = 3  # ticks of the control loop that have to fit into the board's limit


class Relay(IntEnum):
    """State of the relay: closed, or why it is open."""

    CLOSED = 0
    STARTED = 1
    SILENCE = 2
    GARBAGE = 3
    SEQUENCE = 4


REASONS = {
    Relay.CLOSED: "",
    Relay.STARTED: "it was switched on",
    Relay.SILENCE: "it missed beats",
    Relay.GARBAGE: "it received damaged beats",
    Relay.SEQUENCE: "it received beats out of order",
}


@dataclass(frozen=True)
class Config:
    """Settings of the hardware watchdog on the robot's safeguard input."""

    device: str  # its serial device, as /dev/serial/by-id/...
    patience: Wait = 60.0  # s for its button to be pressed before anything moves


def beat_frame(counter: int) -> bytes:
    """The bytes of beat number `counter`."""
    return _with_crc(struct.pack("<BH", BEAT, counter % COUNTERS))


def _with_crc(data: bytes) -> bytes:
    return data + struct.pack("<H", binascii.crc_hqx(data, 0xFFFF))


def take_status(buffer: bytearray) -> tuple[Relay, int] | None:
    """Take the first whole status from `buffer`: the relay's state, and the limit in ms. Bytes that
    are none are dropped. None: there is none yet."""
    while len(buffer) >= STATUS_SIZE:
        frame = bytes(buffer[:STATUS_SIZE])
        if frame[0] == STATUS and _with_crc(frame[:-2]) == frame and frame[1] <= max(Relay):
            del buffer[:STATUS_SIZE]
            return Relay(frame[1]), int.from_bytes(frame[2:4], "little")
        del buffer[:1]
    return None


class Watchdog:
    """`connect`, then `beat` in every tick of a control loop that is in order. While a robot
    connects or recovers, `wait` beats in its place."""

    def __init__(
        self, config: Config, hertz: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.hertz = hertz
        self.clock = clock
        self.relay = Relay.STARTED
        self.limit = 0  # the board's limit, ms; 0: it has not said it
        self._file = -1
        self._counter = 0
        self._buffer = bytearray()
        self._heard = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def connect(self, over: Callable[[], bool] = lambda: False) -> None:
        """Open the device, and beat until the board's button is pressed or it is `over`.
        DriverError."""
        device = self.config.device
        try:
            self._file = os.open(device, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
            tty.setraw(self._file)
            termios.tcflush(self._file, termios.TCIOFLUSH)
        except (OSError, termios.error) as error:
            self.close()
            raise DriverError(f"watchdog: {device} cannot be opened ({error})") from error
        self._heard = self.clock()
        deadline = self._heard + self.config.patience
        print(f"press the button of the watchdog at {device}", flush=True)
        while not over():
            self._beat()
            if self.limit and 1000 * TICKS / self.hertz > self.limit:
                raise DriverError(
                    f"watchdog: its limit of {self.limit} ms is shorter than {TICKS} ticks at "
                    f"{self.hertz:g} Hz; raise hertz, or LIMIT_MS of its firmware"
                )
            if self.relay == Relay.CLOSED:
                return
            if self.clock() > deadline:
                raise DriverError(f"{self.fault}; nobody did within {self.config.patience:g} s")
            time.sleep(PERIOD)

    @property
    def fault(self) -> str:
        """Why the robot's safeguard input is open; empty while it is closed."""
        if self.clock() - self._heard > SILENT:
            return f"the watchdog at {self.config.device} says nothing: look at its cable"
        reason = REASONS[self.relay]
        return f"the watchdog's relay is open ({reason}): press its button" if reason else ""

    def beat(self) -> None:
        """Send the beat of this tick. Ends a `wait`. Never raises: a beat that cannot be sent is
        one that the board misses."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
        self._beat()

    def wait(self) -> None:
        """Beat in a thread until the next `beat`, for at most `LONGEST` s: nothing moves meanwhile,
        and the loop waits for the robot."""
        if self._thread is None or not self._thread.is_alive():
            self._ended.clear()
            self._thread = threading.Thread(target=self._beat_on, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Beat no more, which opens the relay; safe to call twice."""
        self._ended.set()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _beat_on(self) -> None:
        deadline = self.clock() + LONGEST
        while not self._ended.wait(PERIOD) and self.clock() < deadline:
            self._beat()

    def _beat(self) -> None:
        with suppress(OSError), self._lock:
            self._counter = (self._counter + 1) % COUNTERS
            os.write(self._file, beat_frame(self._counter))
            with suppress(BlockingIOError):
                self._buffer += os.read(self._file, 256)
            while (status := take_status(self._buffer)) is not None:
                self.relay, self.limit = status
                self._heard = self.clock()
