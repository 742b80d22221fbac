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
    """n-step returns over the last `n` decisions of every environment.

    `held` [n, B, ...] keeps the pending decisions; the discounted reward of each new decision is
    added to all of them. A decision is returned after n decisions, or when its episode ends. With
    `keep_single`, a transition also has the columns of its own decision alone: `single/next_obs/*`
    and `single/discount`.
    """

    def __init__(self, n: int, keep_single: bool = False) -> None:
        self.n, self.keep_single = n, keep_single
        self.held: Tensors = {}
        self.used = torch.empty(0)
        self.slot = 0

    def push(self, rows: Tensors, closed: Tensor | None, ended: Tensor) -> Tensors:
        """Add the decisions `rows` that finished in parallel envs `closed` (None: all).

        Returns the transitions whose n-step returns are complete.
        """
        if not rows:
            return rows
        if closed is not None:
            raise ValueError(
                "n_step > 1 needs one-step decisions; action chunks span several steps already: "
                "learner.n_step=1"
            )
        kept = {k: v for k, v in rows.items() if not k.startswith("next_obs/")}
        if self.keep_single:
            single = (k for k in rows if k.startswith("next_obs/") or k == "discount")
            kept |= {f"single/{k}": rows[k] for k in single}
        if not self.held:
            self.held = {k: v.new_zeros(self.n, *v.shape) for k, v in kept.items()}
            self.used = torch.zeros(self.n, len(ended), dtype=torch.bool, device=ended.device)
        self.held["reward"] += self.used * self.held["discount"] * rows["reward"]
        self.held["discount"] = self.held["discount"] * rows["discount"]
        for key, value in kept.items():
            self.held[key][self.slot] = value
        self.used[self.slot] = True
        self.slot = (self.slot + 1) % self.n
        leaving = self.used & ended
        leaving[self.slot] |= self.used[self.slot]  # the oldest: n decisions have passed
        self.used = self.used & ~leaving
        at, who = leaving.nonzero(as_tuple=True)
        if not len(who):
            return {}
        out = {key: value[at, who] for key, value in self.held.items()}
        return out | {k: rows[k].index_select(0, who) for k in rows if k.startswith("next_obs/")}

    def get_state(self) -> dict[str, Any]:
        return {"pending": tt.each(self.held, torch.clone), "used": self.used, "slot": self.slot}

    def set_state(self, state: dict[str, Any]) -> None:
        self.held, self.used, self.slot = state["pending"], state["used"], state["slot"]
