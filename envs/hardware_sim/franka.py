"""Simulated FR3 behind libfranka's own protocol on this machine (franky-sim).

franky-sim (MuJoCo, 1 kHz) serves the robot and its hand to the real driver. The objects of a task
stand before it, and their poses are published in shared memory as a tracker would. libfranka's
ports are fixed, so each simulated robot takes an address of its own on the loopback network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from embodied.core.bounds import Bound, CountOrZero, Number
from embodied.core.build import ConfigError, Node
from embodied.embodiments import fr3
from embodied.real_robot.emulators.process import Process


@dataclass(frozen=True)
class Config:
    """Settings of a simulated Franka arm."""

    world: Node | None = None  # node of what stands on the table (null: nothing does)
    host: str = ""  # an address of 127.0.0.0/8 (empty: a free one)
    q: tuple[Number, ...] = tuple(float(each) for each in fr3.HOME)  # where the arm begins, rad
    width: Annotated[float, Bound(0.0, fr3.OPEN)] = fr3.OPEN  # opening at the start, m
    seed: CountOrZero = 0  # of the random numbers

    def __post_init__(self) -> None:
        if len(self.q) != len(fr3.JOINTS):
            raise ConfigError("q: 7 joint positions please")
        if self.host and not self.host.startswith("127."):
            raise ConfigError(f"host {self.host!r} should be a loopback address, as 127.0.0.2")


class Franky(Process):
    """`start` tells the driver its `host`, and its `senses` where something stands there."""

    def __init__(self, config: Config) -> None:
        super().__init__("embodied.envs.hardware_sim.franka_main", config, "FR3 (franky-sim)")
