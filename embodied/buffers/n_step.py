"""NStepBuffer: n-step returns of decisions that are still short of their n steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.tensors import Tensors


class NStepBuffer:
    """n-step returns over the last `n` decisions of every environment.

    `held` keeps [n, B, ...] decisions; each new one adds its reward, discounted, to all that are
    held. A decision leaves when n of them have passed, or, all together, when the episode ends.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.held: Tensors = {}
        self.used = torch.empty(0)
        self.slot = 0

    def push(self, rows: Tensors, closed: Tensor | None, ended: Tensor) -> Tensors:
        """Take rows that closed in environments `closed` (None: all); return those that left."""
        if not rows:
            return rows
        if closed is not None:
            raise ValueError(
                "n_step > 1 is for one-step decisions; chunks are n-step by themselves"
            )
        kept = {k: v for k, v in rows.items() if not k.startswith("next_obs/")}
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
        return {"held": tt.each(self.held, torch.clone), "used": self.used, "slot": self.slot}

    def set_state(self, state: dict[str, Any]) -> None:
        self.held, self.used, self.slot = state["held"], state["used"], state["slot"]
