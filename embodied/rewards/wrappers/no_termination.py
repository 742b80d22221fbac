"""NoTerminationWrapper: terminations are treated as truncations.

If an environment terminates on success, a learner that sees terminations is rewarded or punished
for finishing, whatever the reward function says. VLM-RM (Rocamonde et al., 2024) trains without
terminations.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from embodied.core.env import Step
from embodied.core.wrapper import Wrapper


class NoTerminationWrapper(Wrapper):
    """Turns `terminated` into `truncated`. Episodes end as before, but the value of the final
    state is bootstrapped."""

    hides_terminations = True

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        never = torch.zeros_like(step.terminated)
        return replace(step, terminated=never, truncated=step.ended)
