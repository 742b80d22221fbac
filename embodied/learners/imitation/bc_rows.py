"""Convert transitions to behaviour-cloning batches, for RL learners with a BC loss."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


def behaviour(rows: Tensors, policy: Policy) -> Tensors:
    """Transitions `rows` with `action` [n, H * A] in the form of `policy.loss`: `action` [n, H, A]
    and `valid` [n, H]: the steps that were executed before the episode ended (`executed_steps`).

    ConfigError if the actions are not whole chunks of the policy.
    """
    action, shape = rows["action"], policy.spec.act.shape
    if action.shape[1] != policy.chunk * policy.spec.act.size:
        raise ConfigError(
            f"transitions hold {action.shape[1] // policy.spec.act.size} steps per decision and "
            f"policy.chunk is {policy.chunk}: leave execute out, as this learner needs whole chunks"
        )
    action = action.reshape(-1, policy.chunk, *shape)
    return {
        **{k: v for k, v in rows.items() if k.startswith("obs/")},
        "action": action,
        "valid": valid_steps(rows, policy.chunk),
    }


def valid_steps(rows: Tensors, chunk: int) -> Tensor:
    """The steps [n, H] (bool) of the chunks of `rows` that were executed: all, unless the episode
    ended within a chunk. With H = 1 there is no `executed_steps` [n] and each step is valid."""
    action = rows["action"]
    if chunk == 1:
        return torch.ones(len(action), 1, dtype=torch.bool, device=action.device)
    return torch.arange(chunk, device=action.device) < rows["executed_steps"][:, None]
