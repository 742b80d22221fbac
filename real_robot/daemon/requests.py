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
MOST_NUMBER = 2**53  # what every JSON reader keeps exactly
STALE = 2.0  # s after which a request that moves an arm is not obeyed any more


class Verb(StrEnum):
    """What an operator can say."""

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
ALWAYS = (Verb.STATUS, Verb.STOP, Verb.ESTOP)  # however old, they make nothing move


class RequestError(ValueError):
    """A line that is no request: one line that says why."""


@dataclass(frozen=True)
class Request:
    """`number` counts up within a connection; `time` (s) is when it was asked, on the monotonic
    clock that all processes of a machine share; `policy` is the run or checkpoint to `load`."""

    number: int
    time: float
    verb: Verb
    policy: str = ""

    def line(self) -> bytes:
        """As it goes over the wire."""
        about = {"version": PROTOCOL, "number": self.number, "time": self.time, "verb": self.verb}
        about |= {"policy": self.policy} if self.verb == Verb.LOAD else {}
        return json.dumps(about).encode() + b"\n"

    def late(self, now: float) -> str:
        """Why it is not obeyed any more at `now` (s); empty where it still is."""
        if self.verb in ALWAYS or abs(now - self.time) <= STALE:
            return ""
        return f"it was asked {now - self.time:.1f} s ago (at most {STALE:.0f}); ask again"


@dataclass(frozen=True)
class Reply:
    """To request `number` (0: to a line that had none): whether it was done, why not, and how
    things are."""

    number: int
    ok: bool
    reason: str = ""
    status: dict[str, Any] = field(default_factory=dict[str, Any])

    def line(self) -> bytes:
        """As it goes over the wire."""
        about = {"version": PROTOCOL, "number": self.number, "ok": self.ok, "reason": self.reason}
        return json.dumps({**about, "status": self.status}).encode() + b"\n"


def parse(line: bytes) -> Request:
    """The request in a line, with or without its end; RequestError for everything else."""
    if len(line) > MOST_BYTES:
        raise RequestError(f"a line of {len(line)} bytes is too long (at most {MOST_BYTES})")
    message = _object(line)
    version, number, time = (message.get(key) for key in ("version", "number", "time"))
    if version.__class__ is not int or version != PROTOCOL:
        raise RequestError(f"version {_shown(version)} is not spoken here, only {PROTOCOL}")
    keys = ["version", "number", "time", "verb"]
    keys += ["policy"] if message.get("verb") == Verb.LOAD else []
    if unequal := set(message) ^ {*keys}:
        raise RequestError(f"it should have {', '.join(keys)}; look at {_shown(unequal)}")
    if not isinstance(number, int) or number is True or not 0 < number <= MOST_NUMBER:
        raise RequestError(f"number {_shown(number)} should count up from 1")
    if not isinstance(time, int | float) or isinstance(time, bool) or not abs(time) <= MOST_NUMBER:
        raise RequestError(f"time {_shown(time)} should be s on the monotonic clock")
    policy = message.get("policy", "")
    if not isinstance(policy, str):
        raise RequestError(f"policy {_shown(policy)} should be a folder's name")
    return Request(number, float(time), _verb(message["verb"]), policy)


def parse_reply(line: bytes) -> Reply:
    """What the daemon answered; RequestError where that cannot be read."""
    message = _object(line)
    if message.get("version") != PROTOCOL:
        raise RequestError("the daemon speaks another version; restart it with this one")
    number, ok, reason, status = (message.get(k) for k in ("number", "ok", "reason", "status"))
    if not isinstance(number, int) or not isinstance(ok, bool) or not isinstance(reason, str):
        raise RequestError("the daemon's answer cannot be read")
    if not isinstance(status, dict):
        raise RequestError("the daemon's answer has no status")
    return Reply(number, ok, reason, cast(dict[str, Any], status))


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line.decode(), parse_constant=_refuse, object_pairs_hook=_once)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError("it is no line of JSON") from error
    if not isinstance(message, dict):
        raise RequestError("it is no JSON object")
    return cast(dict[str, Any], message)


def _verb(word: object) -> Verb:
    if isinstance(word, str) and word in list(Verb):
        return Verb(word)
    hint = nearest(word[:40], list(Verb)) if isinstance(word, str) else nearest("", list(Verb))
    raise RequestError(f"nobody knows the verb {_shown(word)}{hint}")


def _refuse(constant: str) -> NoReturn:
    raise RequestError(f"{constant} is no number in JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise RequestError("a key is there twice")
    return made


def _shown(value: object) -> str:
    """Of an unknown thing, what fits into a line of a log."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
