"""WithRobotiq: any arm's driver, and a Robotiq 2F gripper as its hand.

The gripper is asked by a thread of its own, since an exchange takes as long as a tick of the
control loop: `write` leaves the newest opening there, `width` is what it measured last. An error of
the gripper, or one that was silent for `silence` s, is a fault of the robot.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from embodied.core.bounds import Bound, Fraction
from embodied.core.build import ConfigError, Node, build
from embodied.real_robot.control.arm_state import ArmState, Floats, Limits
from embodied.real_robot.drivers.driver import Driver, DriverError, droop_of, unloaded
from embodied.real_robot.drivers.robotiq.wires import PORT, READY, Modbus, UrSocket, Wire
from embodied.real_robot.drivers.springs import Springs, springs_of, stiffen, stiffness_of

CLOSED = 255
PERIOD = 0.03  # s between exchanges
ACTIVATING = 10.0  # s: it opens and closes once


@dataclass(frozen=True)
class Config:
    """Settings of an arm with a Robotiq gripper."""

    arm: Node  # node of the arm's driver
    wire: Literal["serial", "ur"]  # serial, at `port`, or a UR's socket, at `host`
    port: str = ""  # /dev/serial/by-id/...
    host: str = ""  # address of the UR's controller
    socket: Annotated[int, Bound(1, 65535)] = PORT  # TCP port of the UR's socket
    stroke: Annotated[float, Bound(above=0.0, below=1.0)] = 0.085  # opening, m; 0.14 of a 2F-140
    speed: Fraction = 0.5  # share of the fastest
    force: Fraction = 0.2  # share of the strongest
    silence: Annotated[float, Bound(above=PERIOD, high=60.0)] = 0.5  # s: then the gripper is lost

    def __post_init__(self) -> None:
        if self.wire == "serial" and not self.port:
            raise ConfigError("driver.wire=serial needs driver.port=/dev/serial/by-id/...")
        if self.wire == "ur" and not self.host:
            raise ConfigError("driver.wire=ur needs driver.host=ADDRESS")
        if not (0 <= self.speed <= 1 and 0 <= self.force <= 1 and 0 < self.stroke < 1):
            raise ConfigError("driver: speed and force from 0 to 1, stroke above 0 (m)")
        if self.silence <= PERIOD:
            raise ConfigError(f"driver.silence should be above {PERIOD} s")


class WithRobotiq(Driver):
    """The arm's driver in everything but the hand. Connecting activates the gripper: it moves."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.arm = build(config.arm, Driver)
        self.joints = self.arm.joints
        self.sensed = self.arm.sensed
        self.falls_when_released = self.arm.falls_when_released  # type: ignore[misc]
        self.wire: Wire = (
            Modbus(config.port) if config.wire == "serial" else UrSocket(config.host, config.socket)
        )
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._problem = ""
        self._position = 0
        self._wanted = 0
        self._heard = 0.0

    def connect(self) -> None:
        self.arm.connect()
        try:
            self._begin()
        except DriverError:
            self.arm.stop()
            self.arm.close()
            raise

    def _begin(self) -> None:
        """Activate the gripper, where it is not, and ask it from now on."""
        self._end()
        self.wire.open()
        if self.wire.status().state != READY:
            self.wire.command(False, 0, 0, 0)
            deadline = time.monotonic() + ACTIVATING
            while self.wire.status().state != READY:
                self.wire.command(True, 0, self._speed, self._force)
                if time.monotonic() > deadline:
                    raise DriverError(f"the gripper was not activated within {ACTIVATING:g} s")
                time.sleep(PERIOD)
        status = self.wire.status()
        self._position = self._wanted = status.position
        self._problem = ""
        self._heard = time.monotonic()
        self._over.clear()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self.wire.command(True, self._wanted, self._speed, self._force)
                status = self.wire.status()
            except DriverError as error:
                self._problem = str(error)
                return
            if status.fault >= 8:  # lower ones are notes
                self._problem = f"the gripper reports fault {status.fault:#x}"
                return
            self._position = status.position
            self._heard = time.monotonic()

    def _end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None
        self.wire.close()

    @property
    def _speed(self) -> int:
        return round(255 * self.config.speed)

    @property
    def _force(self) -> int:
        return round(255 * self.config.force)

    def read(self) -> ArmState:
        state = self.arm.read()
        if self._problem:
            raise DriverError(self._problem, state)
        if time.monotonic() - self._heard > self.config.silence:
            raise DriverError("the gripper was silent for too long", state)
        return state

    def write(self, q: Floats, width: float) -> None:
        self._grip(width)
        self.arm.write(q, width)

    def hold(self, q: Floats, width: float) -> bool:
        self._grip(width)
        return self.arm.hold(q, width)

    def _grip(self, width: float) -> None:
        share = min(max(1 - width / self.config.stroke, 0.0), 1.0)
        self._wanted = round(share * CLOSED)

    @property
    def width(self) -> float:
        """Opening (m) of the maker's fingers: a share of the stroke."""
        return (1 - self._position / CLOSED) * self.config.stroke

    def recover(self) -> None:
        self.arm.recover()
        self._begin()

    def close(self) -> None:
        with suppress(DriverError):
            self._end()
        self.arm.close()

    def stop(self) -> None:
        """The arm stays; the gripper keeps what it holds."""
        self.arm.stop()

    def cut(self) -> None:
        self.arm.cut()

    def release(self) -> None:
        self.arm.release()

    def engage(self) -> None:
        self.arm.engage()

    def droop(self, q: Floats) -> Floats:
        return droop_of(self.arm)(q)

    def unloaded(self, stretch: Floats) -> None:
        unloaded(self.arm, stretch)

    @property
    def springs(self) -> Springs | None:
        return springs_of(self.arm)

    @property
    def stiffness(self) -> tuple[Floats, Floats] | None:
        return stiffness_of(self.arm)

    def stiffen(self, stiffness: Floats) -> None:
        stiffen(self.arm, stiffness)

    def sense(self) -> Floats:
        return self.arm.sense()

    def renew(self) -> None:
        self.arm.renew()

    def reach(self) -> tuple[Floats, Floats] | None:
        return self.arm.reach()

    def check(self, limits: Limits) -> None:
        self.arm.check(limits)
