"""Calibration of a servo arm: homing offsets, ranges and zeros, and LeRobot's file of them.

LeRobot keeps, for each motor, {id, drive_mode, homing_offset, range_min, range_max}; offset and
range are in the servo's lasting memory as well, and positions are reported with the offset taken
off. Ours needs, beyond these ticks, where the kinematics' zero is and which way each joint turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from embodied.core.bounds import CountOrZero, Whole
from embodied.core.build import ConfigError, parse, printable
from embodied.core.files import read_json
from embodied.real_robot.drivers.servos.bus import MAKES, TICKS, SerialPort, ServoWire, unsigned
from embodied.real_robot.kernel.driver import DriverError

MIDDLE = TICKS // 2 - 1  # where LeRobot puts the middle of each joint's motion
OFFSET, LOW, HIGH, LOCK = 31, 9, 11, 55  # registers of a Feetech STS servo
MOST_OFFSET = 2047
HAND = "gripper"  # LeRobot's name of it
LEAST_RANGE = 40  # ticks: less is a joint that nobody moved
Ask = Callable[[str], None]  # shows a line, and returns when a person has done what it says
Step = Callable[[], bool]


@dataclass
class Motor:
    """One motor of LeRobot's calibration file, with its names."""

    id: CountOrZero  # of the motor on its bus
    drive_mode: Whole = 0  # 1: it counts the other way round
    homing_offset: Whole = 0  # ticks that are subtracted from what it measures
    range_min: Whole = 0  # ticks at the lower end of its range
    range_max: Whole = TICKS - 1  # ticks at the upper end of its range


def load_lerobot(path: Path) -> dict[str, Motor]:
    """LeRobot's calibration file; ConfigError."""
    try:
        motors = _motors(read_json(path), path)
    except OSError as error:
        raise ConfigError(f"{path} is no calibration of LeRobot: {error}") from error
    known: dict[int, str] = {}
    for name, each in motors.items():
        if not 0 <= each.range_min < each.range_max < TICKS:
            raise ConfigError(f"{path}: {name} needs 0 <= range_min < range_max < {TICKS}")
        if (other := known.setdefault(each.id, name)) != name:
            raise ConfigError(f"{path}: {other} and {name} have the same id, {each.id}")
    return motors


def _motors(found: Any, path: Path) -> dict[str, Motor]:
    if not isinstance(found, dict):
        raise ConfigError(f"{path} should hold motors by their names")
    named = cast(dict[str, Any], found)
    for name, about in named.items():
        if not isinstance(about, dict):
            raise ConfigError(f"{path}: {printable(name)} should be {{id: 1, drive_mode: 0, ...}}")
    return {
        name: parse(Motor, cast(dict[str, Any], about), f"{path}: {printable(name)}", ".")
        for name, about in named.items()
    }


def save_lerobot(motors: Mapping[str, Motor], path: Path) -> None:
    """Write the file as LeRobot does, whole or not at all."""
    _write(path, {name: asdict(motor) for name, motor in motors.items()})


