"""The process of an emulated UR: settings on standard input; it ends when that closes."""

from __future__ import annotations

from embodied.real_robot.emulators.physics_link import answer, settings
from embodied.real_robot.emulators.ur.controller import FakeUR
from embodied.real_robot.emulators.ur.process import Config


def main() -> None:
    """Say where it can be reached, and play the arm."""
    config = settings(Config)
    with FakeUR(config.frequency, config.q) as arm:
        answer({"host": arm.host}, arm.pace.behind)


if __name__ == "__main__":
    main()
