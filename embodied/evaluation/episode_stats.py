"""EpisodeStats: return, length, success and violations of the running episodes of a vector env."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.core.env import Step


class EpisodeStats:
    """Sums over the running episode of each parallel env, for training and evaluation.

    `reports_success` and `reports_violations` say whether the environment logs `success` and
    `violated`.
    """

    def __init__(self) -> None:
        self.running: Tensor | None = None
        self.reports_success = self.reports_violations = False

    def add(self, step: Step) -> Tensor:
        """Add one step of every parallel env.

        Returns the sums [4, B] (return, length, steps with success, steps with a violation), this
        step included; those of episodes that it ended (`step.ended`) are then set to zero.
        """
        success, violated = step.log.get("success"), step.log.get("violated")
        self.reports_success |= success is not None
        self.reports_violations |= violated is not None
        now = step.reward.new_ones(4, len(step.reward))
        now[0] = step.reward
        now[2] = 0.0 if success is None else success.to(now.dtype)
        now[3] = 0.0 if violated is None else violated.to(now.dtype)
        sums = now if self.running is None else self.running + now
        self.running = sums * ~step.ended
        return sums


class EpisodeMeans:
    """Means over the episodes that have ended since the last `drain`."""

    def __init__(self) -> None:
        self.stats = EpisodeStats()
        self.ended: list[Tensor] = []

    def add(self, step: Step) -> None:
        """Add one step of every parallel env."""
        sums = self.stats.add(step)
        if step.ended.any():
            self.ended.append(sums[:, step.ended])

    def drain(self, prefix: str = "") -> dict[str, float]:
        """The means as metrics with names after `prefix`, then reset; {} if no episode ended."""
        if not self.ended:
            return {}
        returns, lengths, won, violated = torch.cat(self.ended, 1)
        self.ended = []
        means = {"return": returns.mean(), "length": lengths.mean()}
        if self.stats.reports_success:
            means["success"] = (won > 0).float().mean()
        if self.stats.reports_violations:
            means["violated"] = (violated > 0).float().mean()
        return {f"{prefix}{name}": value.item() for name, value in means.items()}
