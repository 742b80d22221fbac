"""Simulated Crazyflie behind the real radio protocol (CRTP over UDP) on this machine.

The client library for real drones connects to it over UDP; physics are those that policies are
trained in.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.build import ConfigError
from embodied.real_robot.emulators.process import Process


@dataclass(frozen=True)
class Config:
    """`place` (m) where it stands, facing along x; `vehicle` of
    `embodied.embodiments.crazyflie.VEHICLES`; `noise` (m) of its estimate; `external`: it knows its
    place from what is sent to it only, and a motion capture system beside it sees it; `lost`: share
    of set-points and log packets that the radio loses; `battery` (V) falls by `drain` (V/s);
    `arms_itself` (brushed motors); `onboard`: a folder with the app that
    `embodied export RUN --to FOLDER --crazyflie` wrote, in its firmware."""

    place: tuple[float, float, float] = (0.0, 0.0, 0.0)
    vehicle: str = "library"
    noise: float = 1e-3
    external: bool = False
    lost: float = 0.0
    battery: float = 4.0
    drain: float = 0.0
    arms_itself: bool = False
    onboard: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.lost < 1 and self.noise >= 0 and self.drain >= 0):
            raise ConfigError("lost is a share below 1; noise and drain should not be negative")


class Crazyflie(Process):
    """`start` tells the driver its `uri`, and its `tracker` where one sees it."""

    def __init__(self, config: Config) -> None:
        super().__init__("embodied.envs.hardware_sim.crazyflie_main", config, "Crazyflie")
