"""A task of one step with two good actions, and critics whose values are known."""

from __future__ import annotations

from typing import Any

import torch

from embodied.core.tensors import Tensors
from tests.builders import still


def two_modes(n: int) -> Tensors:
    """`n` transitions with actions near -0.5 and 0.5, as often; the latter have the reward 1."""
    side = (torch.rand(n) > 0.5).float() * 2 - 1
    action = (0.5 * side + 0.05 * torch.randn(n))[:, None]
    zeros = torch.zeros(n, 1)
    return still(zeros, action, (action[:, 0] > 0).float())


@torch.no_grad()
def slopes(critic: Any, values: list[float]) -> None:
    """Make linear critic i answer values[i] * a."""
    critic.ensemble.weights[0].zero_()
    critic.ensemble.biases[0].zero_()
    critic.ensemble.weights[0][:, -1, 0] = torch.tensor(values)
