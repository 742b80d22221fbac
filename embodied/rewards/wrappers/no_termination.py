"""Endless: no end is told to the learner, so that nothing but the reward says what success is.

A world that ends at success pays, to a learner that sees the end, for finishing or for not
finishing, whatever its reward; VLM-RM (Rocamonde et al., 2024) trains without terminations.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from embodied.core.env import Step
from embodied.core.wrapper import Wrapper


class Endless(Wrapper):
    """Rows still begin again where they ended, but as if the clock had run out: the value of what
    would have followed counts."""

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        never = torch.zeros_like(step.terminated)
        return replace(step, terminated=never, truncated=step.ended)
