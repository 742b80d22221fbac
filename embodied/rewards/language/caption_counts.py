"""Which captions came up how often, which are labelled, and which are to be asked about.

A caption is due when it comes up first. Once asked it is not due again; where nothing useful was
said, it is, when it has come up twice as often: what is common is asked about soon again, what
nobody can judge costs little, and nothing is given up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NEVER = np.iinfo(np.int64).max


class CaptionCounts:
    """Counters by caption number; number 0, nothing said, is never due."""

    def __init__(self) -> None:
        self.visits = np.zeros(0, np.int64)
        self.due = np.zeros(0, np.int64)  # visits at which it is asked about (again)
        self.labelled = np.zeros(0, np.bool_)

    def count(self, numbers: NDArray[np.int64]) -> None:
        """These captions came up [n]."""
        if (room := int(numbers.max()) + 1) > len(self.visits):
            more = 2 * room - len(self.visits)
            self.visits = np.append(self.visits, np.zeros(more, np.int64))
            self.due = np.append(self.due, np.ones(more, np.int64))
            self.labelled = np.append(self.labelled, np.zeros(more, np.bool_))
        np.add.at(self.visits, numbers, 1)

    def wanted(self, numbers: NDArray[np.int64]) -> list[int]:
        """Those of `numbers` that are due, each once."""
        due = (self.visits[numbers] >= self.due[numbers]) & (numbers > 0)
        return np.unique(numbers[due]).tolist()

    def others(self, number: int) -> NDArray[np.int64]:
        """The other captions that came up."""
        met = np.flatnonzero(self.visits[1:]) + 1
        return met[met != number]

    def asked(self, number: int) -> None:
        """Not due before there is an answer."""
        self.due[number] = NEVER

    def again(self, number: int) -> None:
        """Nothing useful was said."""
        if not self.labelled[number]:
            self.due[number] = 2 * max(int(self.visits[number]), 1)

    def settled(self, number: int) -> None:
        """There is a label."""
        self.labelled[number], self.due[number] = True, NEVER

    @property
    def coverage(self) -> float:
        """The share of what came up that is labelled."""
        known = float(self.visits[1:].sum())
        return float(self.visits[self.labelled].sum()) / known if known else 0.0

    def get_state(self) -> dict[str, Any]:
        parts = {"visits": self.visits, "due": self.due, "labelled": self.labelled}
        return {name: torch.from_numpy(part.copy()) for name, part in parts.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.visits, self.due = state["visits"].numpy().copy(), state["due"].numpy().copy()
        self.labelled = state["labelled"].numpy().copy()
