"""Driver of a Universal Robots arm over RTDE; our program on the controller runs servoj.

    here   target q, heartbeat  ->  input registers 24...   ->  program: servoj(q) at every tick
           measured q, dq, force <-  output recipe, 125 or 500 Hz

The program stops the arm by itself (stopj) when the heartbeat stands still: that is its watchdog.
Where the safety chain gives up, it triggers the controller's protective stop. A protective stop is
reported in one line and unlocked only by an operator's reset.

RTDE, protocol version 2:

    size (2, of all) | type (1) | payload          numbers are big-endian

There is no checksum and no synchronisation mark: TCP carries the stream, and an impossible packet
ends the connection.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from embodied.core.bounds import Bound, NonNegative
from embodied.core.build import ConfigError
from embodied.real_robot.drivers.driver import Driver, Wait
from embodied.real_robot.kernel.arm_state import ArmState, Floats, Limits
from embodied.real_robot.kernel.driver import DriverError, StopCategory

RTDE = 30004  # port
SCRIPT = 30002  # port
DASHBOARD = 29999  # port
SEEN = (
    *("timestamp", "actual_q", "actual_qd", "actual_TCP_force", "actual_current"),
    *("robot_mode", "safety_status_bits", "runtime_state"),
)
SENT = (
    *(f"input_double_register_{i}" for i in range(24, 30)),
    "input_int_register_24",
    "input_int_register_25",
)
RUNNING, PLAYING = 7, 2
FOLLOW, FREE, PROTECT = range(3)  # what the program does, in integer register 25
STOPS = {  # bits of safety_status_bits that let nothing move; the last comes with any of them
    2: "a protective stop: clear the way, then reset",
    3: "recovery mode, outside of its safety limits: move it back with its pendant, then reset",
    4: "a safeguard stop: close the guard, then reset",
    5: "the system's emergency stop: release it, switch on, then reset",
    6: "the robot's emergency stop: release it, switch on, then reset",
    7: "an emergency stop: release it, switch on, then reset",
    8: "a safety violation: see its pendant, then reset",
    9: "a safety fault: see its pendant, restart the safety system",
    10: "a stop by its safety system: see its pendant, then reset",
}
WIDEST = 2 * math.pi
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")


@dataclass(frozen=True)
class Config:
    """Settings of a UR. After `watchdog` s without a command the program on the arm stops it."""

    host: str  # address of the arm
    frequency: Annotated[float, Bound(1.0, 1000.0)] = 500.0  # Hz: 500 of an e-Series, 125 of a CB3
    lookahead: Annotated[float, Bound(0.03, 0.2)] = 0.1  # servoj's, s
    gain: Annotated[float, Bound(100.0, 2000.0)] = 300.0  # servoj's
    watchdog: Annotated[float, Bound(above=0.0, high=10.0)] = 0.1  # s; two periods or more
    brake: Annotated[float, Bound(above=0.0, high=100.0)] = 4.0  # to stop, rad/s^2
    silence: Wait = 0.1  # s without news after which the arm is lost
    patience: Wait = 10.0  # s for what is asked before anything moves
    joints: tuple[str, ...] = JOINTS  # names of the six joints
    torque: tuple[NonNegative, ...] = (0.0,) * 6  # N m per A of each joint; 0: not measured

    def __post_init__(self) -> None:
        if self.watchdog * self.frequency < 2:
            raise ConfigError("watchdog should be two ticks or more")
        if len(self.joints) != 6 or len(self.torque) != 6:
            raise ConfigError("a UR has 6 joints: joints and torque need 6 elements each")


def program(config: Config) -> str:
    """The program that runs on the arm. Registers 24 to 29 are the target, integer 24 the beat
    (0: nothing has been said yet, below 0: leave), integer 25 is 1 for freedrive, 2 for a
    protective stop. What an earlier session left in them is not followed: only a beat that changes
    is."""
    dt, most = 1 / config.frequency, round(config.watchdog * config.frequency)
    registers = ", ".join(f"read_input_float_register({i})" for i in range(24, 30))
    return f"""def follow():
  beat = read_input_integer_register(24)
  still = 0
  begun = False
  free = False
  going = True
  while going:
    said = read_input_integer_register(24)
    if said == beat:
      still = still + 1
    else:
      still = 0
      beat = said
      begun = begun or beat > 0
    end
    if begun and (beat < 0 or still > {most}):
      going = False
    elif begun and read_input_integer_register(25) == {PROTECT}:
      protective_stop()
      going = False
    elif begun and read_input_integer_register(25) == {FREE}:
      if not free:
        stopj({config.brake:g})
        freedrive_mode()
        free = True
      end
      sync()
    elif begun and free:
      end_freedrive_mode()
      free = False
    elif begun:
      servoj([{registers}], t={dt:g}, lookahead_time={config.lookahead:g}, gain={config.gain:g})
    else:
      sync()
    end
  end
  if free:
    end_freedrive_mode()
  end
  stopj({config.brake:g})
