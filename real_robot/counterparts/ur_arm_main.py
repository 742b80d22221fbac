"""The process of a `UrArm`: settings on standard input; it ends when that does."""

from __future__ import annotations

import json
import sys

from embodied.core.build import parse
from real_robot.counterparts.rtde import FakeUR
from real_robot.counterparts.ur_arm import Config


def main() -> None:
    """Say where it can be reached, and play the arm."""
    config: Config = parse(Config, json.loads(sys.stdin.readline()), "counterpart")
    with FakeUR(config.frequency, config.q) as arm:
        print(json.dumps({"host": arm.host}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
