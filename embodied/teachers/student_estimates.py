"""Estimates: what a student thought of every step of an episode, gathered for its teacher.

A learner says what it makes of its newest steps only when it has a batch of them, which may hold
the end of one episode and the beginning of the next; sums are kept by ticket until both the episode
and all of its steps are known. Scores after Jiang, Grefenstette and Rocktaschel, 2021:

    gain = 1/T sum_t max(A_t, 0),   error = 1/T sum_t |A_t|,   value = 1/T sum_t V(s_t)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.teachers.teacher import Outcome, Teacher

SUMS = 4  # steps, gain, error, value


class Estimates:
    """Between a world (`end`), a learner (`tell`) and the teacher: it hears of an episode once."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.sums: dict[int, list[float]] = {}
        self.ended: dict[int, list[float]] = {}

    def end(self, ticket: Tensor, outcome: Outcome) -> None:
        """Episodes `ticket` [n] have ended; their last steps are still to be told of."""
        columns = (outcome.ret, outcome.success, outcome.length)
        rows = torch.stack([column.double().cpu() for column in columns], 1).tolist()
        self.ended |= dict(zip(ticket.tolist(), rows, strict=True))

    def tell(self, ticket: Tensor, advantage: Tensor, value: Tensor) -> None:
        """Steps of episodes `ticket` [N], all that there were since the last time. Whatever has
        ended is then complete, and the teacher hears of it."""
        known, at = np.unique(ticket.cpu().numpy(), return_inverse=True)
        gap, worth = (part.double().cpu().numpy() for part in (advantage, value))
        columns = (np.ones_like(gap), gap.clip(0), abs(gap), worth)
        sums = np.stack([np.bincount(at, column, len(known)) for column in columns], 1)
        for number, row in zip(known.tolist(), sums.tolist(), strict=True):
            before = self.sums.get(number, [0.0] * SUMS)
            self.sums[number] = [a + b for a, b in zip(before, row, strict=True)]
        self._close()

    def _close(self) -> None:
        if not self.ended:
            return
        tickets = torch.tensor(list(self.ended))
        ends = torch.tensor(list(self.ended.values()), dtype=torch.float64)
        none = [0.0] * SUMS  # 0 / 0 is what is not known
        sums = torch.tensor([self.sums.pop(number, none) for number in self.ended]).double()
        self.ended = {}
        self.teacher.update(tickets, Outcome(*ends.T, *(sums[:, 1:] / sums[:, :1]).T))

    def clear(self) -> None:
        """Forget the episodes that are running: they were broken off."""
        self.sums, self.ended = {}, {}

    def get_state(self) -> dict[str, Any]:
        return {"sums": dict(self.sums), "ended": dict(self.ended)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on exactly from `get_state`."""
        self.sums, self.ended = dict(state["sums"]), dict(state["ended"])
