"""Servo registers: addresses and units of two makes of servo.

From the control tables of the Dynamixel X series and of Feetech's STS3215, little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from embodied.real_robot.drivers.servos.codecs import DYNAMIXEL, FEETECH, Codec, signed, unsigned

TICKS = 4096  # a turn


class Motion(NamedTuple):
    """Measured at the servo's own shaft: ticks, rad/s, and current in units of the register."""

    position: int
    velocity: float
    current: int


Registers = dict[int, bytes]
"""Bytes to write, by register."""


@dataclass(frozen=True)
class Make:
    """One make of servo. `state` is (address, bytes) of the block that `motion` understands; `mode`
    the register that holds one of `modes` where a goal is a position; `watchdog` counts `beat` s,
    reads 255 after a trip and is 0 where it is off; `faults` names the bits of register `errors`,
    or of a reply's error byte where there is none; `ampere`: A of one unit of current. `force` is
    what to write for a share of a servo's torque (0 to 1), by register: first what survives
    switching off (behind `lock`, if there is one), then what does not; `limits` are the bits of
    `faults` that such a servo limits by itself."""

    codec: Codec
    state: tuple[int, int]
    motion: Callable[[bytes], Motion]
    goal: int
    encode: Callable[[int], bytes]
    torque: int
    mode: int
    modes: tuple[int, ...]
    ampere: float
    faults: Mapping[int, str]
    errors: int | None
    watchdog: int | None
    force: Callable[[float], tuple[Registers, Registers]]
    lock: int | None = None
    limits: int = 0
    beat: float = 0.02


def _dynamixel(data: bytes) -> Motion:
    """Motion in registers from 126: current (2), velocity (4, 0.229 rpm), position (4)."""
    current, velocity, position = (
        int.from_bytes(part, "little", signed=True) for part in (data[:2], data[2:6], data[6:10])
    )
    return Motion(position, velocity * 0.229 * math.tau / 60, current)


def _feetech(data: bytes) -> Motion:
    """Motion in registers from 56: position (2), speed (2, ticks/s), ..., at 69 current (2)."""
    position, speed, current = (
        signed(int.from_bytes(data[at : at + 2], "little"), 15) for at in (0, 2, 13)
    )
    return Motion(position, speed * math.tau / TICKS, current)


def _feetech_force(share: float) -> tuple[Registers, Registers]:
    """Max_Torque_Limit (0.1%), Protection_Current (6.5 mA) and Overload_Torque (%: above it for
    some time, the servo yields to its Protective_Torque); Torque_Limit is the first in memory."""
    torque = round(1000 * share).to_bytes(2, "little")
    current = round(500 * share).to_bytes(2, "little")
    return {16: torque, 28: current, 36: bytes((25,))}, {48: torque}


MAKES: Mapping[str, Make] = {
    "dynamixel": Make(
        codec=DYNAMIXEL,
        state=(126, 10),
        motion=_dynamixel,
        goal=116,
        encode=lambda ticks: ticks.to_bytes(4, "little", signed=True),
        torque=64,
        mode=11,
        modes=(3, 4, 5),
        ampere=2.69e-3,
        faults={
            0: "input voltage",
            2: "overheating",
            3: "encoder",
            4: "electrical shock",
            5: "overload",
        },
        errors=70,
        watchdog=98,
        # Goal PWM: the motor's voltage, which is a torque where it stands still.
        force=lambda share: ({}, {100: round(885 * share).to_bytes(2, "little")}),
    ),
    "feetech": Make(
        codec=FEETECH,
        state=(56, 15),
        motion=_feetech,
        goal=42,
        encode=lambda ticks: unsigned(ticks, 15).to_bytes(2, "little"),
        torque=40,
        mode=33,
        modes=(0,),
        ampere=6.5e-3,
        faults={0: "input voltage", 1: "angle", 2: "overheating", 3: "current", 5: "overload"},
        errors=None,
        watchdog=None,
        force=_feetech_force,
        lock=55,
        limits=1 << 5,
    ),
}
