"""Errors that end a run and are no bug; importable without torch. Each message is one line."""


class RobotError(RuntimeError):
    """A hardware problem that a person must fix; the message is one line: cause and remedy."""


class RemoteError(RuntimeError):
    """A policy server cannot be used; the message is one line: cause and remedy."""


class ServerLost(RemoteError):
    """A policy server does not answer at present; the same request may be sent again later."""
