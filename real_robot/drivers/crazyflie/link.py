"""Radio link to a Crazyflie through cflib (Bitcraze's own library), in threads of its own.

A radio may block its caller for seconds. The control loop leaves its newest set-point in a slot and
goes on. What must not be lost (arm, land, stop) waits in a queue and is sent first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from embodied.real_robot.drivers.driver import DriverError

Command = Callable[[Any], None]
"""Does something with a `cflib.crazyflie.Crazyflie`."""


class Link:
    """`heard` holds, for each log block, its newest values and when they came (s)."""

    def __init__(self, uri: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.uri = uri
        self.clock = clock
        self.heard: dict[str, tuple[Mapping[str, float], float]] = {}
        self.lost = ""
        self._drone: Any = None
        self._ready = threading.Event()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._queue: deque[Command] = deque()
        self._newest: dict[str, Command] = {}
        self._sender: threading.Thread | None = None

    @property
    def connected(self) -> bool:
        return self._drone is not None and not self.lost

    def open(self, patience: float) -> None:
        """Connect, and wait until all tables of the drone are known; DriverError."""
        crazyflie, crtp = _library()
        if not crtp.CLASSES:
            crtp.init_drivers()
        self.lost = ""
        self._drone = crazyflie.Crazyflie()
        self.heard.clear()
        self._ready.clear()
        drone = self._drone
        drone.fully_connected.add_callback(self._answer)
        drone.connection_failed.add_callback(self._fail)
        drone.connection_lost.add_callback(self._fail)
        drone.disconnected_link_error.add_callback(self._fail)
        drone.open_link(self.uri)
        if not self._ready.wait(patience) or self.lost:
            lost = self.lost or f"it did not answer within {patience:.0f} s"
            raise self.error(f"{lost}; is it switched on, and is the address right?")
        drone.link_statistics.stop()  # its pings would take the place of set-points
        self._over.clear()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def log(self, name: str, variables: Mapping[str, str], period: float) -> None:
        """Have these variables (name: type) told every `period` s; DriverError where it has none
        of that name."""
        block: Any = import_module("cflib.crazyflie.log").LogConfig(name, round(1000 * period))
        for variable, kind in variables.items():
            block.add_variable(variable, kind)
        try:
            self._drone.log.add_config(block)
        except (KeyError, AttributeError) as error:
            raise self.error(f"{error}; its firmware is too old: update it") from error

        def hear(stamp: int, values: Mapping[str, float], config: object) -> None:
            self.heard[name] = (values, self.clock())

        block.data_received_cb.add_callback(hear)
        block.start()

    def parameter(self, name: str) -> float | None:
        """Value of the parameter at connecting; None where the drone has no such parameter."""
        group, _, word = name.partition(".")
        value: str | None = self._drone.param.values.get(group, {}).get(word)
        return None if value is None else float(value)

    def set(self, name: str, value: float) -> None:
        """A parameter, where it has it."""
        if self.parameter(name) is not None:
            self._drone.param.set_value(name, value)

    def tell(self, command: Command) -> None:
        """Something that must not be lost; what was left to send before is forgotten."""
        self._newest.pop("setpoint", None)
        self._queue.append(command)
        self._wake.set()

    def say(self, kind: str, command: Command) -> None:
        """The newest of its kind; an older one that still waits is forgotten."""
        self._newest[kind] = command
        self._wake.set()

    def close(self, flying: bool) -> None:
        """Let go; safe to call twice. cflib takes leave with a set-point that stops the motors: one
        that is still `flying` is left without."""
        drone = self._drone
        self._drone = None
        if drone is None:
            return
        self._flush()
        if flying and drone.link is not None:
            drone.link.close()
            drone.link = None
        try:
            drone.close_link()
        except (OSError, RuntimeError) as error:  # it was closing by itself at the same moment
            logging.getLogger("embodied.robot").info("%s: %s", self.uri, error)

    def error(self, text: str) -> DriverError:
        return DriverError(f"the Crazyflie at {self.uri}: {text}")

    def _flush(self) -> None:
        """Send what waits first."""
        self._over.set()
        self._wake.set()
        if self._sender is not None:
            self._sender.join(1.0)
            self._sender = None

    def _send(self) -> None:
        drone = self._drone
        while not (self._over.is_set() and not self._queue):
            self._wake.wait(0.1)
            self._wake.clear()
            while self._queue:
                self._queue.popleft()(drone)
            for kind in tuple(self._newest):
                command = self._newest.pop(kind, None)
                if command is not None and not self._over.is_set():
                    command(drone)

    def _answer(self, uri: str) -> None:
        self._ready.set()

    def _fail(self, uri: str, reason: str) -> None:
        self.lost = self.lost or " ".join(reason.split("\n")[0].split()) or "the link is gone"
        self._ready.set()


def _library() -> tuple[Any, Any]:
    try:
        crazyflie, crtp = import_module("cflib.crazyflie"), import_module("cflib.crtp")
    except ModuleNotFoundError as error:
        raise DriverError(
            "cflib is not installed; type: pip install 'embodied-rl[crazyflie]'"
        ) from error
    logging.getLogger("cflib").setLevel(logging.ERROR)
    return crazyflie, crtp
