"""Emulated Crazyflie: its firmware (supervisor, commander, planner, watchdogs), and its packets
(CRTP): frames in, frames out.

    not ready -> ready -> armed -> flying <-> level (0.5 s without a set-point)
                                   flying, level -> locked (2 s without, emergency stop, tumbled)

Times and transitions are those of the firmware's supervisor (2025). Locked means motors off until
it is switched off and on. The physics are behind `Body`.

    header = port << 4 | 0b11 << 2 | channel, then up to 30 bytes

There is no checksum: the radio has one of its own, and so has UDP. What our driver has cflib send
is understood. A frame that is no packet, has the wrong size or holds numbers that are not finite is
dropped and counted; no received frame can stop the emulator.
"""

from __future__ import annotations

import errno
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

LEVEL_AFTER, LOCK_AFTER = 0.5, 2.0  # s without a set-point
STILL = 2.0  # s of idle motors until it counts as landed
TUMBLED = 1.0  # s
NONE, ONBOARD, RADIO = 0, 1, 2  # who may command
Vector = tuple[float, float, float]
ZERO: Vector = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Setpoint:
    """`across`: what is followed in the plane: `place` (m; `velocity` in m/s is added to it),
    `velocity` along the drone's own axes, or nothing (level). The height is that of `place`, unless
    it is off. `yaw` in rad, or rad/s where it `spins`."""

    across: Literal["off", "place", "velocity", "level"] = "off"
    place: Vector = ZERO
    velocity: Vector = ZERO
    yaw: float = 0.0
    spins: bool = False


OFF = Setpoint()  # the motors stand still


@dataclass(frozen=True, slots=True)
class Landing:
    """To the planner on board: straight to `height` (m) in `seconds`, and stop there."""

    seconds: float
    height: float


class State(IntEnum):
    """Of the supervisor."""

    NOT_READY = 0
    READY = 1
    ARMED = 2
    FLYING = 3
    LEVEL = 4
    LOCKED = 5


@dataclass(slots=True)
class Measured:
    """What the drone believes of itself: `place` (m), `velocity` (m/s), `angles` (roll, pitch, yaw;
    rad), `rates` (rad/s, its own axes), `variance` of its place (m^2), `motors` in [0, 1]."""

    place: Vector = ZERO
    velocity: Vector = ZERO
    angles: Vector = ZERO
    rates: Vector = ZERO
    variance: float = 0.0
    motors: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


class Body(Protocol):
    """A drone that flies."""

    def measure(self) -> Measured: ...

    def fly(self, setpoint: Setpoint, dt: float) -> None:
        """Follow for `dt` s."""
        ...

    def hint(self, place: Vector) -> None:
        """An outside tracker says where it is (m)."""
        ...

    def choose(self, learned: bool) -> None:
        """A policy on board flies, or its own controller does."""
        ...

    def upright(self) -> bool:
        """Whether it is not lying on its side."""
        ...


