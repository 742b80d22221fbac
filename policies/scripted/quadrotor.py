"""FlyTo: flies a quadrotor straight to the goal at a bounded speed and holds position.

    a = k (goal - place - lead), shortened to length 1

An action moves `lead`, the offset of the set-point from the drone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Positive
from embodied.core.build import ConfigError, nearest
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

WHAT = ("goal", "tool", "lead")


@dataclass(frozen=True)
class Config:
    """Settings of the flight to the goal."""

    gain: Positive = 4.0  # an action is gain times the distance, at most 1 (1/m)


class FlyTo(Policy):
    """Flies to the goal; for actions vx, vy, vz and a `state` with the elements goal_x, tool_x,
    lead_x, ..."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if spec.act.names[:3] != ("vx", "vy", "vz") or spec.act.size != 3:
            raise ConfigError(
                f"FlyTo needs the actions vx, vy, vz, got {', '.join(spec.act.names)}"
            )
        names = spec.obs["state"].names if "state" in spec.obs else ()
        wanted = [f"{what}_{axis}" for what in WHAT for axis in "xyz"]
        for name in wanted:
            if name not in names:
                raise ConfigError(f"FlyTo needs the state element {name}{nearest(name, names)}")
        self.config = config
        self.spec = spec
        self.places = [names.index(name) for name in wanted]

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 0)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        goal, tool, lead = obs["state"][:, self.places].split(3, 1)
        way = self.config.gain * (goal - tool - lead)
        return (way / way.norm(dim=1, keepdim=True).clamp(min=1.0))[:, None], carry
