"""The process that runs a LeRobot robot or teleoperator: `PYTHON bridge.py HANDLE`.

`embodied.real_robot.drivers.lerobot.driver` starts it, with the interpreter that has LeRobot: this
file imports nothing of this project and runs on Python 3.10 and newer.

HANDLE is its end of a pair of sockets (SOCK_SEQPACKET). A JSON map of settings comes first. Then
orders come (ORDER, and one number for each key), of which the newest counts, and measurements go
back (MEASURED, STATE, and one number for each key), or one line with its reason to end (REASON).
READY goes back with a JSON map before the first measurement.

When no order has come for `silence` s, or the other end closes, a robot is sent to where it is
measured, with torque on; then this process ends without LeRobot's clean-up in destructors, which
may switch torque off.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Generator
from typing import Any

STATE = struct.Struct("=2d")
"""Time (s, monotonic clock) at which a measurement began, and how long (s) it took."""
MEASURED = b"m"
REASON = b"!"
READY = b"r"
ORDER = b"o"
MEASUREMENTS = 40  # at the start, to know how long one takes
CONNECTS = 5  # LeRobot's `connect` gives up on one packet of about a hundred
RETRIES = 5  # for one packet, meanwhile
LOST = (ConnectionError, RuntimeError, IndexError)  # no reply; none to a ping; a damaged one
TORQUE = "disable_torque_on_disconnect"


class Refused(Exception):
    """LeRobot's device cannot be used: one line for people."""


def config_class(base: Any, package: str, name: str) -> Any:
    """The configuration class that LeRobot knows as `name`. Its packages are imported, the most
    similar name first, until one registers it."""
    known = base.get_known_choices
    if name not in known():
        importlib.import_module("lerobot.utils.import_utils").register_third_party_plugins()
    parent = importlib.import_module(package)
    names = [m.name for m in pkgutil.iter_modules(parent.__path__) if m.ispkg]
    names.sort(key=lambda each: -difflib.SequenceMatcher(None, each, name).ratio())
    failed = ""
    for each in names:
        if name in known():
            break
        try:
            importlib.import_module(f"{package}.{each}")
        except Exception as error:  # a package for a device whose SDK is not installed
            failed = failed or f" ({each}: {error})"
    if name not in known():
        raise Refused(f"LeRobot knows no {name} (known: {', '.join(sorted(known()))}){failed}")
    return base.get_choice_class(name)


def made(about: dict[str, Any]) -> Any:
    """The LeRobot object that `about` describes; nothing is connected yet."""
    for module in about["modules"]:
        importlib.import_module(module)
    robot = about["role"] == "robot"
    package = "lerobot.robots" if robot else "lerobot.teleoperators"
    module = importlib.import_module(package)
    base = module.RobotConfig if robot else module.TeleoperatorConfig
    settings = dict(about["settings"])
    if settings.get("cameras"):
        raise Refused("settings.cameras: cameras belong into robot.cameras, not to LeRobot's robot")
    chosen = config_class(base, package, about["type"])
    config = importlib.import_module("draccus").decode(chosen, settings)
    if hasattr(config, TORQUE):
        setattr(config, TORQUE, False)
    if robot:
        return module.make_robot_from_config(config)
    return module.make_teleoperator_from_config(config)


def buses(device: Any) -> list[Any]:
    """The motor buses of a device, and of the arms that it is made of."""
    found: list[Any] = []
    for part in list(device.__dict__.values()):
        if all(hasattr(part, name) for name in ("enable_torque", "sync_read", "sync_write")):
            found.append(part)
        elif hasattr(part, "get_observation"):
            found.extend(buses(part))
    return found


def hold_when_enabled(bus: Any) -> None:
    """Let torque come on where the motors stand. LeRobot's `connect` switches it off, writes to the
    motors and switches it on, with the goals that they had before: the arm would go there."""
    enable = bus.enable_torque

    def enable_torque(*given: Any, **named: Any) -> Any:
        places = bus.sync_read("Present_Position", normalize=False)
        bus.sync_write("Goal_Position", places, normalize=False)
        return enable(*given, **named)

    bus.enable_torque = enable_torque