class Firmware:
    """`tick(now)` at 100 Hz; what comes over the radio calls the other methods. `fit`: whether it
    passes its checks before a flight; `stopping`: an emergency stop was asked for; `voltage`: of
    its battery."""

    def __init__(self, body: Body, now: float, voltage: float = 4.0) -> None:
        self.body = body
        self.now = now
        self.voltage = voltage
        self.state = State.NOT_READY
        self.armed = False
        self.fit = True
        self.setpoint = OFF
        self.stamp = now
        self.owner = NONE
        self.landing: Landing | None = None
        self.streamed = False  # whether a set-point by radio has put the planner out of action
        self.ordered = now
        self.stopping = False
        self.thrust_at = -1e9
        self.upright_at = now
        self.measured = body.measure()
        self.start = self.measured

    def tick(self, now: float) -> None:
        """The time since the last tick goes by."""
        dt = now - self.now
        self.now = now
        self.measured = self.body.measure()
        if not self.streamed:
            self._plan()
        self._supervise()
        wanted = self.setpoint if self.can_fly else OFF
        if self.state == State.LEVEL and wanted.across != "off":
            wanted = replace(wanted, across="level", spins=True, yaw=0.0)
        if max(self.measured.motors) > 0.1 and wanted != OFF:
            self.thrust_at = now
        self.body.fly(wanted, dt)

    def follow(self, setpoint: Setpoint) -> None:
        """A set-point by radio: the planner is out of action from here on."""
        self._take(setpoint, RADIO)
        self.landing = None
        self.streamed = True

    def relax(self) -> None:
        """The next commander may be any."""
        self.owner = NONE

    def land(self, landing: Landing) -> None:
        """To the planner on board, from where it is now."""
        self.start = self.measured
        self.landing = landing
        self.streamed = False
        self.ordered = self.now

    def arm(self, wanted: bool) -> bool:
        """Whether that could be done."""
        if wanted and not self.armed and self.state != State.READY:
            return False
        self.armed = wanted
        return True

    @property
    def can_fly(self) -> bool:
        """Whether motors may run."""
        return self.state in (State.ARMED, State.FLYING, State.LEVEL)

    @property
    def flying(self) -> bool:
        return self.state in (State.FLYING, State.LEVEL)

    @property
    def info(self) -> int:
        """The supervisor's bits."""
        landing = self.landing
        bits = (
            self.state == State.READY,
            self.armed,
            False,  # it arms itself
            self.can_fly,
            self.flying,
            self._tumbled(),
            self.state == State.LOCKED,
            False,  # crashed
            landing is not None,
            landing is not None and self.now >= self.ordered + landing.seconds,
            self.streamed,
        )
        return sum(bit << i for i, bit in enumerate(bits))

    def _take(self, setpoint: Setpoint, owner: int) -> None:
        if owner >= self.owner:
            self.setpoint = setpoint
            self.stamp = self.now
            self.owner = owner

    def _plan(self) -> None:
        """The planner's set-point, of a polynomial of seventh degree that begins and ends at
        rest."""
        if self.landing is None:
            self._take(OFF, ONBOARD)
            return
        seconds = self.landing.seconds
        s = min(1.0, (self.now - self.ordered) / seconds)
        if s >= 1:
            self.landing = None
            return
        share = s**4 * (35 - 84 * s + 70 * s * s - 20 * s**3)
        rate = 140 * s**3 * (1 - s) ** 3 / seconds
        x, y, z = self.start.place
        way = self.landing.height - z
        place = (x, y, z + share * way)
        velocity = (0.0, 0.0, rate * way)
        self._take(Setpoint("place", place, velocity, self.start.angles[2]), ONBOARD)

    def _tumbled(self) -> bool:
        return self.now - self.upright_at > TUMBLED

    def _supervise(self) -> None:
        if self.body.upright():
            self.upright_at = self.now
        age = self.now - self.stamp
        busy = self.now - self.thrust_at < STILL
        passes = self.fit and not self._tumbled()
        lost = self.flying and (age > LOCK_AFTER or self._tumbled() or not self.armed)
        if self.stopping or lost:
            self._enter(State.LOCKED)
        elif self.flying and not busy:
            self._enter(State.NOT_READY)
        elif self.flying:
            self.state = State.LEVEL if age > LEVEL_AFTER else State.FLYING
        elif self.state == State.NOT_READY and passes:
            self._enter(State.READY)
        elif self.state == State.READY and not passes:
            self._enter(State.NOT_READY)
        elif self.state == State.READY and self.armed:
            self.state = State.ARMED
        elif self.state == State.ARMED and not self.armed:
            self._enter(State.NOT_READY)
        elif self.state == State.ARMED and busy:
            self.state = State.FLYING

    def _enter(self, state: State) -> None:
        if self.state == State.LOCKED:
            return  # for good
        self.state = state
        self.armed = False


PARAM, COMMANDER, MEMORY, LOG, LOCALIZATION = 2, 3, 4, 5, 6
GENERIC, HIGH_LEVEL, SUPERVISOR, PLATFORM, LINK = 7, 8, 9, 13, 15
MOST = 30  # bytes of a payload
PROTOCOL = 12  # its version: from this one on the supervisor has a port of its own
MOST_BLOCKS, MOST_LOGGED = 16, 26
NAME = b"Bitcraze Crazyflie"
DEGREE = math.pi / 180


class Packet(NamedTuple):
    """A frame's parts."""

    port: int
    channel: int
    data: bytes


def pack(port: int, channel: int, data: bytes = b"") -> bytes:
    """A frame; ValueError where the parts do not fit one."""
    if not (0 <= port <= 15 and 0 <= channel <= 3 and len(data) <= MOST):
        raise ValueError(f"no CRTP packet: port {port}, channel {channel}, {len(data)} bytes")
    return bytes([port << 4 | 0b11 << 2 | channel]) + data


def parse(frame: bytes) -> Packet | None:
    """The parts of a frame, None where it is none. The two bits in the middle are not looked at:
    radios use them."""
    if not 1 <= len(frame) <= MOST + 1:
        return None
    return Packet(frame[0] >> 4, frame[0] & 3, frame[1:])


