"""Hover reward of the quadrotor: a survival bonus minus squared errors (Eschmann et al., 2024).

    r = 2 - 1/2 (w_p |p|^2 + 5 (1 - q_w^2) + w_v |v|^2 + w_a |a - a_hover|^2)

and 0 in the step that leaves the box. The weights may be increased during training.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from embodied.core.build import registered
from embodied.core.tensors import Tensors
from embodied.embodiments.crazyflie import PAPER

TARGET = {"position": 40.0, "velocity": 1.0, "action": 1.0}
"""The weights that flights are judged by."""


def hover(
    state: Tensor, action: Tensor, weights: Mapping[str, float], level: float = PAPER.hover
) -> Tensor:
    """Rewards [N] of noise-free states [N, 15 or more] (place, rotation row by row, velocity, ...)
    and the actions [N, 4] taken in them; `level` is the action that carries the weight."""
    tilt = 5 * 0.25 * (3 - state[:, 3:12:4].sum(1))  # 4 q_w^2 is the trace + 1
    place = state[:, :3].square().sum(1)
    velocity = state[:, 12:15].square().sum(1)
    effort = (action - level).square().sum(1)
    wrong = weights["position"] * place + weights["velocity"] * velocity
    return 2 - 0.5 * (wrong + tilt + weights["action"] * effort)


@registered("scheduled reward")
def hover_rows(rows: Tensors, weights: Mapping[str, float], level: float = PAPER.hover) -> Tensor:
    """`hover` of stored rows of one step each: `obs/critic/state`, `action`, `discount`."""
    return hover(rows["obs/critic/state"], rows["action"], weights, level) * (rows["discount"] > 0)
