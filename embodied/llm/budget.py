"""Budget: what a run may spend on a language model, and what it has spent, also before a resume.

A response costs (prompt_tokens price.prompt + completion_tokens price.completion) / 10^6.

AppendLog: a JSONL file that several processes append to and read.

Lines are written whole and synced to disk. A partial last line, left by a killed process, is moved
to `FILE.broken` with a warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embodied.core.atomic_write import sync
from embodied.core.bounds import Count, CountOrZero, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.llm.chat import BudgetSpent, ChatError
from embodied.llm.reply import count_of

logger = logging.getLogger(__name__)


class AppendLog:
    """The first `append` creates the file. Not thread-safe: the owner locks."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.read_to = 0

    def append(self, record: dict[str, Any]) -> None:
        """Append a record and sync it to disk. ChatError if it cannot be written."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            with self._open() as file:
                _set_aside(self.path, file)
                os.write(file, line)
                os.fsync(file)
        except OSError as error:
            raise ChatError(f"cannot write {self.path}: {error.strerror}") from error

    def read(self) -> list[Any]:
        """The values of the lines that were appended since the last call, also by this object."""
        if not self.path.exists() or self.path.stat().st_size == self.read_to:
            return []
        with self._open() as file:
            _set_aside(self.path, file)
            os.lseek(file, min(self.read_to, os.fstat(file).st_size), os.SEEK_SET)
            with os.fdopen(os.dup(file), "rb") as source:
                data = source.read()
                self.read_to = os.fstat(file).st_size
        values: list[Any] = []
        lines = data.splitlines()
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                values.append(json.loads(line))
        if unreadable := len(lines) - len(values):
            logger.warning("%s: %d lines cannot be parsed and are ignored", self.path, unreadable)
        return values

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file, created if needed, locked for this process."""
        fresh = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if fresh:
                sync(self.path.parent)
            yield file
        finally:
            os.close(file)


def _set_aside(path: Path, file: int) -> None:
    """Move a partial last line of a locked file to `FILE.broken`."""
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return
    whole = os.pread(file, size, 0).rfind(b"\n") + 1
    aside = path.with_name(path.name + ".broken")
    with aside.open("ab") as sink:
        sink.write(os.pread(file, size - whole, whole) + b"\n")
        sink.flush()
        os.fsync(sink.fileno())
    os.ftruncate(file, whole)
    os.fsync(file)
    logger.warning("%s: its last line is incomplete and was moved to %s", path, aside)


FILE = "chat_usage.jsonl"


@dataclass(frozen=True)
class Price:
    """Price of a million tokens, in the currency of `Limits.cost`."""

    prompt: NonNegative = 0.0  # of the request
    completion: NonNegative = 0.0  # of the answer


@dataclass(frozen=True)
class Limits:
    """Limits of requests. Calls, tokens and cost are those of one run with its resumes."""

    connect: Positive = 5.0  # s until a connection
    read: Positive = 120.0  # s between two parts of an answer
    deadline: Positive = 600.0  # s for one answer with all its attempts
    retries: CountOrZero = 5  # attempts after the first
    backoff: NonNegative = 1.0  # s before the first retry; doubled with each
    patience: NonNegative = 60.0  # s, longest wait before a retry
    in_flight: Count = 32  # answers that are requested at a time
    per_minute: Positive | None = None  # requests per minute; null: no limit
    calls: CountOrZero | None = None  # successful requests; null: no limit
    tokens: CountOrZero | None = None  # tokens of requests and answers; null: no limit
    cost: NonNegative | None = None  # cost at `price`; null: no limit
    price: Price = field(default_factory=Price)  # price of tokens

    def __post_init__(self) -> None:
        if self.cost is not None and self.price == Price():
            raise ConfigError("chat.limits.cost needs chat.limits.price.prompt and .completion")


class DeadlinePassed(ChatError):
    """The answer was not complete in time; another attempt may succeed."""


class Deadline:
    """`seconds` for one answer, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, possibly negative."""
        return self.end - time.monotonic()

    def extend(self, seconds: float) -> None:
        """Do not count `seconds`: the client waited for its own turn."""
        self.end += seconds

    def require(self, url: str, problem: str, wait: float = 0.0) -> None:
        """DeadlinePassed, with the last problem, if `wait` seconds would end after it."""
        if self.left <= wait:
            why = f"; {problem}" if problem else ""
            raise DeadlinePassed(
                f"{url} gave no answer within {self.seconds:g} s (chat.limits.deadline){why}"
            )


class Budget:
    """Counts the responses of `model`; `calls`, `tokens` and `cost` are the sums so far.

    With a `folder` (of the run), each response is a line of `folder/chat_usage.jsonl`; a resumed
    run, and other processes of the run, read it. A response that arrives after the run was killed
    is not counted. Thread-safe.
    """

    def __init__(self, limits: Limits, model: str, folder: Path | None = None) -> None:
        self.limits = limits
        self.model = model
        self.log = None if folder is None else AppendLog(folder / FILE)
        self.calls = self.tokens = self.in_flight = 0
        self.cost = 0.0
        self.lock = threading.Lock()

    def reserve(self) -> None:
        """Begin a request; BudgetSpent if none is left. Requests in flight count as calls, so that
        threads cannot overspend together."""
        with self.lock:
            self._read()
            limits = self.limits
            if limits.calls is not None and self.calls + self.in_flight >= limits.calls:
                self._spent(f"{limits.calls} calls")
            if limits.tokens is not None and self.tokens >= limits.tokens:
                self._spent(f"{limits.tokens} tokens")
            if limits.cost is not None and self.cost >= limits.cost:
                self._spent(f"{limits.cost:g} (cost)")
            self.in_flight += 1

    def settle(self, usage: Mapping[str, Any] | None) -> None:
        """End a request; `usage` as the server reports it (empty: it does not, None: there was no
        answer to pay for)."""
        with self.lock:
            self.in_flight -= 1
            if usage is None:
                return
            if self.log is None:
                self._add(self._record(usage))
            else:
                self.log.append(self._record(usage))
                self._read()

    def require_usage(self, usage: Any) -> None:
        """ChatError if tokens are limited and the server does not report them."""
        for name in ("tokens", "cost"):
            if getattr(self.limits, name) is not None and not isinstance(usage, Mapping):
                raise ChatError(
                    f"the server of {self.model} does not report token usage: "
                    f"set chat.limits.{name}=null"
                )

    def _record(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """One line of the file."""
        prompt, completion, total = (
            count_of(usage.get(f"{part}_tokens")) for part in ("prompt", "completion", "total")
        )
        price = self.limits.price
        return {
            "model": self.model,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "tokens": total or prompt + completion,
            "cost": (prompt * price.prompt + completion * price.completion) / 1e6,
        }

    def _read(self) -> None:
        """Add the lines of this run that are not counted yet."""
        for record in self.log.read() if self.log else ():
            if isinstance(record, dict) and record.get("model") == self.model:
                with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                    self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        tokens, cost = int(record["tokens"]), float(record["cost"])
        self.calls += 1
        self.tokens += tokens
        self.cost += cost

    def _spent(self, what: str) -> None:
        before = f" ({self.log.path})" if self.log is not None else ""
        raise BudgetSpent(f"the budget of {what} of {self.model} is spent{before}")
