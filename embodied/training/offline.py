"""The offline loop: batches from a fixed set, one update each."""

from __future__ import annotations

from typing import Any

from embodied.buffers.source import Source
from embodied.learners.learner import Learner
from embodied.training.trainer import Keeper


class Offline:
    """`steps` counts updates."""

    def __init__(self, learner: Learner, source: Source) -> None:
        self.learner, self.source = learner, source

    def run(self, keeper: Keeper) -> None:
        while keeper.running:
            metrics = self.learner.update(self.source.sample(self.learner.batch_size))
            keeper.advance(1, metrics)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """The data are read again and sampling follows torch's generator: nothing to restore."""
