"""Emulated watchdog board: the state machine of the firmware itself, on a pseudo-terminal.

The C file is compiled with the system's compiler (`cc`). `python -m
embodied.real_robot.emulators.watchdog` runs a board until Ctrl-C: it prints its device and what its
relay does, and Enter is its button.
"""

from __future__ import annotations

import ctypes
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError
from embodied.real_robot.emulators.process import PtyDevice
from embodied.real_robot.watchdog.client import STATUS_SIZE, Relay

SOURCE = Path(__file__).parent.parent / "watchdog" / "watchdog.c"
LIMIT = 100  # ms, as the firmware's
PRESS = 0.1  # s for which a button is pressed, and then released
MILLISECONDS = 1 << 32


def compiled() -> Any:
    """The firmware's state machine as a library. ConfigError without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise ConfigError("the emulated watchdog needs a C compiler (cc)")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "watchdog.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{compiler} failed: {done.stderr.strip()[:200]}")
        return ctypes.CDLL(str(library))  # stays mapped when its file is gone


class Firmware:
    """The state machine by itself; times in ms are the caller's."""

    def __init__(self, limit: int = LIMIT, now: int = 0) -> None:
        self._library = compiled()
        self._memory = ctypes.create_string_buffer(self._library.watchdog_size())
        self._library.watchdog_begin(self._memory, limit, ctypes.c_uint32(now))

    @property
    def relay(self) -> Relay:
        """State of the relay."""
        return Relay(self._library.watchdog_state(self._memory) & 0xFF)

    def take(self, data: bytes, now: int) -> None:
        """Bytes of the host at `now` (ms)."""
        for byte in data:
            self._library.watchdog_byte(self._memory, byte, ctypes.c_uint32(now))

    def poll(self, now: int, contact: bool = False) -> None:
        """The clock at `now` (ms), and whether the button's contact is closed."""
        self._library.watchdog_poll(self._memory, ctypes.c_uint32(now), int(contact))

    def status(self) -> bytes:
        """The status that is due; empty where none is."""
        out = ctypes.create_string_buffer(STATUS_SIZE)
        return out.raw if self._library.watchdog_status(self._memory, out) & 0xFF else b""


class WatchdogBoard(PtyDevice):
    """As a context: a board that runs, at the serial device `path`; `relay` is its state, `ahead`
    (ms) what its clock is ahead of time."""

    pause = 0.002

    def __init__(self, limit: int = LIMIT) -> None:
        self.relay = Relay.STARTED
        self.ahead = 0
        self._contact = False
        self._firmware = Firmware(limit, self._now())

    def press(self) -> None:
        """Press the button, and let go of it."""
        for contact in (True, False):
            self._contact = contact
            time.sleep(PRESS)

    def turn(self, data: bytes) -> None:
        firmware = self._firmware
        firmware.take(data, self._now())
        firmware.poll(self._now(), self._contact)
        self.relay = firmware.relay
        if status := firmware.status():
            self.send(status)

    def _now(self) -> int:
        return (int(time.monotonic() * 1000) + self.ahead) % MILLISECONDS


def main() -> None:
    """Run a board at a terminal."""
    with WatchdogBoard() as board:
        print(f"device={board.path}; Enter presses the button, Ctrl-C ends", flush=True)
        before = None
        while True:
            if board.relay != before:
                before = board.relay
                print(f"relay: {before.name}", flush=True)
            if select.select([sys.stdin], [], [], 0.05)[0]:
                sys.stdin.readline()
                board.press()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
    except ConfigError as error:
        sys.exit(f"watchdog: {error}")
