"""Transitions as batches for behaviour cloning, for learners that also clone."""

from __future__ import annotations

import torch

from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


def behaviour(rows: Tensors, policy: Policy) -> Tensors:
    """`rows` with `action` [n, H * A] as `policy.loss` takes them: [n, H, A], all steps valid.

    A chunk that an episode's end cut counts whole: what was planned beyond it, or its last action
    again. ConfigError where the actions are not the policy's whole chunks.
    """
    action, shape = rows["action"], policy.spec.act.shape
    if action.shape[1] != policy.chunk * policy.spec.act.size:
        raise ConfigError(
            f"rows hold {action.shape[1] // policy.spec.act.size} steps a decision and the policy "
            f"plans {policy.chunk}: leave execute out, this learner values whole chunks"
        )
    action = action.reshape(-1, policy.chunk, *shape)
    valid = torch.ones(action.shape[:2], dtype=torch.bool, device=action.device)
    return {
        **{k: v for k, v in rows.items() if k.startswith("obs/")},
        "action": action,
        "valid": valid,
    }
