"""The Crazyflie's tables of contents: log variables and parameters.

A subset of the firmware's own names and types; a real one has hundreds more, fetched the same
way.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embodied.real_robot.emulators.crazyflie.firmware import Firmware

LOG_LAYOUTS = {1: "B", 2: "H", 3: "I", 4: "b", 5: "h", 6: "i", 7: "f", 8: "e"}
U8, U16, FLOAT = 1, 2, 7
PARAM_LAYOUTS = {8: "B", 9: "H", 10: "I", 6: "f"}
READ_ONLY = 0x40
Get = Callable[[Firmware], float]


@dataclass(frozen=True)
class Variable:
    """Something that can be logged."""

    name: str
    kind: int
    get: Get


def _place(i: int) -> Get:
    return lambda f: f.measured.place[i]


def _velocity(i: int) -> Get:
    return lambda f: f.measured.velocity[i]


def _angle(i: int) -> Get:
    return lambda f: math.degrees(f.measured.angles[i])


def _rate(i: int) -> Get:
    return lambda f: math.degrees(f.measured.rates[i])


def _motor(i: int) -> Get:
    return lambda f: 65535 * f.measured.motors[i]


VARIABLES = (
    *(Variable(f"stateEstimate.{n}", FLOAT, _place(i)) for i, n in enumerate("xyz")),
    *(Variable(f"stateEstimate.v{n}", FLOAT, _velocity(i)) for i, n in enumerate("xyz")),
    *(
        Variable(f"stateEstimate.{n}", FLOAT, _angle(i))
        for i, n in enumerate(("roll", "pitch", "yaw"))
    ),
    *(Variable(f"gyro.{n}", FLOAT, _rate(i)) for i, n in enumerate("xyz")),
    *(Variable(f"motor.m{i + 1}", U16, _motor(i)) for i in range(4)),
    *(Variable(f"kalman.varP{n}", FLOAT, lambda f: f.measured.variance) for n in "XYZ"),
    Variable("pm.vbat", FLOAT, lambda f: f.voltage),
    Variable("pm.state", U8, lambda f: 3 if f.voltage < 3.2 else 0),
    Variable("supervisor.info", U16, lambda f: f.info),
    Variable("sys.isFlying", U8, lambda f: f.flying),
)


@dataclass
class Parameter:
    """Something that can be set, or only read."""

    name: str
    kind: int
    value: float

    @property
    def layout(self) -> str:
        return "<" + PARAM_LAYOUTS[self.kind & 0x0F]

    def packed(self) -> bytes:
        whole = self.layout != "<f"
        return struct.pack(self.layout, int(self.value) if whole else self.value)


def parameters(onboard: int | None = None) -> list[Parameter]:
    """As it comes up, with a policy of that hash `onboard`."""
    app = [Parameter("policy.enable", 8, 0), Parameter("policy.hash", 10 | READ_ONLY, onboard or 0)]
    return [
        *([] if onboard is None else app),
        Parameter("stabilizer.estimator", 8, 1),
        Parameter("stabilizer.controller", 8, 1),
        Parameter("stabilizer.stop", 8, 0),
        Parameter("kalman.resetEstimation", 8, 0),
        Parameter("commander.enHighLevel", 8, 0),
        Parameter("locSrv.extPosStdDev", 6, 0.01),
        Parameter("posCtlPid.xVelMax", 6, 1.0),
        Parameter("posCtlPid.yVelMax", 6, 1.0),
        Parameter("posCtlPid.zVelMax", 6, 1.0),
        Parameter("firmware.revision0", 10 | READ_ONLY, 0),
        Parameter("system.selftestPassed", 8 | READ_ONLY, 1),
    ]


class Toc:
    """Answers on channel 0 of a port: how many there are, and what each is called."""

    def __init__(self, names: Sequence[str], kinds: Sequence[int]) -> None:
        self.items = [
            bytes([kind]) + name.replace(".", "\0").encode() + b"\0"
            for name, kind in zip(names, kinds, strict=True)
        ]
        self.crc = zlib.crc32(b"".join(self.items))

    def answer(self, data: bytes) -> bytes | None:
        """The payload that answers `data`."""
        if data[:1] == b"\x03":
            return struct.pack("<BHIBB", 3, len(self.items), self.crc, 16, 128)
        if data[:1] == b"\x02" and len(data) == 3:
            number = int.from_bytes(data[1:], "little")
            return data + self.items[number] if number < len(self.items) else b"\x02"
        return None