@contextlib.contextmanager
def packets_sent_again(bus: Any) -> Generator[None]:
    """A packet without a reply is sent again: LeRobot can do so and, by default, does not."""

    def patient(call: Any) -> Any:
        def again(*given: Any, **named: Any) -> Any:
            return call(*given, **{**named, "num_retry": RETRIES})

        return again

    names = [
        name
        for name in ("ping", "_read", "_write", "_sync_read", "_sync_write")
        if "num_retry" in inspect.signature(getattr(bus, name, len)).parameters
    ]
    for name in names:
        setattr(bus, name, patient(getattr(bus, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(bus, name)


class Bridge:
    """`about`: the settings; `device`: LeRobot's object."""

    def __init__(self, wire: socket.socket, about: dict[str, Any]) -> None:
        self.wire = wire
        self.about = about
        self.role: str = about["role"]
        self.keys: list[str] = about["keys"]
        self.device = made(about)
        for bus in buses(self.device) if self.role == "robot" else ():
            hold_when_enabled(bus)
        self.order = struct.Struct(f"={len(self.keys)}d")
        self.values: list[float] = []
        self.good = self.heard = time.monotonic()

    def connect(self) -> None:
        """Connect, and say how long a measurement takes. What LeRobot gives up for one lost packet
        is tried again; torque stays as it is meanwhile."""
        last = ""
        for _ in range(CONNECTS):
            try:
                with contextlib.ExitStack() as stack:
                    for bus in buses(self.device):
                        stack.enter_context(packets_sent_again(bus))
                    spent = self.attempt()
                self.wire.send(READY + json.dumps({"spent": spent, **self.known()}).encode())
                self.good = self.heard = time.monotonic()
                return
            except LOST as error:
                last = f"{type(error).__name__}: {error}"
            for bus in buses(self.device):
                if bus.is_connected:
                    bus.disconnect(disable_torque=False)
        raise Refused(
            f"it did not connect in {CONNECTS} attempts (the last: {last}): look at its cable and "
            "power"
        )

    def attempt(self) -> list[float]:
        """Connect; how long measurements with their commands took, s."""
        self.device.connect(calibrate=False)
        if not self.device.is_calibrated:
            raise Refused(
                f"{self.about['type']} is not calibrated, or its motors hold another calibration "
                "than its file: embodied robot calibrate, or lerobot-calibrate"
            )
        spent: list[float] = []
        for _ in range(MEASUREMENTS):
            spent.append(self.measure()[1])
            if self.role == "robot":  # a servo that was sent elsewhere before stays where it is
                spent[-1] += self.follow(self.values)
        return spent

    def known(self) -> dict[str, Any]:
        """Calibrated ranges (ticks) of what it has, by motor."""
        found: dict[str, Any] = getattr(self.device, "calibration", None) or {}
        ranges = {name: [one.range_min, one.range_max] for name, one in found.items()}
        return {"ranges": ranges, "keeps_torque": hasattr(self.device.config, TORQUE)}

    def measure(self) -> tuple[float, float]:
        """Measure into `values`; returns when that began and how long it took (s)."""
        began = time.monotonic()
        robot = self.role == "robot"
        found = self.device.get_observation() if robot else self.device.get_action()
        if missing := [key for key in self.keys if key not in found]:
            here = ", ".join(sorted(found))
            raise Refused(f"{self.about['type']} does not measure {missing[0]} (it has {here})")
        self.values = [float(found[key]) for key in self.keys]
        return began, time.monotonic() - began

    def follow(self, values: list[float]) -> float:
        """Send the robot to `values`; how long it took, s."""
        began = time.monotonic()
        self.device.send_action(dict(zip(self.keys, values)))  # noqa: B905
        return time.monotonic() - began

    def hold(self) -> None:
        """Send it to where it was measured last."""
        if self.role == "robot" and self.values:
            self.follow(self.values)

    def turn(self, order: bytes | None) -> None:
        """Do one order, where there is one, and one measurement. Errors of lost packets are
        ignored for `silence` s."""
        now = time.monotonic()
        try:
            if order is not None:
                self.heard = now
                self.follow(list(self.order.unpack(order)))
            elif now - self.heard > self.about["silence"]:
                self.heard = float("inf")  # once
                self.hold()
            began, spent = self.measure()
        except Refused:
            raise
        except Exception as error:
            if now - self.good > self.about["silence"]:
                raise Refused(f"{type(error).__name__}: {error}") from error
            return
        self.good = now
        try:
            self.wire.send(MEASURED + STATE.pack(began, spent) + self.order.pack(*self.values))
        except BlockingIOError:
            pass  # not read for long; the newest counts
        except OSError as error:
            raise EOFError from error

    def leave(self) -> None:
        """Hold it with torque on."""
        try:
            self.hold()
            if hasattr(self.device.config, TORQUE):
                self.device.disconnect()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


def newest(wire: socket.socket, patience: float) -> bytes | None:
    """The last order that is there by now, or the first within `patience` s. EOFError."""
    last: bytes | None = None
    if select.select([wire], [], [], patience)[0]:
        try:
            while said := wire.recv(65536):
                last = said[1:] if said[:1] == ORDER else last
        except BlockingIOError:
            return last
        except ConnectionError as error:
            raise EOFError from error
        raise EOFError
    return last


def serve(wire: socket.socket, about: dict[str, Any]) -> None:
    """Serve orders until the other end closes. Refused."""

    def alarm(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    alarm(about["patience"])
    bridge = Bridge(wire, about)
    try:
        bridge.connect()
        while True:
            alarm(10 * about["silence"])  # a call that never comes back ends this process
            bridge.turn(newest(wire, about["period"]))
    except EOFError:
        pass
    finally:
        alarm(about["patience"])
        bridge.leave()


def main(handle: int) -> None:
    """Serve, and never return: destructors of LeRobot's objects are not run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wire = socket.socket(fileno=handle)
    try:
        about: dict[str, Any] = json.loads(wire.recv(65536))
        wire.setblocking(False)
        serve(wire, about)
    except BaseException as error:
        kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
        try:
            wire.send(REASON + f"{kind}{' '.join(str(error).split())}".encode()[:2000])
        except OSError:
            print(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]  # not for LeRobot
    main(int(sys.argv[1]))