end
"""


VERSION, TEXT, OUTPUTS, INPUTS, START, DATA = b"VMOISU"
"""Types of packets."""
KNOWN = b"VvMOISPU"
LONGEST = 4096  # bytes of one packet
HEAD = struct.Struct(">HB")
FORMATS = {"DOUBLE": "d", "UINT32": "I", "INT32": "i", "VECTOR6D": "6d"}


class RtdeError(ValueError):
    """Bytes that are no packet, or not the one that was agreed on."""


class Packet(NamedTuple):
    """A whole packet."""

    type: int
    payload: bytes


def pack_packet(type: int, payload: bytes = b"") -> bytes:
    """The bytes of a packet."""
    return HEAD.pack(HEAD.size + len(payload), type) + payload


def take_packet(buffer: bytearray) -> Packet | None:
    """The packet at the front of `buffer`, taken out of it; None while it is not whole."""
    if len(buffer) < HEAD.size:
        return None
    size, type = HEAD.unpack_from(buffer)
    if not HEAD.size <= size <= LONGEST or type not in KNOWN:
        raise RtdeError(f"a packet of type {type} and {size} bytes cannot be")
    if len(buffer) < size:
        return None
    payload = bytes(buffer[HEAD.size : size])
    del buffer[:size]
    return Packet(type, payload)


class Recipe:
    """The fields of a data packet, in their order, as both sides have agreed."""

    def __init__(self, id: int, names: Sequence[str], types: Sequence[str]) -> None:
        if len(names) != len(types):
            raise RtdeError(f"{len(names)} fields were asked for, {len(types)} answered")
        for name, type in zip(names, types, strict=True):
            if type not in FORMATS:
                raise RtdeError(f"field {name} is {type}")
        self.id = id
        self.names = tuple(names)
        self._vectors = [type == "VECTOR6D" for type in types]
        self._all = struct.Struct(">" + "".join(FORMATS[type] for type in types))

    @classmethod
    def of(cls, answer: bytes, names: Sequence[str]) -> Recipe:
        """The recipe that the `answer` to a request to set one up describes."""
        if not answer:
            raise RtdeError("an answer without a recipe")
        types = answer[1:].decode("ascii", errors="replace").split(",")
        return cls(answer[0], names, types)

    def pack(self, values: Sequence[Any]) -> bytes:
        """A data packet of one value (or a sequence, for a vector) a field."""
        flat: list[Any] = []
        for vector, value in zip(self._vectors, values, strict=True):
            flat += value if vector else [value]
        return pack_packet(DATA, bytes((self.id,)) + self._all.pack(*flat))

    def unpack(self, payload: bytes) -> dict[str, Any]:
        """Field by field; vectors are lists. RtdeError for another recipe's, or a wrong length."""
        if len(payload) != 1 + self._all.size or payload[0] != self.id:
            raise RtdeError(f"a data packet of {len(payload)} bytes is not recipe {self.id}")
        numbers = list(self._all.unpack(payload[1:]))
        found: dict[str, Any] = {}
        for name, vector in zip(self.names, self._vectors, strict=True):
            found[name] = numbers[:6] if vector else numbers[0]
            del numbers[: 6 if vector else 1]
        return found


