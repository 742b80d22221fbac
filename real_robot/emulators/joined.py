"""Several emulators as one, for `embodied.real_robot.drivers.joined`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied.core.build import Node, build
from embodied.real_robot.emulators.process import Emulator


@dataclass(frozen=True)
class Config:
    """Settings of several emulators."""

    robots: dict[str, Node]  # node of each robot's emulator, by its prefix


class JoinedEmulators(Emulator):
    """Started and stopped together."""

    def __init__(self, config: Config) -> None:
        self.parts = {name: build(node, Emulator) for name, node in config.robots.items()}

    def start(self) -> dict[str, Any]:
        """The settings of each robot's driver, under `more`."""
        try:
            return {"more": {name: part.start() for name, part in self.parts.items()}}
        except BaseException:
            self.stop()
            raise

    def behind(self) -> float:
        return max(part.behind() for part in self.parts.values())

    def stop(self) -> None:
        for part in self.parts.values():
            part.stop()
