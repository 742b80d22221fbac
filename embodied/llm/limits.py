"""Limits of the requests to a language model, and the deadline of one answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from embodied.core.bounds import Count, CountOrZero, NonNegative, Positive
from embodied.core.build import ConfigError
from embodied.llm.chat import ChatError


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
