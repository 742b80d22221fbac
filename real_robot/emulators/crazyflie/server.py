"""Emulated Crazyflie at the packet level: CRTP frames in, CRTP frames out.

A frame that is no packet, has the wrong size or holds numbers that are not finite is dropped and
counted; no received frame can stop the emulator.
"""

from __future__ import annotations

import errno
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from embodied.real_robot.emulators.crazyflie import crtp
from embodied.real_robot.emulators.crazyflie.crtp import (
    Packet,
    generic,
    legacy,
    order,
    pack,
    unpack,
)
from embodied.real_robot.emulators.crazyflie.firmware import Firmware, Measured

PROTOCOL = 12
"""Its version: from this one on the supervisor has a port of its own."""
MOST_BLOCKS, MOST_LOGGED = 16, 26
NAME = b"Bitcraze Crazyflie"


@dataclass
class Block:
    """Variables that are sent together, every `period` s (0: not now)."""

    entries: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    period: float = 0.0
    due: float = 0.0

    @property
    def size(self) -> int:
        return struct.calcsize("<" + "".join(layout for _, layout in self.entries))


class Server:
    """`hear` a frame, and every now and then what `tell` has to say. `onboard` is the hash of the
    policy in its firmware, where there is one."""

    def __init__(self, firmware: Firmware, onboard: int | None = None) -> None:
        self.firmware, self.dropped = firmware, 0
        self.parameters = parameters(onboard)
        self.blocks: dict[int, Block] = {}
        kinds = [variable.kind for variable in VARIABLES]
        self.log_toc = Toc([variable.name for variable in VARIABLES], kinds)
        kinds = [parameter.kind for parameter in self.parameters]
        self.param_toc = Toc([parameter.name for parameter in self.parameters], kinds)
        self.ports = {
            crtp.PARAM: self._param,
            crtp.COMMANDER: self._commander,
            crtp.MEMORY: self._memory,
            crtp.LOG: self._log,
            crtp.LOCALIZATION: self._localization,
            crtp.GENERIC: self._generic,
            crtp.HIGH_LEVEL: self._high_level,
            crtp.SUPERVISOR: self._supervisor,
            crtp.PLATFORM: self._platform,
            crtp.LINK: self._link,
        }

    def parameter(self, name: str) -> float:
        """Its value; KeyError."""
        return {each.name: each.value for each in self.parameters}[name]

    def hear(self, frame: bytes) -> bytes | None:
        """The frame that answers, where there is one."""
        packet = crtp.parse(frame)
        port = None if packet is None else self.ports.get(packet.port)
        if packet is None or port is None:
            self.dropped += 1
            return None
        said = port(packet)
        if said is None:
            self.dropped += 1
            return None
        return pack(packet.port, packet.channel, said) if said else None

    def tell(self, now: float) -> list[bytes]:
        """Log blocks that are due."""
        frames: list[bytes] = []
        stamp = (int(now * 1000) & 0xFFFFFF).to_bytes(3, "little")
        for number, block in self.blocks.items():
            if not block.period or now < block.due:
                continue
            block.due = max(block.due + block.period, now)
            layout = "<" + "".join(layout for _, layout in block.entries)
            values = [
                _fitting(VARIABLES[i].get(self.firmware), letter) for i, letter in block.entries
            ]
            data = bytes([number]) + stamp + struct.pack(layout, *values)
            frames.append(pack(crtp.LOG, 2, data))
        return frames

    def _link(self, packet: Packet) -> bytes | None:
        if packet.channel == 0:
            return packet.data  # an echo
        if packet.channel == 1:
            return NAME.ljust(crtp.MOST, b"\0")
        return b""  # nothing was said, or without an addressee

    def _platform(self, packet: Packet) -> bytes | None:
        ask = packet.data[:1]
        if packet.channel == 1 and ask == b"\x00":
            return bytes([0, PROTOCOL])
        if packet.channel == 1 and ask == b"\x01":
            return b"\x01emulator\0"
        if packet.channel == 0 and ask == b"\x01" and len(packet.data) == 2:
            self.firmware.arm(bool(packet.data[1]))
            return packet.data
        return None

    def _supervisor(self, packet: Packet) -> bytes | None:
        ask, firmware = packet.data[:1], self.firmware
        if packet.channel == 0 and ask == b"\x0c":
            return struct.pack("<BH", 0x8C, firmware.info)
        if packet.channel != 1:
            return None
        if ask == b"\x01" and len(packet.data) == 2:
            done = firmware.arm(bool(packet.data[1]))
            return bytes([0x81, done, firmware.armed])
        if ask == b"\x02":
            return bytes([0x82, 1, firmware.recover()])
        return self._emergency(ask)

    def _emergency(self, ask: bytes) -> bytes | None:
        if ask == b"\x03":
            self.firmware.stopping = True
        elif ask == b"\x04":
            self.firmware.feed()
        else:
            return None
        return b""

    def _commander(self, packet: Packet) -> bytes | None:
        if (setpoint := legacy(packet.data)) is None or packet.channel:
            return None
        self.firmware.follow(setpoint)
        return b""

    def _generic(self, packet: Packet) -> bytes | None:
        if packet.channel == 1 and packet.data[:1] == b"\x00":
            self.firmware.relax()
            return b""
        if packet.channel or (setpoint := generic(packet.data)) is None:
            return None
        self.firmware.follow(setpoint)
        return b""

    def _high_level(self, packet: Packet) -> bytes | None:
        if (wanted := order(packet.data)) is None:
            return None
        self.firmware.obey(wanted)
        return packet.data[:1] + b"\0\0\0"

    def _localization(self, packet: Packet) -> bytes | None:
        if packet.channel == 0:
            numbers = unpack("<3f", packet.data)
        elif packet.data[:1] == b"\x08":
            numbers = unpack("<7f", packet.data[1:])
        elif packet.data[:1] in (b"\x03", b"\x04"):  # as it was before the supervisor's port
            return self._emergency(packet.data[:1])
        else:
            return None
        if numbers is None:
            return None
        self.firmware.body.hint((numbers[0], numbers[1], numbers[2]))
        return b""

    def _memory(self, packet: Packet) -> bytes | None:
        """There is none."""
        if packet.channel == 0 and packet.data == b"\x01":
            return b"\x01\x00"
        if packet.channel in (1, 2) and len(packet.data) >= 5:
            return packet.data[:5] + bytes([errno.ENOENT])
        return None

    def _param(self, packet: Packet) -> bytes | None:
        if packet.channel == 0:
            return self.param_toc.answer(packet.data)
        number = int.from_bytes(packet.data[:2], "little")
        if len(packet.data) < 2 or number >= len(self.parameters):
            return None
        about = self.parameters[number]
        if packet.channel == 1:
            return packet.data[:2] + b"\0" + about.packed()
        if packet.channel != 2 or about.kind & READ_ONLY:
            return None
        values = unpack(about.layout, packet.data[2:])
        if values is None:
            return None
        about.value = values[0]
        if about.name == "stabilizer.stop" and values[0]:
            self.firmware.stopping = True
        if about.name == "policy.enable":
            self.firmware.body.choose(bool(values[0]))
        return packet.data

    def _log(self, packet: Packet) -> bytes | None:
        if packet.channel == 0:
            return self.log_toc.answer(packet.data)
        if packet.channel != 1 or not packet.data:
            return None
        ask, number = packet.data[0], packet.data[1] if len(packet.data) > 1 else 0
        return bytes([ask, number, self._settings(ask, number, packet.data[2:])])

    def _settings(self, ask: int, number: int, data: bytes) -> int:
        """0, or why not."""
        block = self.blocks.get(number)
        if ask == 5:
            self.blocks.clear()
            return 0
        if ask == 6 and block is not None:
            return errno.EEXIST
        if ask == 6 and len(self.blocks) >= MOST_BLOCKS:
            return errno.ENOMEM
        if ask in (6, 7):
            return self._add(number, Block() if ask == 6 else block, data)
        if ask not in (2, 3, 4, 8):
            return errno.ENOEXEC
        if block is None:
            return errno.ENOENT
        if ask == 2:
            del self.blocks[number]
        else:
            units = 0.001 if ask == 8 else 0.01
            block.period = units * int.from_bytes(data[:2], "little") if ask != 4 else 0.0
            block.due = 0.0
        return 0

    def _add(self, number: int, block: Block | None, data: bytes) -> int:
        if block is None or len(data) % 3:
            return errno.ENOENT
        made = Block(list(block.entries))
        for kind, index in struct.iter_unpack("<BH", data):
            if kind & 15 not in LOG_LAYOUTS or index >= len(VARIABLES):
                return errno.ENOENT
            made.entries.append((index, LOG_LAYOUTS[kind & 15]))
        if made.size > MOST_LOGGED:
            return errno.E2BIG
        self.blocks[number] = made
        return 0


