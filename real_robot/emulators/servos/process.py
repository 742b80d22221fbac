"""Emulated servo arm: a servo bus on a pseudo-terminal, in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from embodied.core.bounds import Bound, CountOrZero
from embodied.core.build import ConfigError
from embodied.real_robot.emulators.physics_link import answer, settings
from embodied.real_robot.emulators.process import Process
from embodied.real_robot.emulators.servos.bus import FakeBus, Faults


@dataclass(frozen=True)
class Config:
    """Settings of an emulated servo bus."""

    protocol: Literal["dynamixel", "feetech"]  # what the servos speak
    ticks: tuple[Annotated[float, Bound(0.0, 4095.0)], ...]  # where servos 1 to n stand at first
    faults: Faults | None = None  # faults of the wire; null: none
    seed: CountOrZero = 0  # of the faults

    def __post_init__(self) -> None:
        if not self.ticks:
            raise ConfigError("ticks: where each servo stands")


class ServoArm(Process):
    """`start` tells the driver its `port`."""

    def __init__(self, config: Config) -> None:
        super().__init__("embodied.real_robot.emulators.servos.process", config, "servo arm")


def main() -> None:
    """Say where the wire is, and play the servos: they are where the clock says, never late."""
    config = settings(Config)
    with FakeBus(config.protocol, config.ticks, config.faults, config.seed) as bus:
        answer({"port": bus.path})


if __name__ == "__main__":
    main()