def unpack(layout: str, data: bytes) -> tuple[float, ...] | None:
    """The numbers of `data`, None where its size is another one or one of them is not finite."""
    if struct.calcsize(layout) != len(data):
        return None
    numbers = struct.unpack(layout, data)
    return numbers if all(abs(each) < 1e10 for each in numbers) else None


def setpoint_of(data: bytes) -> Setpoint | None:
    """The set-point of a packet of port 7, channel 0; None where it is none."""
    kind, body = (data[0], data[1:]) if data else (-1, b"")
    if kind == 0:
        return OFF
    if kind == 6 and (numbers := unpack("<9hI3h", body)) is not None:
        x, y, z, vx, vy, vz = (n / 1000 for n in numbers[:6])
        return Setpoint("place", (x, y, z), (vx, vy, vz), heading(int(numbers[9])))
    if kind == 7 and (numbers := unpack("<4f", body)) is not None:
        x, y, z, yaw = numbers
        return Setpoint("place", (x, y, z), yaw=yaw * DEGREE)
    if kind == 10 and (numbers := unpack("<4f", body)) is not None:
        vx, vy, rate, height = numbers
        return Setpoint("velocity", (0.0, 0.0, height), (vx, vy, 0.0), rate * DEGREE, spins=True)
    return None


def heading(packed: int) -> float:
    """The yaw (rad) of a quaternion in 32 bits: the index of its largest part, then for each of the
    others (x, y, z, w order) a sign and 9 bits of its size, up to 1 / sqrt 2."""
    largest, parts, rest = packed >> 30 & 3, [0.0] * 4, packed
    for i in range(3, -1, -1):
        if i != largest:
            size = (rest & 511) / 511 / math.sqrt(2)
            parts[i] = -size if rest >> 9 & 1 else size
            rest >>= 10
    parts[largest] = math.sqrt(max(0.0, 1 - sum(part * part for part in parts)))
    x, y, z, w = parts
    return math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


@dataclass
class Block:
    """Variables (index, layout) that are sent together, every `period` s (0: not now)."""

    entries: list[tuple[int, str]]
    period: float = 0.0
    due: float = 0.0

    @property
    def layout(self) -> str:
        return "<" + "".join(layout for _, layout in self.entries)


class Server:
    """`hear` a frame, and every now and then what `tell` has to say. `onboard` is the hash of the
    policy in its firmware, where there is one."""

    def __init__(self, firmware: Firmware, onboard: int | None = None) -> None:
        self.firmware = firmware
        self.dropped = 0
        self.parameters = parameters(onboard)
        self.blocks: dict[int, Block] = {}
        self.log_toc = Toc([(each.name, each.kind) for each in VARIABLES])
        self.param_toc = Toc([(each.name, each.kind) for each in self.parameters])
        self.ports = {
            PARAM: self._param,
            COMMANDER: self._commander,
            MEMORY: self._memory,
            LOG: self._log,
            LOCALIZATION: self._localization,
            GENERIC: self._generic,
            HIGH_LEVEL: self._high_level,
            SUPERVISOR: self._supervisor,
            PLATFORM: self._platform,
            LINK: self._link,
        }

    def parameter(self, name: str) -> float:
        """Its value; KeyError."""
        return {each.name: each.value for each in self.parameters}[name]

    def hear(self, frame: bytes) -> bytes | None:
        """The frame that answers, where there is one."""
        packet = parse(frame)
        port = None if packet is None else self.ports.get(packet.port)
        said = None if packet is None or port is None else port(packet)
        if packet is None or said is None:
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
            values = [
                _fitting(VARIABLES[i].get(self.firmware), letter) for i, letter in block.entries
            ]
            data = bytes([number]) + stamp + struct.pack(block.layout, *values)
            frames.append(pack(LOG, 2, data))
        return frames

    def _link(self, packet: Packet) -> bytes | None:
        if packet.channel == 0:
            return packet.data  # an echo
        return NAME.ljust(MOST, b"\0") if packet.channel == 1 else b""

    def _platform(self, packet: Packet) -> bytes | None:
        asked = packet.channel == 1 and packet.data[:1] == b"\x00"
        return bytes([0, PROTOCOL]) if asked else None

    def _supervisor(self, packet: Packet) -> bytes | None:
        ask, firmware = packet.data[:1], self.firmware
        if packet.channel != 1:
            return None
        if ask == b"\x01" and len(packet.data) == 2:
            done = firmware.arm(bool(packet.data[1]))
            return bytes([0x81, done, firmware.armed])
        if ask == b"\x03":
            firmware.stopping = True
            return b""
        return None

    def _commander(self, packet: Packet) -> bytes | None:
        """The oldest set-point, with which cflib takes leave: a thrust of zero is off."""
        numbers = unpack("<3fH", packet.data)
        if numbers is None or numbers[3] or packet.channel:
            return None
        self.firmware.follow(OFF)
        return b""

    def _generic(self, packet: Packet) -> bytes | None:
        if packet.channel == 1 and packet.data[:1] == b"\x00":
            self.firmware.relax()
            return b""
        if packet.channel or (setpoint := setpoint_of(packet.data)) is None:
            return None
        self.firmware.follow(setpoint)
        return b""

    def _high_level(self, packet: Packet) -> bytes | None:
        """Only landing (8), with the yaw that it has."""
        numbers = unpack("<BBff?f", packet.data)
        if numbers is None or numbers[0] != 8 or not numbers[4]:
            return None
        self.firmware.land(Landing(min(max(numbers[5], 0.1), 60.0), numbers[2]))
        return packet.data[:1] + b"\0\0\0"

    def _localization(self, packet: Packet) -> bytes | None:
        numbers = unpack("<3f", packet.data)
        if packet.channel or numbers is None:
            return None
        self.firmware.body.hint((numbers[0], numbers[1], numbers[2]))
        return b""

    def _memory(self, packet: Packet) -> bytes | None:
        """There is none."""
        return b"\x01\x00" if packet.channel == 0 and packet.data == b"\x01" else None

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
        """Forget all blocks (5), make one (6), start one (3): 0, or why not."""
        if ask == 5:
            self.blocks.clear()
            return 0
        if ask == 6:
            return self._add(number, data)
        if ask != 3:
            return errno.ENOEXEC
        if number not in self.blocks:
            return errno.ENOENT
        self.blocks[number].period = 0.01 * int.from_bytes(data[:2], "little")
        self.blocks[number].due = 0.0
        return 0

    def _add(self, number: int, data: bytes) -> int:
        if number in self.blocks or len(self.blocks) >= MOST_BLOCKS or len(data) % 3:
            return errno.ENOENT
        made = Block([])
        for kind, index in struct.iter_unpack("<BH", data):
            if kind & 15 not in LOG_LAYOUTS or index >= len(VARIABLES):
                return errno.ENOENT
            made.entries.append((index, LOG_LAYOUTS[kind & 15]))
        if struct.calcsize(made.layout) > MOST_LOGGED:
            return errno.E2BIG
        self.blocks[number] = made
        return 0


