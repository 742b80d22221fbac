"""Requests and replies between operators' clients and the daemon: one JSON object per line.

A request is `{"version": 1, "number": 7, "time": 123.4, "verb": "stop"}` and nothing else but what
its verb takes (`policy` of `load`, `seconds` of `start`, `supported` of `release`, `stop` of
`reset`) and the `session` that sends it; every other line is refused with a reason. Nothing that
arrives over the socket is unpickled.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, TypeGuard, cast

from embodied.core.build import nearest
from embodied.real_robot.kernel.messages import Command

PROTOCOL = 1
MOST_BYTES = 4096  # of a request's line, its end included
MOST_NUMBER = 2**53  # integers up to here survive every JSON reader
STALE = 2.0  # s after which a request that moves an arm is refused


class Verb(StrEnum):
    STATUS = "status"
    ARM = "arm"
    START = "start"
    STOP = "stop"
    ESTOP = "estop"
    RESET = "reset"
    HOME = "home"
    LOAD = "load"
    QUIT = "quit"
    RELEASE = "release"


TAKES = {
    Verb.LOAD: ("policy",),
    Verb.START: ("seconds",),
    Verb.RELEASE: ("supported",),
    Verb.RESET: ("stop",),
}
"""The settings of a verb."""
NEEDS = (Verb.LOAD, Verb.RESET)  # its settings may not be left out
FOREIGN = "this daemon belongs to another session; ask it without one, as an operator"
MOST_TOKEN = 64
ALWAYS = (Verb.STATUS, Verb.STOP, Verb.ESTOP)  # accepted at any age: they move nothing


class RequestError(ValueError):
    """A line is no valid request: one line that says why."""


@dataclass(frozen=True)
class Request:
    """`number` counts up in a connection; `time` (s): when it was sent, on the monotonic clock that
    all processes of a machine share; `policy`: run or checkpoint to `load`; `seconds`: limit of the
    episode to `start` (None: none); `session`: token of the session that asks (empty: an
    operator); `supported`: a person holds the arm that is to be released; `stop`: number of the
    newest press of the emergency stop that the operator who resets has seen."""

    number: int
    time: float
    verb: Verb
    policy: str = ""
    seconds: float | None = None
    session: str = ""
    supported: bool = False
    stop: int = 0

    @property
    def command(self) -> Command:
        if self.verb == Verb.RELEASE and self.supported:
            return Command.RELEASE_SUPPORTED
        return Command.__members__.get(self.verb.name, Command.NOTHING)

    def line(self) -> bytes:
        about: dict[str, Any] = {
            "version": PROTOCOL,
            "number": self.number,
            "time": self.time,
            "verb": self.verb,
        }
        about |= {"policy": self.policy} if self.verb == Verb.LOAD else {}
        about |= {"seconds": self.seconds} if self.seconds is not None else {}
        about |= {"session": self.session} if self.session else {}
        about |= {"supported": True} if self.supported else {}
        about |= {"stop": self.stop} if self.verb == Verb.RESET else {}
        return json.dumps(about).encode() + b"\n"

    def foreign(self, token: str) -> bool:
        """Whether it is of another session than the one whose token that is."""
        return bool(self.session) and not hmac.compare_digest(self.session.encode(), token.encode())

    def late(self, now: float) -> str:
        """Why it is refused as too old at `now` (s); empty where it is not."""
        if self.verb in ALWAYS or abs(now - self.time) <= STALE:
            return ""
        return f"the request is {now - self.time:.1f} s old (at most {STALE:.0f}); send it again"


@dataclass(frozen=True)
class Reply:
    """The reply to request `number` (0: to a line without one): whether it was done, or why not."""

    number: int
    ok: bool
    reason: str = ""
    status: dict[str, Any] = field(default_factory=dict[str, Any])

    def line(self) -> bytes:
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
    verb = message.get("verb")
    own = next((keys for each, keys in TAKES.items() if each == verb), ())
    needed = ["version", "number", "time", "verb", *(own if verb in NEEDS else ())]
    if unequal := set(needed) - set(message) | set(message) - {*needed, *own, "session"}:
        raise RequestError(f"the keys should be {', '.join(needed)}; wrong: {_shown(unequal)}")
    if not isinstance(number, int) or number is True or not 0 < number <= MOST_NUMBER:
        raise RequestError(f"number {_shown(number)} should count up from 1")
    if not _is_number(time):
        raise RequestError(f"time {_shown(time)} should be s on the monotonic clock")
    policy, session = message.get("policy", ""), message.get("session", "")
    if not isinstance(policy, str) or not policy.isprintable():  # it becomes a process's argument
        raise RequestError(f"policy {_shown(policy)} should be a folder's name")
    if not isinstance(session, str) or not session.isascii() or len(session) > MOST_TOKEN:
        raise RequestError(f"session should be a token of at most {MOST_TOKEN} ASCII characters")
    seconds = message.get("seconds")
    if "seconds" in message and not (_is_number(seconds) and seconds > 0):
        raise RequestError(f"seconds {_shown(seconds)} should be a number above 0")
    supported = message.get("supported", False)
    if not isinstance(supported, bool):
        raise RequestError(f"supported {_shown(supported)} should be true or false")
    stop = message.get("stop", 0)
    if not isinstance(stop, int) or stop is True or not 0 <= stop <= MOST_NUMBER:
        raise RequestError(f"stop {_shown(stop)} should be the number of a press")
    if not isinstance(verb, str) or verb not in list(Verb):
        hint = nearest(verb[:40] if isinstance(verb, str) else "", list(Verb))
        raise RequestError(f"unknown verb {_shown(verb)}{hint}")
    limit = None if seconds is None else float(seconds)
    return Request(number, float(time), Verb(verb), policy, limit, session, supported, stop)


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


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether every JSON reader keeps it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= MOST_NUMBER


def _refuse(constant: str) -> NoReturn:
    raise RequestError(f"{constant} is no number in JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise RequestError("a key occurs twice")
    return made


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
