"""Vehicle parameters of each env: a named quadrotor, or a random variation of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.core.build import nearest
from embodied.embodiments.crazyflie import VEHICLES, Vehicle
from embodied.envs.fr3.tasks.task import Parameter
from embodied.envs.quadrotor.dynamics import numbers

MULTIPLIED = {
    "mass": (0,),
    "inertia": (1, 2, 3),
    "thrust": (4, 5, 6),
    "torque": (7,),
    "lag": (8, 9),
}
"""Task parameters that multiply numbers of a vehicle, and which of `numbers` these are."""
NAMES = ("blend", *MULTIPLIED, "disturbance")


class Vehicles:
    """Columns of vehicle numbers [10, n] from task vectors [D, n] in [0, 1].

    ValueError where a vehicle or a range is not known.
    """

    def __init__(
        self,
        vehicle: str,
        other: str,
        ranges: Mapping[str, tuple[float, float]],
        device: torch.device,
    ) -> None:
        self.parameters = tuple(
            Parameter(name, *_checked(name, *bounds), unit="") for name, bounds in ranges.items()
        )
        self._index = {parameter.name: i for i, parameter in enumerate(self.parameters)}
        self._low = torch.tensor([p.low for p in self.parameters], device=device)[:, None]
        self._span = torch.tensor([p.high - p.low for p in self.parameters], device=device)[:, None]
        self._first = numbers(_named(vehicle)).to(device)
        self._way = numbers(_named(other)).to(device) - self._first
        self.ends = (self._first, self._way)

    def native(self, task: Tensor) -> Tensor:
        """Task parameters [D, n] in their own units."""
        return self._low + task * self._span

    def made(self, task: Tensor) -> tuple[Tensor, Tensor]:
        """The vehicles [10, n], and what multiplies the disturbance [n]."""
        values = self.native(task)
        n = task.shape[1]
        made = self._first.expand(-1, n).clone()
        if "blend" in self._index:
            made += values[self._index["blend"]] * self._way
        for name, places in MULTIPLIED.items():
            if name in self._index:
                made[places[0] : places[-1] + 1] *= values[self._index[name]]
        stirred = task.new_ones(n)
        if "disturbance" in self._index:
            stirred = values[self._index["disturbance"]]
        return made, stirred


def _named(name: str) -> Vehicle:
    if name not in VEHICLES:
        raise ValueError(f"unknown vehicle {name!r}{nearest(name, VEHICLES)}")
    return VEHICLES[name]


def _checked(name: str, low: float, high: float) -> tuple[float, float]:
    if name not in NAMES:
        raise ValueError(f"ranges: unknown parameter {name!r}{nearest(name, NAMES)}")
    least = 0.0 if name in ("blend", "disturbance") else 1e-3
    if not least <= low <= high or (name == "blend" and high > 1):
        raise ValueError(f"ranges: {name}=[{low:g}, {high:g}] is not a valid range for it")
    return low, high
