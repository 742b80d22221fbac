"""Patient: the script for lift on arms with slow or late hands, which waits until the hand holds.

`policies.scripted` gives a hand a fixed time to close, which is enough for the simulated one. Here
what is measured decides, so that a clone can learn when to raise from what it sees:

    holds  <=>  width < 2 half (|cos yaw| + |sin yaw|) + slack,     how wide a turned cube is
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from embodied.core.spec import Spec
from policies import scripted
from policies.scripted import Plan, Scripted, Seen

UP = 4  # the phase of `scripted.lift` in which it raises


@dataclass(frozen=True)
class Config(scripted.Config):
    """As `policies.scripted`; `slack` (m) of the width that counts as closed on the cube."""

    task: str = "lift"
    slack: float = 0.006


class PatientLift(Scripted):
    """From above, down, close until it holds, up; over again when the cube is not in the hand."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.slack = config.slack
        self.plan = self._plan

    def _plan(self, seen: Seen) -> Plan:
        plan, state = scripted.lift(seen), seen.state
        yaw = torch.atan2(state["cube_sin_4yaw"], state["cube_cos_4yaw"]) / 4
        wide = 2 * state["cube_half"] * (yaw.cos() + yaw.sin().abs())
        holds = (state["width"] < wide + self.slack)[:, None]
        place = plan.place.clone()
        place[:, UP] = torch.where(holds, place[:, UP], place[:, UP - 1])
        return replace(plan, place=place)
