"""CriticProgress: leaves out recorded steps after which a critic's value falls (GR-RL's filter).

GR-RL (ByteDance Seed, 2025). Progress is the value of the recorded action by the critics of an
offline run on a sparse reward, best categorical ones (`learner=td3_bc learner.atoms=101
learner.values=[0,1]`), which stay in [0, 1]:

    rho_t = mean_i E Q_i(o_t, a_t),   w_t = 0 if rho_t - min_{t < j <= t + window} rho_j > delta

within an episode; all other steps have the weight 1. It looks ahead, as a wrong action shows later.
Failed prefixes of recordings, on which the critics learn what leads nowhere, are made by `demos
retries`. The paper gives neither the window nor delta: the window here is a chunk by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.buffers.weighted import Weights
from embodied.core.bounds import Count, NonNegative
from embodied.core.build import ConfigError
from embodied.core.tensors import each, under
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import transitions
from embodied.learners.learner import Learner
from embodied.learners.run_value import critics_of

ROWS = 4096  # steps that the critics see at once


@dataclass(frozen=True)
class Config:
    run: str = ""  # run of an offline learner with critics of actions, whose values are progress
    delta: NonNegative = 0.05  # fall of progress that is still kept, as a return
    window: Count = 8  # steps ahead in which progress may not fall further


class CriticProgress(Weights):
    """Weight 1 of the steps that keep their progress, 0 of the others, [N]."""

    def __init__(self, config: Config) -> None:
        if not config.run:
            raise ConfigError(
                "progress is the value of a trained critic: weighting.run=RUN, as of "
                "experiment=fr3_insert_gr_rl_critic"
            )
        self.config = config

    def __call__(self, episodes: Episodes) -> Tensor:
        kept = keeps_progress(self.progress(episodes), episodes.length, self.config)
        if not kept.any():
            raise ConfigError("every step loses progress: a larger weighting.delta")
        return kept.double()

    @torch.no_grad()
    def progress(self, episodes: Episodes) -> Tensor:
        """rho [N] of all steps. ConfigError or SpecMismatch if the run has no fitting critics."""
        learner, critic, trained = critics_of(self.config.run, episodes.spec)
        chunk = trained.get("execute") or learner.policy.chunk
        rows = transitions(episodes, learner.gamma, chunk)
        found = [
            value(learner, critic(under(part, "obs"), part["action"]))
            for first in range(0, len(rows["action"]), ROWS)
            for part in (load(each(rows, lambda v, at=first: v[at : at + ROWS])),)
        ]
        return torch.cat(found)


def value(learner: Learner, q: Tensor) -> Tensor:
    """Mean over critics of their expected values, [N], of their output [E, N] or [E, N, atoms]."""
    support = getattr(learner, "support", None)
    return (q if support is None else support.mean(q)).mean(0)


def keeps_progress(progress: Tensor, length: Tensor, config: Config) -> Tensor:
    """Which steps [N] (bool) do not lose more than `delta` of `progress` [N] within the window, in
    concatenated episodes of `length` [E] steps each."""
    last = torch.repeat_interleave(length.cumsum(0) - 1, length)[:, None]
    ahead = torch.arange(len(progress))[:, None] + torch.arange(1, config.window + 1)
    lowest = progress[torch.minimum(ahead, last)].amin(1)
    return progress - lowest <= config.delta
