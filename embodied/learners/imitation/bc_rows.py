"""Convert transitions to behaviour-cloning batches, for RL learners with a BC loss."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


def behaviour(transitions: Tensors, policy: Policy) -> Tensors:
    """Convert transitions with `action` [n, H * A] to the form of `policy.loss`: `action` [n, H, A]
    and `valid` [n, H], the steps that were executed before the episode ended (`executed_steps`).

    ConfigError if the actions are not whole chunks of the policy.
    """
    action = transitions["action"]
    shape = policy.spec.act.shape
    if action.shape[1] != policy.chunk * policy.spec.act.size:
        raise ConfigError(
            f"transitions hold {action.shape[1] // policy.spec.act.size} steps per decision and "
            f"policy.chunk is {policy.chunk}: leave execute out, as this learner needs whole chunks"
        )
    action = action.reshape(-1, policy.chunk, *shape)
    return {
        **{k: v for k, v in transitions.items() if k.startswith("obs/")},
        "action": action,
        "valid": valid_steps(transitions, policy.chunk),
    }


def valid_steps(transitions: Tensors, chunk: int) -> Tensor:
    """Return which steps [n, H] (bool) of the transitions' chunks were executed: all, unless the
    episode ended within a chunk. With H = 1 there is no `executed_steps` [n]: all are valid."""
    action = transitions["action"]
    if chunk == 1:
        return torch.ones(len(action), 1, dtype=torch.bool, device=action.device)
    return torch.arange(chunk, device=action.device) < transitions["executed_steps"][:, None]
