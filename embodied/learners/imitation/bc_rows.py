"""Convert transitions to behaviour-cloning batches, for RL learners with a BC loss."""

from __future__ import annotations

import torch

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


def behaviour(rows: Tensors, policy: Policy) -> Tensors:
    """Transitions `rows` with `action` [n, H * A] in the form of `policy.loss`: `action` [n, H, A]
    and `valid` [n, H], all true.

    Chunks cut short by the end of an episode are used in full (the rest of the plan, or the last
    action repeated). ConfigError if the actions are not whole chunks of the policy.
    """
    action, shape = rows["action"], policy.spec.act.shape
    if action.shape[1] != policy.chunk * policy.spec.act.size:
        raise ConfigError(
            f"transitions hold {action.shape[1] // policy.spec.act.size} steps per decision and "
            f"policy.chunk is {policy.chunk}: leave execute out, as this learner needs whole chunks"
        )
    action = action.reshape(-1, policy.chunk, *shape)
    valid = torch.ones(action.shape[:2], dtype=torch.bool, device=action.device)
    return {
        **{k: v for k, v in rows.items() if k.startswith("obs/")},
        "action": action,
        "valid": valid,
    }
