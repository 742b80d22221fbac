"""The process of a `ServoArm`: settings on standard input; it ends when that does."""

from __future__ import annotations

from real_robot.counterparts.played import answer, settings
from real_robot.counterparts.servo_arm import Config
from real_robot.counterparts.servo_bus import FakeBus


def main() -> None:
    """Say where the wire is, and play the servos: they are where the clock says, never late."""
    config = settings(Config)
    with FakeBus(config.protocol, config.ticks, config.faults, config.seed) as bus:
        answer({"port": bus.path})


if __name__ == "__main__":
    main()
