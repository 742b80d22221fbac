"""Driver around any LeRobot `Robot`, behind this project's control process and safety chain.

LeRobot runs in a process of its own (`bridge.py` beside this file), with the interpreter that has
it: its versions of PyTorch and Python are not ours, and a read of its bus blocks. Each tick takes
the newest measurement and sends one command; neither waits.

What a LeRobot robot does not have, this driver has not either: torques are zeros, so that
`limits.torque` never acts; velocities are differences of positions. The force of a hand is what
LeRobot set up: `hand.force` says how much that is. LeRobot's `connect` may switch torque off for a
moment while it writes to the motors: support the arm then. Torque comes on where the motors stand
(those on one of LeRobot's motor buses; other robots decide that themselves). It cannot be released
to be guided by hand.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from embodied.core.bounds import Bound, Number
from embodied.core.build import ConfigError
from embodied.real_robot.daemon.child import last_words
from embodied.real_robot.drivers.driver import Driver, Outside, RestDroop, Wait
from embodied.real_robot.drivers.lerobot.bridge import MEASURED, ORDER, READY, STATE
from embodied.real_robot.drivers.servos.calibration import load_lerobot
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import memory_folder

BRIDGE = Path(__file__).with_name("bridge.py")
FULL = 200.0  # from -100 to 100
SLACK = 0.035  # rad (2 degrees) outside of what calibration found that are not yet a mistake
GONE = 3.0  # s for the process to hold the arm and end
INSTALL = "pip install lerobot in a virtual environment, and give its interpreter: python=PATH"


@dataclass(frozen=True)
class Source:
    """Which of LeRobot's devices, and where LeRobot is."""

    type: str  # as in LeRobot's --robot.type or --teleop.type
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # LeRobot's --robot.NAME
    python: str = ""  # interpreter that has LeRobot; empty: this one
    modules: tuple[str, ...] = ()  # packages to import first, which register devices
    port: str = ""  # replaces settings.port; empty: it stays
    hertz: Annotated[float, Bound(1.0, 1000.0)] = 50.0  # reads (and writes) a second; loop or less
    silence: Annotated[float, Bound(above=0.0, high=10.0)] = 0.25  # s without measurement or order
    patience: Wait = 90.0  # s to import it and connect

    def about(self, role: str, keys: Sequence[str]) -> dict[str, Any]:
        """The settings that the process is sent."""
        port = {"port": self.port} if self.port else {}
        more = {"settings": self.settings | port, "role": role, "keys": list(keys)}
        return asdict(self) | more | {"period": 1 / self.hertz}


