"""Simulated Crazyflie behind the real radio protocol (CRTP over UDP) on this machine.

The client library for real drones connects to it over UDP; physics are those that policies are
trained in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from embodied.core.bounds import Bound, CountOrZero, NonNegative, Number, Positive
from embodied.real_robot.emulators.process import Process


@dataclass(frozen=True)
class Config:
    """Settings of a simulated Crazyflie, which faces along x.

    With `external` it knows its place from what is sent to it only, and a motion capture system
    beside it sees it. `onboard` names a folder with the app that
    `embodied export RUN --to FOLDER --crazyflie` wrote, in its firmware.
    """

    place: tuple[Number, Number, Number] = (0.0, 0.0, 0.0)  # where it stands, m
    vehicle: str = "library"  # of `embodied.embodiments.crazyflie.VEHICLES`
    noise: NonNegative = 1e-3  # of its estimate, m
    external: bool = False  # a motion capture system tells it its place
    lost: Annotated[float, Bound(0.0, below=1.0)] = 0.0  # share of packets that the radio loses
    battery: Positive = 4.0  # voltage at the start, V
    onboard: str = ""  # folder with an exported app (empty: none)
    seed: CountOrZero = 0  # of the random numbers


class Crazyflie(Process):
    """`start` tells the driver its `uri`, and its `tracker` where one sees it."""

    def __init__(self, config: Config) -> None:
        super().__init__("embodied.envs.hardware_sim.crazyflie_flight", config, "Crazyflie")
