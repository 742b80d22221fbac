"""Flights: what the environments of a quadrotor share: checked actions, and pictures."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.embodiments.crazyflie import Vehicle
from embodied.envs.batched import BatchedEnv


class Flights(BatchedEnv):
    """B flights of one `vehicle`; `state` [17, B] as in `embodied.envs.quadrotor.dynamics`."""

    keeps_obs = True
    vehicle: Vehicle
    state: Tensor

    def checked(self, action: Tensor) -> Tensors:
        """The present observations; ValueError if `action` does not fit."""
        if self.obs is None:
            raise RuntimeError(f"{self.name}: call reset() before step()")
        expected = (self.num_envs, *self.spec.act.shape)
        if action.shape != expected:
            raise ValueError(f"{self.name}: action is {tuple(action.shape)}, expected {expected}")
        return self.obs

    def pose(self, row: int) -> Tensor:
        """What pictures show of one env [7]: place (m), attitude (w, x, y, z)."""
        return self.state[:7, row]

    def scene(self, row: int = 0) -> tuple[Any, Any]:
        return self._sight.show(self.pose(row).cpu().numpy())

    def render(self, row: int = 0, width: int = 320, height: int = 240) -> Tensor:
        pose = self.pose(row).cpu().numpy()
        return torch.from_numpy(self._sight.picture(pose, width, height))

    @cached_property
    def _sight(self) -> Any:
        """Made when someone looks."""
        from embodied.envs.quadrotor.scene import Sight

        return Sight(self.vehicle)

    def close(self) -> None:
        if "_sight" in vars(self):
            self._sight.close()