def _fitting(value: float, layout: str) -> float:
    """`value` as that layout can hold it."""
    if layout == "H":
        return max(0, min(65535, int(value)))
    return max(-6e4, min(6e4, value)) if layout == "e" else value


LOG_LAYOUTS = {2: "H", 7: "f", 8: "e"}
U16, FLOAT = 2, 7
PARAM_LAYOUTS = {8: "B", 10: "I", 6: "f"}
READ_ONLY = 0x40


@dataclass(frozen=True)
class Variable:
    """Something that can be logged."""

    name: str
    kind: int
    get: Callable[[Firmware], float]


def _each(
    pattern: str,
    names: Sequence[str],
    get: Callable[[Measured], Sequence[float]],
    unit: float = 1.0,
) -> list[Variable]:
    """One variable for each part of a vector."""

    def part(i: int) -> Callable[[Firmware], float]:
        return lambda firmware: get(firmware.measured)[i] / unit

    return [Variable(pattern.format(name), FLOAT, part(i)) for i, name in enumerate(names)]


VARIABLES = (
    *_each("stateEstimate.{}", "xyz", lambda m: m.place),
    *_each("stateEstimate.v{}", "xyz", lambda m: m.velocity),
    *_each("stateEstimate.{}", ("roll", "pitch", "yaw"), lambda m: m.angles, DEGREE),
    *_each("gyro.{}", "xyz", lambda m: m.rates, DEGREE),
    *_each("kalman.varP{}", "XYZ", lambda m: [m.variance] * 3),
    Variable("pm.vbat", FLOAT, lambda f: f.voltage),
    Variable("supervisor.info", U16, lambda f: f.info),
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
        Parameter("kalman.resetEstimation", 8, 0),
        Parameter("commander.enHighLevel", 8, 0),
        *(Parameter(f"posCtlPid.{axis}VelMax", 6, 1.0) for axis in "xyz"),
    ]


class Toc:
    """Answers on channel 0 of a port: how many there are, and what each (name, kind) is called."""

    def __init__(self, about: Sequence[tuple[str, int]]) -> None:
        self.items = [
            bytes([kind]) + name.replace(".", "\0").encode() + b"\0" for name, kind in about
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
