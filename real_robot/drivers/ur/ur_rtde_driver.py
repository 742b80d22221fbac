"""Driver of a Universal Robots arm through the ur_rtde library and its script.

Positions, speeds, errors, stamps and stops mean the same as in
`embodied.real_robot.drivers.ur.driver.UR`, its base class. What differs:

- ur_rtde runs in a process of its own (`real_robot/drivers/ur/ur_rtde_main.py` says why); commands
  reach it through a pair of sockets.
- Its script reads registers 0 to 23, so field buses have to be off. Its watchdog is the
  controller's: after `watchdog` s without a command the program ends, and the arm stops as the
  controller stops one. Before the first command the watchdog is kept alive.
- On close, its script stops the flange in a straight line (`brake`, m/s^2) and ends.
- A stamp is when ur_rtde had the measurement, up to a tick (1 / `frequency`) after it arrived.
- The robot's own text messages are not read.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from embodied.core.children import module_command
from embodied.real_robot.drivers.ur import driver
from embodied.real_robot.drivers.ur.ur_rtde_main import BEGIN, MEASURED, ORDER, STATE
from embodied.real_robot.kernel.driver import DriverError

PACKAGE = "pip install 'ur-rtde>=1.6.5,<1.7'"
GONE = 3.0  # s for its process to stop the arm and end


@dataclass(frozen=True)
class Config(driver.Config):
    """Settings as of `UR`, but `brake` is in m/s^2 of the flange."""


class UrRtde(driver.UR):
    """Six joints and no hand."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, clock)
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        try:
            self._start()
            self._wait(lambda: True, "send its state")
            self._check_mode()
            self._order(BEGIN)
            self._wait(
                lambda: self._state["follows"] and self._state["runtime_state"] == driver.PLAYING,
                "run ur_rtde's script",
            )
        except DriverError:
            self.close()
            raise

    def close(self) -> None:
        """Close the wire to the process, which then stops the arm and the script."""
        if self._wire is not None:
            with suppress(DriverError):
                self._drain()
            self._wire.close()
        hangs = self.clock() - self._seen > self.config.silence
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if hangs else GONE)
            self._process.kill()
            self._process.wait()
        self._wire = None
        self._process = None
        self._state = {}
        self._do = driver.FOLLOW

    def _start(self) -> None:
        if find_spec("rtde_control") is None or find_spec("rtde_receive") is None:
            raise DriverError(f"ur_rtde is not installed; type: {PACKAGE}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                module_command("embodied.real_robot.drivers.ur.ur_rtde_main", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # ur_rtde says much
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for us, who end it in order
            )
        ours.send(json.dumps(asdict(self.config)).encode())
        ours.setblocking(False)
        self._wire = ours

    def _drain(self) -> None:
        """All that its process has said; the newest state counts."""
        if self._wire is None:
            raise self._error("not connected")
        try:
            while said := self._wire.recv(4096):
                if said[:1] != MEASURED:
                    raise self._error(said[1:].decode(errors="replace"))
                numbers = STATE.unpack(said[1:])
                seen, *vectors = numbers[:25]
                names = ("actual_q", "actual_qd", "actual_TCP_force", "actual_current")
                self._state = {name: vectors[6 * i : 6 * i + 6] for i, name in enumerate(names)}
                names = ("robot_mode", "safety_status_bits", "runtime_state", "follows")
                self._state |= dict(zip(names, numbers[25:], strict=True))
                self._seen = self.clock() - (time.monotonic() - seen)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._error(f"the process with ur_rtde is gone: {error}") from error
        raise self._error(self._ended())

    def _ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(self.config.silence)
        except subprocess.TimeoutExpired:
            return "the process with ur_rtde does not answer"
        if code == -signal.SIGALRM:
            return f"ur_rtde did not return within {self.config.patience:.0f} s"
        return f"the process with ur_rtde died (exit status {code})"

    def _send(self, q: Any) -> None:
        self._order(self._do, q)

    def _order(self, what: int, q: Any = (0.0,) * 6) -> None:
        if self._wire is None:
            raise self._error("not connected")
        try:
            self._wire.send(ORDER.pack(what, *(float(each) for each in q)))
        except OSError as error:
            raise self._error(f"the process with ur_rtde does not listen: {error}") from error
