"""Errors that end a run and are no bug; importable without torch. Each message is one line."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line that says what to type. `key` and `value`
    are the setting at fault. `allowed` is what it may be: a `Bound`, the known words, or a type in
    words. `hint` is the most similar known word."""

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        value: Any = None,
        allowed: Any = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.value = value
        self.allowed = allowed
        self.hint = hint


class RobotError(RuntimeError):
    """A hardware problem that a person must fix; the message is one line: cause and remedy."""


class RemoteError(RuntimeError):
    """A policy server cannot be used; the message is one line: cause and remedy."""


class ServerLost(RemoteError):
    """A policy server does not answer at present; the same request may be sent again later."""


class ContractError(RuntimeError):
    """A part does not keep its contract; the message is one line: what is wrong, what to write."""


class NotApplicable(Exception):
    """A check does not concern this part; the message says why."""


class ContractWarning(UserWarning):
    """A part does something unusual that a run can live with; the message is one line."""
