"""Learner: named pure losses and one `update`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


class Learner(nn.Module):
    """Turns batches into a better policy.

    `data` says what it is fed: "offline" (a fixed set), "replay" (a growing one) or "rollout" (only
    the newest steps); `rows` what a demonstration becomes: decisions with rewards, or chunks of
    actions to imitate. `batch_size` is the number of rows of one `update`; `gamma` and `n_step`
    say how rows are to be discounted when they are stored; `columns` what they carry besides, of
    what embodied.buffers.trajectory_columns knows ("returns", "next_action"). Where a batch has a
    column
    `weight`, a learner that knows how multiplies its errors by it, and leaves their sizes, without
    it, in `priority` [batch_size].

    A learner from "rollout" says its `horizon` instead of a batch size: decisions of every row and
    update. Its batch is in the order of time, leading dimensions [T, B]: `obs/*`, `action` (the
    policy's `row/action` if it gives one), the policy's other `row/*` by name, `reward` (discounted
    within a chunk), `discount` (gamma^k; 0 only where the world ended), `next_obs/*` (the true
    successor, also at a time limit: bootstrap only from it), and bool: `ended` (the episode did,
    with this decision), `first` (it began with it), `valid` (false: padding after a row's last
    decision, as rows close different numbers of chunks). `carry/*` [B, ...] is what the policy
    remembered before the first decision (not yet forgotten where that one is `first`). The actor
    stores no densities or values: `update` begins by computing them with the parameters that acted.

    A learner whose `estimates` are not None leaves there what it made of its last batch, in the
    world's own rewards: `advantage` and `value` [T, B]; and where that batch had `learn` [T, B]
    (bool), it made no gradient of the decisions where it is false.
    """

    data: ClassVar[Literal["offline", "replay", "rollout"]]
    rows: ClassVar[Literal["decisions", "chunks"]] = "decisions"
    policy: Policy
    batch_size: int
    horizon: int = 0
    gamma: float = 0.99
    n_step: int = 1
    columns: tuple[str, ...] = ()
    priority: Tensor | None = None
    estimates: Tensors | None = None
    node: dict[str, Any]

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        """One update from `batch`; metrics are detached 0-d tensors, still on the device."""
        raise NotImplementedError(f"{type(self).__name__} does not update")

    def fit(self, rows: Tensors) -> None:
        """Set the normalisers of the policy (and of critics, where there are any) from data."""
        self.policy.fit(rows)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By name, so that they are saved and resumed."""
        return {}

    def get_state(self) -> dict[str, Any]:
        """Parameters, targets, optimiser moments: all that an exact resume needs."""
        optimizers = {name: o.state_dict() for name, o in self.optimizers().items()}
        return {"module": self.state_dict(), "optimizers": optimizers}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `get_state`."""
        self.load_state_dict(state["module"])
        for name, optimizer in self.optimizers().items():
            optimizer.load_state_dict(state["optimizers"][name])
