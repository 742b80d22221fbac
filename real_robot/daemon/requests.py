"""Requests and replies between operators' clients and the daemon: one JSON object per line.

A request is `{"version": 1, "number": 7, "time": 123.4, "verb": "stop"}` and nothing else; every
other line is refused with a reason. Nothing that arrives over the socket is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, cast

from embodied.core.build import nearest
from real_robot.ipc.messages import Command

PROTOCOL = 1
MOST_BYTES = 4096  # of a request's line, its end included
MOST_NUMBER = 2**53  # integers up to here survive every JSON reader
STALE = 2.0  # s after which a request that moves an arm is refused


class Verb(StrEnum):
    """An operator's requests."""

    STATUS = "status"
    ARM = "arm"
    START = "start"
    STOP = "stop"
    ESTOP = "estop"
    RESET = "reset"
    HOME = "home"
    LOAD = "load"
    QUIT = "quit"


COMMANDS = {
    Verb.ARM: Command.ARM,
    Verb.START: Command.START,
    Verb.STOP: Command.STOP,
    Verb.ESTOP: Command.ESTOP,
    Verb.RESET: Command.RESET,
    Verb.HOME: Command.HOME,
    Verb.QUIT: Command.QUIT,
}
ALWAYS = (Verb.STATUS, Verb.STOP, Verb.ESTOP)  # accepted at any age: they move nothing


class RequestError(ValueError):
    """A line is no valid request: one line that says why."""


@dataclass(frozen=True)
class Request:
    """`number` counts up in a connection; `time` (s) is when it was sent, on the monotonic clock
    that all processes of a machine share; `policy` is the run or checkpoint to `load`."""

    number: int
    time: float
    verb: Verb
    policy: str = ""

    def line(self) -> bytes:
        """The encoded line."""
        about = {"version": PROTOCOL, "number": self.number, "time": self.time, "verb": self.verb}
        about |= {"policy": self.policy} if self.verb == Verb.LOAD else {}
        return json.dumps(about).encode() + b"\n"

    def late(self, now: float) -> str:
        """Why it is refused as too old at `now` (s); empty where it is not."""
        if self.verb in ALWAYS or abs(now - self.time) <= STALE:
            return ""
        return f"the request is {now - self.time:.1f} s old (at most {STALE:.0f}); send it again"


@dataclass(frozen=True)
class Reply:
    """The reply to request `number` (0: to a line without one): whether it was done, why not, and
    the status."""

    number: int
    ok: bool
    reason: str = ""
    status: dict[str, Any] = field(default_factory=dict[str, Any])

    def line(self) -> bytes:
        """The encoded line."""
        about = {"version": PROTOCOL, "number": self.number, "ok": self.ok, "reason": self.reason}
        return json.dumps({**about, "status": self.status}).encode() + b"\n"


def parse(line: bytes) -> Request:
    """Parse the request in a line, with or without its newline; RequestError for anything else."""
    if len(line) > MOST_BYTES:
        raise RequestError(f"a line of {len(line)} bytes is too long (at most {MOST_BYTES})")
    message = _object(line)
    version, number, time = (message.get(key) for key in ("version", "number", "time"))
    if version.__class__ is not int or version != PROTOCOL:
        raise RequestError(f"version {_shown(version)} is not supported, only {PROTOCOL}")
    keys = ["version", "number", "time", "verb"]
    keys += ["policy"] if message.get("verb") == Verb.LOAD else []
    if unequal := set(message) ^ {*keys}:
        raise RequestError(f"the keys should be {', '.join(keys)}; wrong: {_shown(unequal)}")
    if not isinstance(number, int) or number is True or not 0 < number <= MOST_NUMBER:
        raise RequestError(f"number {_shown(number)} should count up from 1")
    if not isinstance(time, int | float) or isinstance(time, bool) or not abs(time) <= MOST_NUMBER:
        raise RequestError(f"time {_shown(time)} should be s on the monotonic clock")
    policy = message.get("policy", "")
    if not isinstance(policy, str):
        raise RequestError(f"policy {_shown(policy)} should be a folder's name")
    return Request(number, float(time), _verb(message["verb"]), policy)


def parse_reply(line: bytes) -> Reply:
    """Parse the daemon's reply; RequestError where it cannot be read."""
    message = _object(line)
    if message.get("version") != PROTOCOL:
        raise RequestError("the daemon has another protocol version; restart it with this one")
    number, ok, reason, status = (message.get(k) for k in ("number", "ok", "reason", "status"))
    if not isinstance(number, int) or not isinstance(ok, bool) or not isinstance(reason, str):
        raise RequestError("the daemon's reply cannot be read")
    if not isinstance(status, dict):
        raise RequestError("the daemon's reply has no status")
    return Reply(number, ok, reason, cast(dict[str, Any], status))


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line.decode(), parse_constant=_refuse, object_pairs_hook=_once)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError("the line is not JSON") from error
    if not isinstance(message, dict):
        raise RequestError("the line is not a JSON object")
    return cast(dict[str, Any], message)


def _verb(word: object) -> Verb:
    if isinstance(word, str) and word in list(Verb):
        return Verb(word)
    hint = nearest(word[:40], list(Verb)) if isinstance(word, str) else nearest("", list(Verb))
    raise RequestError(f"unknown verb {_shown(word)}{hint}")


def _refuse(constant: str) -> NoReturn:
    raise RequestError(f"{constant} is no number in JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise RequestError("a key occurs twice")
    return made


def _shown(value: object) -> str:
    """A value of unknown type and size, shortened for a log line."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
