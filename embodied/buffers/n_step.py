"""NStepBuffer: accumulates n-step returns before transitions go into the replay buffer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors


@runtime_checkable
class KeepsSingle(Protocol):
    """A learner whose n-step transitions may also need the columns of their first decision."""

    keep_single: bool
    """Whether they do (see `NStepBuffer`)."""


class NStepBuffer:
    """n-step returns over the last `n` decisions of every environment; a decision may be a chunk of
    several steps, so that parallel envs finish theirs at different times.

    `held` [n, B, ...] keeps the pending decisions of B envs; the discounted reward of each new
    decision is added to all of its env's. A decision is returned after n decisions, or when its
    episode ends. With `keep_single`, a transition also has the columns of its own decision alone:
    `single/next_obs/*` and `single/discount`.
    """

    def __init__(self, n: int, keep_single: bool = False) -> None:
        self.n, self.keep_single = n, keep_single
        self.held: Tensors = {}
        self.used = torch.empty(0)
        self.slot = torch.empty(0, dtype=torch.int64)  # [B]: where each env's next decision is put

    def push(self, rows: Tensors, closed: Tensor | None, ended: Tensor) -> Tensors:
        """Add the decisions `rows` that finished in parallel envs `closed` (None: all) [k].

        Returns the transitions whose n-step returns are complete. `ended` [B] (bool): the episodes
        that end now, whose decisions are finished.
        """
        if not rows:
            return rows
        kept = {k: v for k, v in rows.items() if not k.startswith("next_obs/")}
        if self.keep_single:
            single = (k for k in rows if k.startswith("next_obs/") or k == "discount")
            kept |= {f"single/{k}": rows[k] for k in single}
        count = len(ended)
        if not self.held:
            self.held = {k: v.new_zeros(self.n, count, *v.shape[1:]) for k, v in kept.items()}
            self.used = torch.zeros(self.n, count, dtype=torch.bool, device=ended.device)
            self.slot = torch.zeros(count, dtype=torch.int64, device=ended.device)
        envs = torch.arange(count, device=ended.device) if closed is None else closed
        reward, discount = self.held["reward"], self.held["discount"]
        reward[:, envs] += self.used[:, envs] * discount[:, envs] * rows["reward"]
        discount[:, envs] *= rows["discount"]
        slot = self.slot[envs]
        for key, value in kept.items():
            self.held[key][slot, envs] = value
        self.used[slot, envs] = True
        slot = (slot + 1) % self.n
        self.slot[envs] = slot
        leaving = self.used[:, envs] & ended[envs]
        every = torch.arange(len(envs), device=ended.device)
        leaving[slot, every] |= self.used[slot, envs]  # the oldest: n decisions have passed
        at, row = leaving.nonzero(as_tuple=True)
        if not len(row):
            return {}
        self.used[at, envs[row]] = False
        out = {key: value[at, envs[row]] for key, value in self.held.items()}
        return out | {k: rows[k].index_select(0, row) for k in rows if k.startswith("next_obs/")}

    def get_state(self) -> dict[str, Any]:
        own = {"used": self.used.clone(), "slot": self.slot.clone()}
        return {"pending": tt.each(self.held, torch.clone), **own}

    def set_state(self, state: dict[str, Any]) -> None:
        self.held, self.used, self.slot = state["pending"], state["used"], state["slot"]
