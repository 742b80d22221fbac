"""The process that runs ur_rtde: `python -m embodied.real_robot.drivers.ur.ur_rtde_main HANDLE`.

Its driver starts it. ur_rtde 1.6.5 does three things (measured) that a loop with deadlines cannot
accept. It holds Python's lock while it connects, for ever if there is no reply. A call can wait
for seconds for its script. When the connection breaks, it connects again by itself, uploads its
script again, without the watchdog, and goes on. Here, once connected, the process may open no new
files, and an alarm ends it when a call does not return.

HANDLE is its end of a pair of sockets. Settings come first, then commands, of which the newest
counts; measurements go back, and at the end one line with the reason. When the other end closes,
the arm is stopped, then the script and this process end.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

from embodied.real_robot.drivers.ur.driver import FOLLOW, FREE, PLAYING, PROTECT, SEEN

ORDER = struct.Struct("=i6d")
"""An order: what to do, and joint targets (rad)."""
BEGIN = -1  # an order beside those of the driver
STATE = struct.Struct("=d24d4i")
"""A state: the time (s, monotonic), q (rad), dq (rad/s), the force on the tool (N, N m), the
joints' currents (A), robot mode, safety bits, runtime state, and whether it follows orders."""
MEASURED, REASON = b"m", b"!"
"""First bytes of an answer."""
OURS = -1  # its threads keep the priority that they have
PRIORITY = 49  # below the control process: ur_rtde burns time while it waits
OPEN = 3  # files that stay: input, output, errors


class Client:
    """Both interfaces of ur_rtde; RuntimeError and ValueError are theirs."""

    def __init__(self, wire: socket.socket, settings: dict[str, Any]) -> None:
        self.wire = wire
        self.settings = settings
        self.tick: float = 1 / settings["frequency"]
        place: tuple[str, float] = (settings["host"], settings["frequency"])
        receiver = import_module("rtde_receive").RTDEReceiveInterface
        self.receive: Any = receiver(*place, list(SEEN), rt_priority=OURS)
        self.control: Any = None
        self.place = place
        self.stamp: float = -1.0
        self.playing = self.begun = self.free = False

    def begin(self) -> None:
        """Have its script run on the arm, and watched there."""
        interface = import_module("rtde_control").RTDEControlInterface
        flags = interface.FLAG_UPLOAD_SCRIPT | interface.FLAG_NO_EXT_FT
        self.control = interface(*self.place, flags, rt_priority=OURS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN, OPEN))
        if not self.control.setWatchdog(1 / self.settings["watchdog"]):
            raise RuntimeError("its script did not set its watchdog")

    def obey(self, order: bytes | None) -> None:
        """Do the newest order. Without one only an arm that was not moved yet is kept awake."""
        if not self.playing:  # what it would refuse; the measurement says why
            return
        if order is None:
            if not self.begun:
                self.control.kickWatchdog()
            return
        what, *q = ORDER.unpack(order)
        if what == FREE:
            self._release()
        elif what == PROTECT:
            self.control.triggerProtectiveStop()
        elif what == FOLLOW:
            self.begun = True
            self._engage()
            lookahead, gain = self.settings["lookahead"], self.settings["gain"]
            self.control.servoJ(q, 0.0, 0.0, self.tick, lookahead, gain)

    def _release(self) -> None:
        """Freedrive; its watchdog hears of us all the while."""
        if self.free:
            self.control.kickWatchdog()
            return
        self.control.servoStop(self.settings["brake"])
        self.control.freedriveMode()
        self.begun = self.free = True

    def _engage(self) -> None:
        if self.free:
            self.control.endFreedriveMode()
            self.free = False

    def tell(self) -> None:
        """Send a measurement on, if it is another one than the last."""
        stamp, numbers = self._look()
        if stamp == self.stamp:
            return
        self.stamp = stamp
        self.playing = numbers[-1] == PLAYING
        with suppress(OSError):  # not read for long, or closed: the next order says so
            state = STATE.pack(time.monotonic(), *numbers, self.control is not None)
            self.wire.send(MEASURED + state)

    def _look(self) -> tuple[float, list[float]]:
        """The controller's stamp, and what was measured then."""
        receive = self.receive
        while True:
            stamp = float(receive.getTimestamp())
            numbers = [*receive.getActualQ(), *receive.getActualQd()]
            numbers += [*receive.getActualTCPForce(), *receive.getActualCurrent()]
            numbers += [receive.getRobotMode(), receive.getSafetyStatusBits()]
            numbers += [receive.getRuntimeState()]
            if float(receive.getTimestamp()) == stamp:  # no other one came in between
                return stamp, numbers

    def broken(self) -> bool:
        return not (self.receive.isConnected() and self.control.isConnected())

    def leave(self) -> None:
        """Stop the arm where it is, and its script."""
        if self.control is not None and self.playing:
            self._engage()
            self.control.servoStop(self.settings["brake"])
            self.control.stopScript()


def newest(wire: socket.socket, patience: float) -> bytes | None:
    """The last order that is there by now, or the first within `patience` s. EOFError."""
    last: bytes | None = None
    if select.select([wire], (), (), patience)[0]:
        try:
            while order := wire.recv(ORDER.size):
                last = order
        except BlockingIOError:
            return last
        except ConnectionError as error:  # closed, with measurements that it had not read
            raise EOFError from error
        raise EOFError
    return last


def serve(wire: socket.socket, settings: dict[str, Any]) -> None:
    """Serve orders until the other end closes; RuntimeError and ValueError with what went wrong."""

    def alarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, settings["patience"])

    alarm()
    client = Client(wire, settings)
    try:
        client.tell()
        if newest(wire, settings["patience"]) is None:
            return
        alarm()
        client.begin()
        while True:
            alarm()
            client.obey(newest(wire, client.tick))
            if client.broken():
                raise RuntimeError(
                    "the connection broke: look at its cable and pendant, then reset"
                )
            client.tell()
    except EOFError:
        client.leave()


def main(handle: int) -> None:
    """Serve, and never return: ur_rtde's threads are not waited for."""
    wire = socket.socket(fileno=handle)
    with suppress(AttributeError, OSError):  # where it is not granted, the control process says so
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    try:
        settings = json.loads(wire.recv(65536))
        wire.setblocking(False)
        serve(wire, settings)
    except (RuntimeError, ValueError) as error:
        with suppress(OSError):
            wire.send(REASON + " ".join(str(error).split()).encode())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
