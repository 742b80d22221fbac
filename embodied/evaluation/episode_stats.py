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
    """Means over the episodes that have ended since the last `drain`; only that waits for a GPU."""

    def __init__(self) -> None:
        self.stats = EpisodeStats()
        self.totals: Tensor | None = None  # [5]: episodes, and sums over them
        self.chosen: list[Tensor] = []  # of each step: the share of envs in a person's hands

    def add(self, step: Step) -> None:
        """Add one step of every parallel env."""
        returns, lengths, won, violated = self.stats.add(step)
        columns = [torch.ones_like(returns), returns, lengths, won > 0, violated > 0]
        each = torch.stack([column.double() for column in columns])
        totals = torch.where(step.ended, each, 0.0).sum(1)
        self.totals = totals if self.totals is None else self.totals + totals
        if "intervened" in step.log:
            self.chosen.append(step.log["intervened"].double().mean())

    def forget(self, env_ids: Tensor) -> None:
        """Leave out the running episodes of parallel envs `env_ids` [n], which were lost."""
        if self.stats.running is not None:
            self.stats.running[:, env_ids] = 0.0

    def drain(self, prefix: str = "") -> dict[str, float]:
        """The means as metrics with names after `prefix`, then reset; without an episode that ended
        only the share of steps that a person chose, where there may be one."""
        chosen, self.chosen = self.chosen, []
        share = {f"{prefix}intervened": float(torch.stack(chosen).mean())} if chosen else {}
        count, *sums = [0.0] if self.totals is None else self.totals.tolist()
        self.totals = None
        if not count:
            return share
        names = ["return", "length"]
        names += ["success"] if self.stats.reports_success else [""]
        names += ["violated"] if self.stats.reports_violations else [""]
        means = zip(names, sums, strict=True)
        return {f"{prefix}{name}": value / count for name, value in means if name} | share