class LeRobotProcess:
    """`keys` [k] are the numbers that go back and forth; `role`: robot or teleoperator. Errors are
    DriverError with the reason in one line."""

    def __init__(self, source: Source, role: str, keys: Sequence[str]) -> None:
        self.source = source
        self.role = role
        self.keys = tuple(keys)
        self.values: tuple[float, ...] = ()  # the newest numbers [k], in LeRobot's units
        self.seen = -math.inf  # when their measurement began, s, monotonic clock
        self.ready: dict[str, Any] = {}  # calibrated ranges by motor, times of first measurements
        self._numbers = struct.Struct(f"={len(self.keys)}d")
        self._wire: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = memory_folder() / f"embodied-lerobot-{os.getpid()}-{id(self)}.log"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, and wait until the first measurement is there."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = self.source.python or sys.executable
        with theirs, self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [python, str(BRIDGE), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is for us, who end it in order
                )
            except OSError as error:
                ours.close()
                reason = f"{python} does not start ({error.strerror}): {INSTALL}"
                raise self._error(reason) from error
        ours.send(json.dumps(self.source.about(self.role, self.keys)).encode())
        ours.setblocking(False)
        self._wire = ours
        deadline = time.monotonic() + self.source.patience
        while not self.values:
            self.drain()
            if time.monotonic() > deadline:
                raise self._error(f"it was not ready within {self.source.patience:.0f} s")
            time.sleep(0.005)

    def drain(self) -> None:
        """Take all that it has said; the newest measurement counts. It never waits."""
        if self._wire is None:
            raise self._error("not connected")
        try:
            while said := self._wire.recv(65536):
                self._take(said[:1], said[1:])
        except BlockingIOError:
            return
        except OSError as error:
            raise self._error(f"its process is gone: {error.strerror}") from error
        raise self._error(self._ended())

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == READY:
            self.ready = json.loads(body)
            # 19 of 20 measurements with their command fit into the period.
            spent = sorted(self.ready["spent"])
            usual = spent[int(0.95 * len(spent))]
            if usual > 1 / self.source.hertz:
                slower = int(0.8 / usual)
                raise self._error(
                    f"reading and writing takes {1e3 * usual:.1f} ms, and a period is "
                    f"{1e3 / self.source.hertz:.1f} ms: set robot.driver.hertz and robot.hertz to "
                    f"{slower}, or use a faster wire"
                )
        elif kind == MEASURED:
            self.seen = STATE.unpack_from(body)[0]
            self.values = self._numbers.unpack_from(body, STATE.size)
        else:
            reason = body.decode(errors="replace")
            missing = "No module named 'lerobot'" in reason
            raise self._error(f"LeRobot is not installed there: {INSTALL}" if missing else reason)

    def send(self, values: Sequence[float]) -> None:
        """Send the robot to `values` [k], in LeRobot's units."""
        if self._wire is None:
            raise self._error("not connected")
        try:
            self._wire.send(ORDER + self._numbers.pack(*values))
        except OSError as error:
            raise self._error(f"its process does not listen: {error.strerror}") from error

    def close(self) -> None:
        """End the process, which holds the arm with torque on; safe to call twice."""
        if self._wire is not None:
            self._wire.close()
        if self._process is not None:
            try:
                self._process.wait(GONE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._wire = None
        self._process = None
        self.values = ()
        self._log.unlink(missing_ok=True)

    def _ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(self.source.silence)
        except subprocess.TimeoutExpired:
            return "its process does not answer"
        if code == -signal.SIGALRM:
            return "a call of LeRobot did not return"
        words = last_words(self._log)
        return f"its process died (exit status {code}){': ' + words if words else ''}"

    def _error(self, reason: str) -> DriverError:
        return DriverError(f"LeRobot's {self.source.type}: {reason}")


def motor(key: str) -> str:
    """LeRobot's motor of a key such as `elbow_flex.pos`."""
    return key.removesuffix(".pos")


@dataclass(frozen=True)
class Joint:
    """A joint of LeRobot's and its unit. The unit `range` is from -100 to 100."""

    key: str  # LeRobot's name, as elbow_flex.pos
    unit: Literal["degrees", "radians", "range"] = "degrees"  # unit of LeRobot's values
    zero: Number = 0.0  # LeRobot's value where our joint is at 0 rad
    sign: Literal[-1, 1] = 1  # -1: it turns the other way
    span: Annotated[float, Bound(0.0, 1e4)] = 0.0  # rad of a range; 0: as its calibration file says
    name: str = ""  # our name; empty: made from the key


@dataclass(frozen=True)
class Hand:
    """A gripper of LeRobot's."""

    key: str = "gripper.pos"  # LeRobot's name
    closed: Number = 0.0  # LeRobot's value where it is closed
    open: Number = 100.0  # LeRobot's value where it is open
    width: Annotated[float, Bound(above=0.0, high=1.0)] = 0.07  # opening there, m
    force: Annotated[float, Bound(above=0.0, high=1000.0)] = 15.0  # N that LeRobot lets it press

    def __post_init__(self) -> None:
        if self.closed == self.open:
            raise ConfigError("hand: closed and open should differ")

    def opening(self, value: float) -> float:
        """Opening (m) at LeRobot's `value`."""
        share = (value - self.closed) / (self.open - self.closed)
        return min(max(share, 0.0), 1.0) * self.width

    def value(self, width: float) -> float:
        """LeRobot's value where it is open by `width` m."""
        share = min(max(width / self.width, 0.0), 1.0)
        return self.closed + share * (self.open - self.closed)


class Units:
    """LeRobot's values [n] and our rad [n]. `ready`: what its process said of its calibration.
    ConfigError where a span is not known."""

    def __init__(self, joints: Sequence[Joint], ready: Mapping[str, Any]) -> None:
        known = [self._of(joint, ready) for joint in joints]
        self.zero = np.array([joint.zero for joint in joints])
        self.scale = np.array(
            [joint.sign * rad for joint, (rad, _) in zip(joints, known, strict=True)]
        )
        self.ends = np.array([[-end, end] for _, end in known]).T

    def _of(self, joint: Joint, ready: Mapping[str, Any]) -> tuple[float, float]:
        """Angle (rad) of one of the joint's units, and the largest of LeRobot's values (also the
        other way) that calibration found reachable; infinite where nobody knows."""
        ticks = ready.get("ranges", {}).get(motor(joint.key))
        turns = None if ticks is None else (ticks[1] - ticks[0]) / 4095
        if joint.unit == "radians":
            return 1.0, math.inf
        if joint.unit == "degrees":
            return math.tau / 360, math.inf if turns is None else 180 * turns
        span = joint.span if joint.span or turns is None else turns * math.tau
        if not span:
            raise ConfigError(
                f"{joint.key}: how far it turns is not known; give span (rad) of -100 to 100"
            )
        return span / FULL, FULL / 2

    def rad(self, values: Floats) -> Floats:
        return (values - self.zero) * self.scale

    def values(self, rad: Floats) -> Floats:
        return self.zero + rad / self.scale

    def reach(self) -> tuple[Floats, Floats] | None:
        """Ours, low and high; None where no end is known."""
        ends = self.rad(self.ends)
        low, high = ends.min(0), ends.max(0)
        return (low, high) if np.isfinite(ends).any() else None


@dataclass(frozen=True, kw_only=True)
class Config(Source):
    """Settings of a robot of LeRobot."""

    joints: tuple[Joint, ...]  # in the order of the limits
    hand: Hand | None = None  # the gripper; null: none

    def __post_init__(self) -> None:
        keys = [joint.key for joint in self.joints]
        keys += [] if self.hand is None else [self.hand.key]
        if not self.joints or len(set(keys)) < len(keys):
            raise ConfigError("driver: every joint, and the hand, needs a key of its own")

    @property
    def keys(self) -> tuple[str, ...]:
        """LeRobot's names of the joints, and last of the hand."""
        hand = () if self.hand is None else (self.hand.key,)
        return (*(joint.key for joint in self.joints), *hand)


class LeRobotDriver(RestDroop, Driver):
    """Positions are rad at the joints. A measurement older than `silence` s is a fault."""

    falls_when_released = True

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.joints = tuple(joint.name or motor(joint.key) for joint in config.joints)
        self.grip = None if config.hand is None else config.hand.force
        self.process = LeRobotProcess(config, "robot", config.keys)
        self._droop = np.zeros(len(config.joints))
        self._units: Units | None = None
        self._last: ArmState | None = None

    def connect(self) -> None:
        try:
            self.process.start()
            self._units = Units(self.config.joints, self.process.ready)
        except (DriverError, ConfigError) as error:
            self.close()
            raise DriverError(str(error)) from error
        self._last = None

    def read(self) -> ArmState:
        assert self._units is not None
        self.process.drain()
        # Both clocks are the machine's monotonic one; `clock` is another in tests.
        age = time.monotonic() - self.process.seen
        t = self.clock() - age
        last = self._last
        if last is None or t - last.t >= 1e-4:  # else it is the same measurement
            q = self._units.rad(np.array(self.process.values[: len(self.joints)]))
            dq = np.zeros(len(q)) if last is None else (q - last.q) / (t - last.t)
            last = ArmState(q, dq, np.zeros(len(q)), t)
            self._last = last
        if age > self.config.silence:
            raise DriverError(
                f"LeRobot's {self.config.type} gave no measurement for {age:.2f} s: look at "
                "its cable and power, then reset",
                last,
            )
        return last

    def write(self, q: Floats, width: float) -> None:
        if self._units is None or not (np.isfinite(q).all() and math.isfinite(width)):
            raise DriverError(f"the arm was sent to {np.round(q, 3).tolist()}, {width}: no numbers")
        values = self._units.values(q).tolist()
        if self.config.hand is not None:
            values.append(self.config.hand.value(width))
        self.process.send(values)

    @property
    def width(self) -> float:
        hand = self.config.hand
        if hand is None or not self.process.values:
            return 0.0
        return hand.opening(self.process.values[-1])

    def outside(self) -> Outside:
        """LeRobot's own keys and values."""
        joints, hand = self.config.joints, self.config.hand
        units = self._units or Units(joints, {"ranges": self._ranges()})
        zero, unit = units.zero.tolist(), units.scale.tolist()
        if hand is not None:
            zero.append(hand.closed)
            unit.append(hand.width / (hand.open - hand.closed))
        return Outside(self.config.keys, tuple(zero), tuple(unit), len(joints))

    def calibration(self) -> str:
        """Ours, and LeRobot's file of that robot."""
        joints = json.dumps([asdict(joint) for joint in self.config.joints])
        return "\n".join([joints, *(file.read_text() for file in self._files())])

    def _files(self) -> list[Path]:
        """LeRobot's calibration files of robots with that id."""
        settings, environment = self.config.settings, os.environ
        home = environment.get("HF_LEROBOT_HOME") or (
            f"{environment.get('HF_HOME', '~/.cache/huggingface')}/lerobot"
        )
        usual = environment.get("HF_LEROBOT_CALIBRATION", f"{home}/calibration") + "/robots"
        folder = Path(settings.get("calibration_dir") or usual).expanduser()
        return sorted(folder.rglob(f"{settings.get('id')}.json"))

    def _ranges(self) -> dict[str, list[float]]:
        """Calibrated ranges (ticks) by motor, of LeRobot's only file of that robot; else none."""
        files = self._files()
        if len(files) != 1:
            return {}
        found = load_lerobot(files[0])
        return {name: [each.range_min, each.range_max] for name, each in found.items()}

    def reach(self) -> tuple[Floats, Floats] | None:
        return None if self._units is None else self._units.reach()

    def check(self, limits: Limits) -> None:
        if (reach := self.reach()) is None:
            return
        low = np.add(limits.low, limits.margin) + SLACK
        high = np.subtract(limits.high, limits.margin) - SLACK
        for joint, *ends in zip(self.joints, low, high, *reach, strict=True):
            if ends[0] < ends[2] or ends[1] > ends[3]:
                wanted, found = (f"{a:.2f} to {b:.2f} rad" for a, b in (ends[:2], ends[2:]))
                raise DriverError(
                    f"{joint}: the limits ask for {wanted}, its calibration reached {found}: "
                    "make limits.low and limits.high narrower, or calibrate it again"
                )

    def recover(self) -> None:
        """Start LeRobot again only where its process is gone: `connect` may switch torque off for a
        moment."""
        if self.process.running:
            with suppress(DriverError):
                self.read()
                return
        self.close()
        self.connect()

    def stop(self) -> None:
        if self._last is None or self._units is None:
            return
        with suppress(DriverError):  # a process that is gone: its servos hold their last goal
            self.read()
            self.write(self._last.q + self._droop, self.width)

    def close(self) -> None:
        self.process.close()
