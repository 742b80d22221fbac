"""Limits of the requests to a language model, and the deadline of one answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from embodied.core.build import ConfigError
from embodied.llm.chat import ChatError


@dataclass(frozen=True)
class Price:
    """Price of a million tokens of the request and of the answer, in the currency of `cost`."""

    prompt: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Timeouts `connect` and `read` in seconds; `deadline` in seconds for one answer with all its
    attempts; `retries` after the first attempt; `backoff` and `patience` in seconds; at most
    `in_flight` answers are requested at a time; `per_minute` requests; successful `calls`,
    their `tokens` and their `cost` at `price`, of one run with its resumes (null: no limit)."""

    connect: float = 5.0
    read: float = 120.0
    deadline: float = 600.0
    retries: int = 5
    backoff: float = 1.0
    patience: float = 60.0
    in_flight: int = 32
    per_minute: float | None = None
    calls: int | None = None
    tokens: int | None = None
    cost: float | None = None
    price: Price = field(default_factory=Price)

    def __post_init__(self) -> None:
        for name in ("connect", "read", "deadline", "per_minute"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"chat.limits.{name}={value} must be above 0")
        for name, least in {"retries": 0, "backoff": 0, "patience": 0, "in_flight": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"chat.limits.{name}={getattr(self, name)} must be at least {least}"
                )
        if min(self.price.prompt, self.price.completion) < 0:
            raise ConfigError("chat.limits.price must be at least 0")
        if self.cost is not None and self.price == Price():
            raise ConfigError("chat.limits.cost needs chat.limits.price.prompt and .completion")


class DeadlinePassed(ChatError):
    """The answer was not complete in time; another attempt may succeed."""


class Deadline:
    """`seconds` for one answer, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, time.monotonic() + seconds

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
