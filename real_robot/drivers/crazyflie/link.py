"""Radio link to a Crazyflie through cflib (Bitcraze's own library), in threads of its own.

A radio may block its caller for seconds. The control loop leaves its newest set-point in a slot and
goes on. What must not be lost (arm, land, stop) waits in a queue and is sent first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntFlag
from importlib import import_module
from typing import Any, NamedTuple

from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.driver import DriverError

Command = Callable[[Any], None]  # does something with a `cflib.crazyflie.Crazyflie`


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
        drone.fully_connected.add_callback(self._connected)
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

    def _connected(self, uri: str) -> None:
        self._ready.set()

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
        # Send what waits first
        self._over.set()
        self._wake.set()
        if self._sender is not None:
            self._sender.join(1.0)
            self._sender = None
        if flying and drone.link is not None:
            drone.link.close()
            drone.link = None
        try:
            drone.close_link()
        except (OSError, RuntimeError) as error:  # it was closing by itself at the same moment
            logging.getLogger("embodied.robot").info("%s: %s", self.uri, error)

    def error(self, text: str) -> DriverError:
        return DriverError(f"the Crazyflie at {self.uri}: {text}")

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


def position(place: list[float], yaw: float) -> Command:
    """A place [3] (m) and a heading (rad): the target of all set-points. Those with a `rate` [4]
    also say its velocity (m/s, rad/s)."""
    x, y, z = place
    turned = math.degrees(yaw)
    return lambda drone: drone.commander.send_position_setpoint(x, y, z, turned)


def full_state(place: list[float], yaw: float, rate: Floats) -> Command:
    """Set-points that also say how fast they move."""
    speed, turn = [float(each) for each in rate[:3]], math.degrees(float(rate[3]))
    facing = [0.0, 0.0, math.sin(yaw / 2), math.cos(yaw / 2)]
    still = [0.0, 0.0, 0.0]
    return lambda drone: drone.commander.send_full_state_setpoint(
        place, speed, still, facing, 0.0, 0.0, turn
    )


def hover(place: list[float], yaw: float, rate: Floats, here: Floats, gain: float) -> Command:
    """Velocities along its own axes, yaw rate, height; `here` [4] is where it is measured to be,
    and `gain` (1/s) leads it back."""
    x, y = (rate[i] + gain * (place[i] - here[i]) for i in range(2))
    turn = math.degrees(rate[3] + gain * (yaw - here[3]))
    cos, sin = math.cos(here[3]), math.sin(here[3])
    ahead, left = float(cos * x + sin * y), float(cos * y - sin * x)
    return lambda drone: drone.commander.send_hover_setpoint(ahead, left, turn, place[2])


FLIGHT = {
    **{f"stateEstimate.{axis}": "float" for axis in "xyz"},
    "stateEstimate.yaw": "float",
    **{f"stateEstimate.v{axis}": "FP16" for axis in "xyz"},
    "gyro.z": "FP16",
}
"""24 of the 26 bytes of a block."""
HEALTH = {
    "supervisor.info": "uint16_t",
    "pm.vbat": "float",
    **{f"kalman.varP{axis}": "float" for axis in "XYZ"},
}


class Info(IntFlag):
    """Bits of the drone's supervisor."""

    CAN_ARM = 1 << 0
    ARMED = 1 << 1
    CAN_FLY = 1 << 3
    FLYING = 1 << 4
    TUMBLED = 1 << 5
    LOCKED = 1 << 6
    CRASHED = 1 << 7
    PLANNING = 1 << 8  # the planner on board flies it


class Health(NamedTuple):
    """Supervisor, voltage of the battery, and variance of its own estimate of its place, of the
    worst axis (m^2)."""

    info: Info
    volts: float
    variance: float

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Health:
        worst = max(values[f"kalman.varP{axis}"] for axis in "XYZ")
        return cls(Info(int(values["supervisor.info"])), values["pm.vbat"], worst)


def stopped(health: Health) -> str:
    """Why it does not fly until a person acts; empty where it may."""
    if Info.LOCKED in health.info:
        return "it is locked, motors off: look at it, put it on the floor, switch it off and on"
    if Info.TUMBLED in health.info:
        return "it lies on its side or upside down: put it upright, then reset"
    if Info.CRASHED in health.info:
        return "it has crashed: look at its propellers, put it on the floor, then reset"
    return ""


def refusal(health: Health) -> str:
    """Why it was not armed."""
    if reason := stopped(health):
        return reason
    if Info.CAN_ARM not in health.info:
        return "its supervisor says that it cannot be armed: look at its LEDs and its self test"
    return "it says that it can be armed, and does not arm"
