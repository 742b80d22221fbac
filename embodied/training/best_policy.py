"""BestPolicy: keeps the policy with the lowest held-out loss of a run, which is what it saves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from embodied.core.policy import Policy


class BestPolicy:
    """`policy`: the best one that was offered (None: none yet); `score`, `step`: its own."""

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.score, self.step = float("inf"), 0

    def offer(self, policy: Policy, score: float, step: int) -> None:
        """Keep a copy of `policy` if its `score` is the lowest so far."""
        if self.policy is None or score < self.score:
            self.policy = copy.deepcopy(policy).eval()
            self.score, self.step = score, step

    def metrics(self) -> dict[str, float]:
        return {"best_loss": self.score, "best_step": float(self.step)}

    def get_state(self) -> dict[str, Any]:
        return {"score": self.score, "step": self.step}

    def set_state(self, state: Mapping[str, Any], policy: Policy) -> None:
        """Restore what `get_state` returned, with the saved `policy`."""
        self.policy, self.score, self.step = policy.eval(), state["score"], state["step"]