def message(payload: bytes) -> str:
    """A message of the controller's: length, words, length, where from, a level of warning."""
    size = payload[0] if payload else 0
    return payload[1 : 1 + size].decode(errors="replace")


class UR(Driver):
    """Six joints and no hand: grippers of URs have wires of their own."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.joints = config.joints
        self._wire: socket.socket | None = None
        self._buffer = bytearray()
        self._state: dict[str, Any] = {}
        self._seen = 0.0
        self._beat = 0
        self._said = ""
        self._do = FOLLOW

    def connect(self) -> None:
        try:
            self._wire = self._dial(RTDE)
            self._wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._agree()
            self._wait(lambda: True, "send its state")
            self._check_mode()
            self._beat = 0
            self._send(self._state["actual_q"])
            self._begin()
        except DriverError:
            self.close()
            raise

    def read(self) -> ArmState:
        self._drain()
        self._check_mode()
        if self._state["runtime_state"] != PLAYING:
            raise self._error("its program has stopped: see its pendant, then reset")
        if (silence := self.clock() - self._seen) > self.config.silence:
            raise self._error(f"nothing heard for {silence:.2f} s: look at its cable and power")
        if self._do == FREE:  # nothing is written, and its watchdog waits for a beat
            self._follow()
        q, dq = np.array(self._state["actual_q"]), np.array(self._state["actual_qd"])
        torque = np.array(self._state["actual_current"]) * self.config.torque
        return ArmState(q, dq, torque, self._seen, np.array(self._state["actual_TCP_force"])[:3])

    def write(self, q: Floats, width: float) -> None:
        if np.shape(q) != (6,) or not (np.abs(q) <= WIDEST).all():
            raise self._error(f"was sent to {np.round(q, 3).tolist()}, outside of +-2 pi")
        self._follow(q)

    def release(self) -> None:
        """Freedrive: the controller carries the arm, and ends it where nothing is heard of us."""
        self._drain()
        self._do = FREE
        self._follow()

    def engage(self) -> None:
        self._drain()
        self._do = FOLLOW
        self._follow()

    def _follow(self, q: Any = None) -> None:
        """Beat, with `q` [6] (rad); None: where it is measured."""
        self._beat = self._beat % 0x7FFFFFFE + 1
        self._send(self._state["actual_q"] if q is None else q)

    @property
    def _known(self) -> bool:
        """Whether it is connected, and has said where it is."""
        return self._wire is not None and "actual_q" in self._state

    def check(self, limits: Limits) -> None:
        if max(np.abs(limits.low).max(), np.abs(limits.high).max()) > WIDEST:
            raise self._error("limits.low and high should be within +-2 pi")

    def stop(self) -> None:
        if self._known:
            with suppress(DriverError):  # a wire that is gone: the program's own watchdog stops it
                self.engage()

    def halt(self) -> StopCategory:
        """The controller's own protective stop (category 2). On a wire that is gone, the program's
        watchdog stops the arm."""
        if self._known:
            self._do = PROTECT
            with suppress(DriverError):
                self._follow()
        return StopCategory.HELD

    def recover(self) -> None:
        """Unlock a protective stop and start again."""
        protected = bool(self._state.get("safety_status_bits", 0) & 1 << 2)
        halted = self._do == PROTECT  # by us, on a wire that may not have brought back what came
        self.close()
        if protected or halted:
            self._ask_dashboard("close safety popup")
            said = self._ask_dashboard("unlock protective stop")
            if protected and not said.startswith("Protective stop releasing"):
                raise self._error(f"stays stopped: {said}")
        self.connect()

    def close(self) -> None:
        if self._known:
            with suppress(DriverError):
                self._beat = -1
                self._send(self._state["actual_q"])
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._state = {}
        self._do = FOLLOW
        self._buffer.clear()

    def _agree(self) -> None:
        """The protocol's version, and what goes back and forth."""
        if self._ask(VERSION, struct.pack(">H", 2)) != b"\x01":
            raise self._error("it does not speak RTDE protocol 2: its software is too old")
        names = struct.pack(">d", self.config.frequency) + ",".join(SEEN).encode()
        try:
            self._outputs = Recipe.of(self._ask(OUTPUTS, names), SEEN)
            self._inputs = Recipe.of(self._ask(INPUTS, ",".join(SENT).encode()), SENT)
        except RtdeError as error:
            raise self._error(f"RTDE: {error} (IN_USE: another program writes it)") from error
        if self._ask(START) != b"\x01":
            raise self._error("it does not start to send")

    def _check_mode(self) -> None:
        bits = self._state["safety_status_bits"]
        for bit, reason in STOPS.items():
            if bits & 1 << bit:
                raise self._error(reason)
        if self._state["robot_mode"] != RUNNING:
            raise self._error("it is not switched on: power on and release its brakes")

    def _begin(self) -> None:
        """Our program, to a port that itself says much: a connection that is closed with words
        that were not read is torn down, and what was sent may be lost with it."""
        with self._dial(SCRIPT) as wire:
            wire.sendall(program(self.config).encode())
            wire.setblocking(False)

            def plays() -> bool:
                with suppress(BlockingIOError):
                    wire.recv(65536)
                return self._state["runtime_state"] == PLAYING

            self._wait(plays, "run our program")
            with suppress(OSError):
                wire.shutdown(socket.SHUT_WR)
                while wire.recv(65536):
                    pass

    def _ask(self, type: int, payload: bytes = b"") -> bytes:
        """The payload of the answer to a request."""
        self._put(pack_packet(type, payload))
        answer: list[bytes] = []

        def heard() -> bool:
            answer.extend(p.payload for p in self._drain() if p.type == type)
            return bool(answer)

        self._await(heard, f"answer request {chr(type)!r}")
        return answer[0]

    def _wait(self, so: Callable[[], bool], what: str) -> None:
        """Wait until the newest state is `so`."""

        def heard() -> bool:
            self._drain()
            return bool(self._state) and so()

        self._await(heard, what)

    def _await(self, so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.config.patience
        while not so():
            if time.monotonic() > deadline:
                raise self._error(f"it did not {what} within {self.config.patience:.0f} s")
            time.sleep(0.001)

    def _drain(self) -> list[Packet]:
        """Whole packets that are there by now; the newest state counts."""
        if self._wire is None:
            raise self._error("not connected")
        try:
            while chunk := self._wire.recv(65536):
                self._buffer += chunk
                if len(chunk) < 65536:
                    break
            else:
                raise self._error("it closed the connection: see its pendant, then reset")
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._error(f"the connection broke: {error}") from error
        found: list[Packet] = []
        try:
            while (packet := take_packet(self._buffer)) is not None:
                found.append(packet)
                if packet.type == TEXT:
                    self._said = message(packet.payload)
                elif packet.type == DATA:
                    self._state = self._outputs.unpack(packet.payload)
                    self._seen = self.clock()
        except RtdeError as error:
            raise self._error(f"RTDE: {error}") from error
        return found

    def _send(self, q: Any) -> None:
        self._put(self._inputs.pack([*(float(each) for each in q), self._beat, self._do]))

    def _put(self, data: bytes) -> None:
        if self._wire is None:
            raise self._error("not connected")
        try:
            if self._wire.send(data) != len(data):
                raise self._error("it does not read what is sent to it")
        except OSError as error:
            raise self._error(f"the connection broke: {error}") from error

    def _dial(self, port: int) -> socket.socket:
        try:
            wire = socket.create_connection((self.config.host, port), self.config.patience)
        except OSError as error:
            raise self._error(f"port {port}: {error}; is it on, in remote control?") from error
        wire.setblocking(port != RTDE)
        return wire

    def _ask_dashboard(self, words: str) -> str:
        """The dashboard server's answer to `words`, on a connection of its own."""
        try:
            with self._dial(DASHBOARD) as wire, wire.makefile("rw", newline="\n") as lines:
                wire.settimeout(self.config.patience)
                lines.readline()  # it says who it is
                lines.write(words + "\n")
                lines.flush()
                return lines.readline().strip()
        except OSError as error:
            raise self._error(f"dashboard: {error}") from error

    def _error(self, text: str) -> DriverError:
        said = f" (it said: {self._said})" if self._said else ""
        return DriverError(f"the UR at {self.config.host}: {text}{said}")
