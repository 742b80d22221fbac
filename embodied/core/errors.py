"""Errors that end a run and are no bug; importable without torch. Each message is one line."""


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