def _fitting(value: float, layout: str) -> float:
    """`value` as that layout can hold it."""
    if layout in "fe":
        return max(-6e4, min(6e4, value)) if layout == "e" else value
    bits = 8 * struct.calcsize("<" + layout) - layout.islower()
    low = -(1 << bits) if layout.islower() else 0
    return max(low, min((1 << bits) - 1, int(value)))


LOG_LAYOUTS = {1: "B", 2: "H", 3: "I", 4: "b", 5: "h", 6: "i", 7: "f", 8: "e"}
U8, U16, FLOAT = 1, 2, 7
PARAM_LAYOUTS = {8: "B", 9: "H", 10: "I", 6: "f"}
READ_ONLY = 0x40
Get = Callable[[Firmware], float]
DEGREES = 180 / math.pi


@dataclass(frozen=True)
class Variable:
    """Something that can be logged."""

    name: str
    kind: int
    get: Get


def _each(
    pattern: str,
    names: Sequence[str],
    kind: int,
    get: Callable[[Measured], Sequence[float]],
    scale: float = 1.0,
) -> list[Variable]:
    """One variable for each part of a vector."""

    def part(i: int) -> Get:
        return lambda firmware: scale * get(firmware.measured)[i]

    return [Variable(pattern.format(name), kind, part(i)) for i, name in enumerate(names)]


VARIABLES = (
    *_each("stateEstimate.{}", "xyz", FLOAT, lambda m: m.place),
    *_each("stateEstimate.v{}", "xyz", FLOAT, lambda m: m.velocity),
    *_each("stateEstimate.{}", ("roll", "pitch", "yaw"), FLOAT, lambda m: m.angles, DEGREES),
    *_each("gyro.{}", "xyz", FLOAT, lambda m: m.rates, DEGREES),
    *_each("motor.m{}", "1234", U16, lambda m: m.motors, 65535),
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
        return struct.pack(self.layout, int(self.value) if self.layout != "<f" else self.value)


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
