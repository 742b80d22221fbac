"""RobotError: a hardware problem that ends a run; importable without torch."""


class RobotError(RuntimeError):
    """A hardware problem that a person must fix; the message is one line: cause and remedy."""
