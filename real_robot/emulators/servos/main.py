"""The process of an emulated servo arm: settings on standard input; it ends when that closes."""

from __future__ import annotations

from embodied.real_robot.emulators.physics_link import answer, settings
from embodied.real_robot.emulators.servos.bus import FakeBus
from embodied.real_robot.emulators.servos.process import Config


def main() -> None:
    """Say where the wire is, and play the servos: they are where the clock says, never late."""
    config = settings(Config)
    with FakeBus(config.protocol, config.ticks, config.faults, config.seed) as bus:
        answer({"port": bus.path})


if __name__ == "__main__":
    main()
