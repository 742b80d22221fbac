"""RobotError: a hardware problem that ends a run; importable without torch."""


class RobotError(RuntimeError):
    """A person beside the robot has to mend it: one line that says why and what to do."""
