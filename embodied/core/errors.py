"""RobotError: what ends a run and is nobody's mistake; here, as cameras do without torch."""


class RobotError(RuntimeError):
    """A person beside the robot has to mend it: one line that says why and what to do."""
