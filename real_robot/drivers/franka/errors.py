"""libfranka errors as one line that says what to do, and calls with a time limit."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

from embodied.real_robot.kernel.driver import DriverError

try:
    franky: Any = import_module("franky")
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "franky-control is not installed; type: pip install 'embodied-rl[robot]'", name="franky"
    ) from error

FAILED = (franky.Exception, RuntimeError)
"""Errors of the library: its own, and those of its network layer."""

ADVICE = {
    "cartesian_reflex": "it touched something: clear the way, then reset",
    "joint_reflex": "it touched something: clear the way, then reset",
    "communication_constraints_violation": "packets came too late: see docs/franka.md on the real-"
    "time kernel and the direct cable, then reset",
    "joint_position_limits_violation": "a joint is at its end: guide it back by hand, then reset",
    "self_collision_avoidance_violation": "it would touch itself: guide it away, then reset",
    "joint_velocity_violation": "a joint was too fast: check the limits, then reset",
    "power_limit_violation": "it needed too much power: lighter or slower, then reset",
    "controller_torque_discontinuity": "torques jumped: lower the stiffness, then reset",
    "tau_j_range_violation": "a torque left its range: lower the stiffness, then reset",
    "Connection to FCI refused": "is it on, unlocked, and FCI activated in Desk?",
    "Timeout": "it does not answer any more: look at its power, cable and Desk, then reset",
    "Incompatible": "its system version and franky-control's libfranka do not fit",
    "real-time": "this kernel is not real-time: install one, or set realtime: false to try it",
    "realtime": "this kernel is not real-time: install one, or set realtime: false to try it",
    "User stopped": "the user stop is pressed: release it, then reset",
}
MODES = {
    "UserStopped": "the user stop is pressed: release it",
    "Guiding": "it is being guided by hand: let go of its buttons",
    "Reflex": "it has stopped itself: clear it in Desk, or press and release the user stop",
    "AutomaticErrorRecovery": "it is recovering from an error: wait until it has",
    "Other": "it is locked or busy: unlock its joints and activate FCI in Desk",
}

PORTS = (1337, 1338)  # of the arm and of its hand

T = TypeVar("T")


def explain(host: str, said: object) -> str:
    """One line about what `said` means for the arm at `host`, and what to look at."""
    text = " ".join(str(said).removeprefix("libfranka: ").split())
    hint = next((advice for word, advice in ADVICE.items() if word in text), "")
    return f"the Franka at {host}: {text}{f' ({hint})' if hint else ''}"


def call(host: str, do: Callable[[], T], patience: float, what: str) -> T:
    """`do()`, which must be done in `patience` s; DriverError where it is not, or fails.

    A peer that takes connections and then says nothing would keep the library waiting for ever:
    such a connection is cut.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(do())
        except FAILED as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    if failed:
        error = failed.pop()  # or it would hold itself, and with it the connection, for ever
        raise DriverError(explain(host, error)) from error
    if not done:
        sever(host)
        raise DriverError(
            f"the Franka at {host} did not {what} within {patience:.0f} s: look at its power, "
            "cable and Desk"
        )
    return done[0]


def sever(host: str) -> None:
    """Cut this process's connections to the arm at `host`, where it no longer answers.

    The library's objects say goodbye when they end, and wait, with all of Python, for an answer.
    """
    address = host
    with suppress(OSError):
        address = socket.gethostbyname(host)
    for entry in os.listdir("/proc/self/fd"):
        # Most are of another kind, and one is gone meanwhile.
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as wire:
            if wire.getpeername() in [(address, port) for port in PORTS]:
                wire.shutdown(socket.SHUT_RDWR)
