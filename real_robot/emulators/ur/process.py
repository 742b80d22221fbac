"""Emulated UR arm: its protocols and servoj, in a process of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from embodied.core.bounds import Bound
from embodied.core.build import ConfigError
from embodied.real_robot.emulators.physics_link import answer, settings
from embodied.real_robot.emulators.process import Process
from embodied.real_robot.emulators.ur.controller import FakeUR


@dataclass(frozen=True)
class Config:
    """Settings of an emulated UR."""

    q: tuple[Annotated[float, Bound(-math.tau, math.tau)], ...]  # joints [6] at first, rad
    frequency: Annotated[float, Bound(10.0, 500.0)] = 125.0  # Hz of its control box

    def __post_init__(self) -> None:
        if len(self.q) != 6:
            raise ConfigError("q: where each of 6 joints stands")


class UrArm(Process):
    """`start` tells the driver its `host`, an address of this machine's own."""

    def __init__(self, config: Config) -> None:
        super().__init__("embodied.real_robot.emulators.ur.process", config, "UR")


def main() -> None:
    """Say where it can be reached, and play the arm."""
    config = settings(Config)
    with FakeUR(config.frequency, config.q) as arm:
        answer({"host": arm.host}, arm.pace.behind)


if __name__ == "__main__":
    main()
