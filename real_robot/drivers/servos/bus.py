"""Grouped reads and writes to all servos of a bus, repeated where noise destroyed a reply."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from embodied.real_robot.drivers.driver import DriverError
from embodied.real_robot.drivers.servos.registers import Make
from embodied.real_robot.drivers.servos.serial_port import SerialPort


class ServoWire:
    """`names` are those of all servos, by id. One exchange may take `timeout` s and is repeated up
    to `retries` times, so that every method returns or raises DriverError within a bound."""

    def __init__(
        self, port: SerialPort, make: Make, names: Mapping[int, str], timeout: float, retries: int
    ) -> None:
        self.port = port
        self.make = make
        self.names = dict(names)
        self.timeout = timeout
        self.retries = retries
        self.errors: dict[int, int] = {}
        """The error byte of every servo's last answer."""
        self.repeated = 0
        """Exchanges that had to be repeated."""
        self.silent: set[int] = set()
        """Who was asked in vain: they are not waited for again before `silent` is cleared."""
        self.limited: Mapping[int, int] = {}
        """Bits of `faults` that are none, by id: what that servo limits by itself."""
        self._last = 0.0

    @property
    def silence(self) -> float:
        """Seconds since something was sent."""
        return time.monotonic() - self._last

    def find_echo(self) -> None:
        """Whether the adapter sends back what is written: what comes first is then the request."""
        question = self.make.codec.read(min(self.names), self.make.mode, 1)
        self.port.echo = False
        seen = b""
        self.send(question)
        end = time.monotonic() + self.timeout
        while len(seen) < len(question) and (data := self.port.read(end)):
            seen += data
        self.port.echo = seen.startswith(question)
        self.port.drain(self.timeout / 4, self.timeout)

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting for a reply."""
        self.port.write(frame)
        self._last = time.monotonic()

    def ask(self, address: int, size: int, ids: Collection[int]) -> dict[int, bytes]:
        """`size` bytes from register `address` on, of those of `ids` that answer."""
        found: dict[int, bytes] = {}
        missing = tuple(ids)
        for attempt in range(self.retries + 1):
            if not missing:
                break
            self.repeated += attempt > 0
            self.send(self.make.codec.sync_read(address, size, missing))
            self._collect(missing, size, found)
            missing = tuple(id for id in missing if id not in found)
            if missing:  # what comes late is not to be taken for the next answer
                self.port.drain(self.timeout / 10, self.timeout)
        return found

    @property
    def living(self) -> tuple[int, ...]:
        """Ids of the servos that are not silent."""
        return tuple(id for id in self.names if id not in self.silent)

    def get(self, address: int, size: int) -> dict[int, bytes]:
        """Read the same block of every servo. DriverError where one does not answer."""
        found = self.hear(address, size)
        self.check_silent()
        return found

    def hear(self, address: int, size: int) -> dict[int, bytes]:
        """Read the same block of the servos that answer; the others count as silent from now on."""
        found = self.ask(address, size, self.living)
        self.silent |= set(self.names) - set(found)
        return found

    def check_silent(self) -> None:
        """DriverError for a servo that did not answer."""
        if self.silent:
            id = min(self.silent)
            raise DriverError(
                f"no answer from {self.names[id]} (id {id}) on {self.port.path}, asked "
                f"{self.retries + 1} times at {self.port.baud} baud: check its cable, power, "
                f"id and baud rate{self.port.latency()}"
            )

    def put(self, address: int, data: Mapping[int, bytes]) -> set[int]:
        """Write, read back, and write again where it is not there. Ids that did not take it."""
        wrong = set(data)
        for _ in range(self.retries + 1):
            if not wrong:
                break
            retry = {id: data[id] for id in sorted(wrong)}
            self.send(self.make.codec.sync_write(address, retry))
            found = self.ask(address, len(next(iter(retry.values()))), retry)
            wrong = {id for id in retry if found.get(id) != data[id]}
        return wrong

    def check_faults(self) -> None:
        """DriverError for a servo that reported a fault with its last answer."""
        for id, error in self.errors.items():
            if not error:
                continue
            bits, register = error, self.make.errors
            if register is not None:  # the error byte says no more than that there is one
                bits = self.ask(register, 1, (id,)).get(id, b"\x00")[0]
            bits &= ~self.limited.get(id, 0)
            if register is None and not bits:
                continue
            named = [text for bit, text in self.make.faults.items() if bits >> bit & 1]
            raise DriverError(
                f"{self.names[id]} (id {id}) reports {', '.join(named) or f'error {error}'}: check "
                "load, supply and temperature, then switch it off and on"
            )

    def _collect(self, ids: Collection[int], size: int, found: dict[int, bytes]) -> None:
        """Good replies into `found` until all of `ids` are there or time is up."""
        buffer, end = bytearray(), time.monotonic() + self.timeout
        while data := self.port.read(end):
            buffer += data
            while (packet := self.make.codec.take(buffer)) is not None:
                reply = self.make.codec.reply(packet)
                if reply is not None and reply.id in ids and len(reply.data) == size:
                    found[reply.id] = reply.data
                    self.errors[reply.id] = reply.error
            if all(id in found for id in ids):
                return
