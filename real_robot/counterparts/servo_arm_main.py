"""The process of a `ServoArm`: settings on standard input; it ends when that does."""

from __future__ import annotations

import json
import sys

from embodied.core.build import parse
from real_robot.counterparts.servo_arm import Config
from real_robot.counterparts.servo_bus import FakeBus


def main() -> None:
    """Say where the wire is, and play the servos."""
    config: Config = parse(Config, json.loads(sys.stdin.readline()), "counterpart")
    with FakeBus(config.protocol, config.ticks, config.faults, config.seed) as bus:
        print(json.dumps({"port": bus.path}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