def driver_settings(
    motors: Mapping[str, Motor], zeros: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """`joints` and `hand` of the driver ServoBus. Without `zeros` a joint is at 0 rad in the middle
    of its range. ConfigError for a range of a whole turn."""
    joints: list[dict[str, Any]] = []
    for name, each in motors.items():
        if name == HAND:
            continue
        if each.range_max - each.range_min == TICKS - 1:
            raise ConfigError(
                f"the range of {name} is a whole turn, so nobody moved it to its ends, and nothing "
                "would limit it: write range_min and range_max of both ends (LeRobot does not ask "
                "for those of wrist_roll), or calibrate with port="
            )
        middle = round((each.range_min + each.range_max) / 2)
        about = {"name": name, "id": each.id, "low": each.range_min, "high": each.range_max}
        about["zero"] = (zeros or {}).get(name, middle)
        joints.append({**about, "sign": -1 if each.drive_mode else 1})
    made: dict[str, Any] = {"joints": joints}
    if HAND in motors:
        each = motors[HAND]
        low, high = each.range_min, each.range_max
        closed, opened = (high, low) if each.drive_mode else (low, high)
        made["hand"] = {"id": each.id, "closed": closed, "open": opened}
    return made


def motors_of(settings: Mapping[str, Any]) -> dict[str, Motor]:
    """LeRobot's motors of a driver's `joints` and `hand`; offsets are 0: those of the servos stay
    unknown to a file that does not have them."""
    motors = {
        str(each["name"]): Motor(
            int(each["id"]), int(each.get("sign", 1) < 0), 0, int(each["low"]), int(each["high"])
        )
        for each in settings["joints"]
    }
    if about := settings.get("hand"):
        closed, opened = int(about["closed"]), int(about["open"])
        ends = (min(closed, opened), max(closed, opened))
        motors[HAND] = Motor(int(about["id"]), int(opened < closed), 0, *ends)
    return motors


def find_servos(path: str, protocol: str, baud: int) -> dict[int, int]:
    """Where the servos of ids up to 30 that answer on a port are (ticks), by id. DriverError where
    it cannot be opened."""
    ids = range(1, 31)
    make, port = MAKES[protocol], SerialPort(path, baud)
    wire = ServoWire(port, make, {id: f"servo {id}" for id in ids}, 0.05, 0)
    port.open()
    try:
        wire.find_echo()
        found: dict[int, bytes] = {}
        for id in ids:
            found |= wire.ask(*make.state, (id,))
        return {id: make.motion(data).position for id, data in found.items()}
    finally:
        port.close()


@dataclass
class Progress:
    """The calibration so far, kept in a file, so that an interrupted one continues."""

    motors: dict[str, Motor]
    zeros: dict[str, int] = field(default_factory=dict[str, int])
    done: list[str] = field(default_factory=list[str])

    @classmethod
    def load(cls, path: Path, ids: Mapping[str, int]) -> Progress:
        """The one in `path`, or a new one. ConfigError where it is of other motors."""
        if not path.exists():
            return cls({name: Motor(id) for name, id in ids.items()})
        said = read_json(path)
        if not isinstance(said, dict):
            raise ConfigError(f"{path} is no calibration that was interrupted: delete it")
        made = parse(cls, cast(dict[str, Any], said), str(path))
        if {name: motor.id for name, motor in made.motors.items()} != dict(ids):
            raise ConfigError(f"{path} is of other motors: delete it to begin anew")
        return made


class Calibration:
    """Calibration of the Feetech servos `ids` (by name) on a port, with torque off: a person
    moves the arm. `ask` shows one line at a time; `wait` does so too, and calls a function all
    the while."""

    def __init__(
        self,
        path: str,
        ids: Mapping[str, int],
        progress: Path,
        ask: Ask,
        wait: Callable[[str, Step], None],
    ) -> None:
        self.make = MAKES["feetech"]
        self.port = SerialPort(path, 1_000_000)
        self.wire = ServoWire(self.port, self.make, {id: name for name, id in ids.items()}, 0.1, 5)
        self.file = progress
        self.ask = ask
        self.wait = wait
        self.progress = Progress.load(progress, ids)

    def run(self) -> Progress:
        """All that is not done yet. DriverError where a servo does not answer or take a value."""
        self.port.open()
        try:
            self.wire.find_echo()
            self.wire.get(self.make.mode, 1)
            self.ask("support the arm: its torque goes off")
            self._put(self.make.torque, dict.fromkeys(self.wire.names, b"\x00"))
            stages = {"middle": self._middle, "range": self._range, "zero": self._zero}
            for stage, do in stages.items():
                if stage not in self.progress.done:
                    do()
                    self.progress.done.append(stage)
                    _write(self.file, asdict(self.progress))
        finally:
            self.port.close()
        return self.progress

    def _middle(self) -> None:
        """Offsets that make this pose tick 2047 of every servo."""
        self._keep({OFFSET: dict.fromkeys(self.wire.names, _word(0))})
        self._keep({LOW: dict.fromkeys(self.wire.names, _word(0))})
        self._keep({HIGH: dict.fromkeys(self.wire.names, _word(TICKS - 1))})
        self.ask("move every joint to the middle of its range")
        offsets = {id: at - MIDDLE for id, at in self._positions().items()}
        for id, offset in offsets.items():
            if abs(offset) > MOST_OFFSET:
                raise DriverError(
                    f"{self.wire.names[id]} is {abs(offset)} ticks from its middle, and at most "
                    f"{MOST_OFFSET} can be kept: mount its horn anew, nearer to the middle"
                )
        self._keep({OFFSET: {id: _word(unsigned(value, 11)) for id, value in offsets.items()}})
        for motor in self.progress.motors.values():
            motor.homing_offset = offsets[motor.id]

    def _range(self) -> None:
        """The ends of every joint, moved by hand. DriverError where one moved over the seam of its
        encoder, from tick 4095 to 0: no range of ticks holds such a motion."""
        ends = {id: [at, at] for id, at in self._positions().items()}
        reached = {id: at for id, (at, _) in ends.items()}  # counted on over the seam

        def look() -> bool:
            for id, at in self._positions().items():
                reached[id] += (at - reached[id] + TICKS // 2) % TICKS - TICKS // 2
                ends[id] = [min(ends[id][0], reached[id]), max(ends[id][1], reached[id])]
            return True

        self.wait("move every joint, and the hand, to both of its ends", look)
        for name, motor in self.progress.motors.items():
            low, high = ends[motor.id]
            if high - low < LEAST_RANGE:
                raise DriverError(f"{name} was moved by {high - low} ticks only: calibrate again")
            if low < 0 or high >= TICKS or high - low == TICKS - 1:
                raise DriverError(
                    f"{name} was moved over the seam of its encoder (ticks {low} to {high}, of 0 "
                    f"to {TICKS - 1}): delete {self.file} and begin from the middle of its motion; "
                    "if that does not help, mount its horn anew"
                )
            motor.range_min = low
            motor.range_max = high
        self._keep({LOW: {id: _word(low) for id, (low, _) in ends.items()}})
        self._keep({HIGH: {id: _word(high) for id, (_, high) in ends.items()}})

    def _zero(self) -> None:
        """Ask for the pose where the kinematics' joints are at 0 rad."""
        pose = "SO-101: upper arm upright, the rest forwards"
        self.ask(f"move the arm to its kinematics' zero ({pose})")
        at = self._positions()
        self.progress.zeros = {name: at[motor.id] for name, motor in self.progress.motors.items()}

    def _positions(self) -> dict[int, int]:
        found = self.wire.get(*self.make.state)
        return {id: self.make.motion(data).position for id, data in found.items()}

    def _keep(self, registers: Mapping[int, Mapping[int, bytes]]) -> None:
        """Into lasting memory, behind its lock."""
        self._put(LOCK, dict.fromkeys(self.wire.names, b"\x00"))
        for address, data in registers.items():
            self._put(address, data)
        self._put(LOCK, dict.fromkeys(self.wire.names, b"\x01"))

    def _put(self, address: int, data: Mapping[int, bytes]) -> None:
        if silent := self.wire.put(address, data):
            name = self.wire.names[min(silent)]
            raise DriverError(f"{name} does not take what is written to it: check power and cable")


def _word(value: int) -> bytes:
    return value.to_bytes(2, "little")


def _write(path: Path, about: Any) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(about, indent=4))
    part.replace(path)
