"""StudentEstimates: per-episode averages of the student's advantages and values, for a teacher.

An on-policy learner computes them per batch, which may hold parts of several episodes. Sums are
kept by ticket until an episode has ended and all of its steps are known. Scores of prioritized
level replay (Jiang, Grefenstette and Rocktaschel, 2021):

    gain = 1/T sum_t max(A_t, 0),   error = 1/T sum_t |A_t|,   value = 1/T sum_t V(s_t)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from embodied.core.remembered import Remembered
from embodied.teachers.teacher import Outcome, Teacher

SUMS = 4  # steps, gain, error, value


class StudentEstimates(Remembered):
    """Combines outcomes (`episodes_ended`) with estimates (`add_steps`) for the teacher."""

    remembered = ("sums", "ended")

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.sums: dict[int, list[float]] = {}
        self.ended: dict[int, list[float]] = {}

    def episodes_ended(self, ticket: Tensor, outcome: Outcome) -> None:
        """Episodes `ticket` [n] have ended; estimates of their last steps follow."""
        columns = (outcome.ret, outcome.success, outcome.length)
        rows = torch.stack([column.double().cpu() for column in columns], 1).tolist()
        self.ended |= dict(zip(ticket.tolist(), rows, strict=True))

    def add_steps(self, ticket: Tensor, advantage: Tensor, value: Tensor) -> None:
        """Add estimates [N] of all steps since the last call, of episodes `ticket` [N]; then report
        the episodes that have ended to the teacher."""
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
        none = [0.0] * SUMS  # 0 / 0: NaN, unknown
        sums = torch.tensor([self.sums.pop(number, none) for number in self.ended]).double()
        self.ended = {}
        self.teacher.update(tickets, Outcome(*ends.T, *(sums[:, 1:] / sums[:, :1]).T))

    def clear(self) -> None:
        """Forget the running episodes: they were interrupted."""
        self.sums = {}
        self.ended = {}
