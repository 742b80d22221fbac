"""Reward-aligned behaviour cloning: imitates the steps of recordings after which progress rose.

RA-BC, of SARM (Chen et al., 2025). With the progress Phi that a model predicts, the gain of step t
is g_t = Phi_{t+H} - Phi_t (Phi at the end of the episode, if that is sooner), and its weight

    w_t = 1 if g_t > kappa,  0 if g_t < 0,  else clip((g_t - (m - 2 s)) / (4 s), 0, 1)

with mean m and standard deviation s of all gains. The model is ReWiND's (`rewind`), fitted to
`rewind.demos`, instead of SARM's with stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied.buffers.weighted import Weights
from embodied.core.bounds import Count, CountOrZero, Number
from embodied.core.build import ConfigError
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import observations
from embodied.rewards.demonstrations import rewind
from embodied.rewards.demonstrations.rewind import PROGRESS


@dataclass(frozen=True)
class Config:
    """Settings of reward-aligned behaviour cloning."""

    horizon: Count = 10  # steps over which progress is compared: the length of the policy's chunk
    kappa: Number = 0.01  # a gain in progress above it has the weight 1
    seed: CountOrZero = 0  # seed of the progress model's fit
    rewind: rewind.Config = field(default_factory=rewind.Config)  # the progress model


class ProgressGain(Weights):
    """A weight for every step."""

    def __init__(self, config: Config) -> None:
        if not config.rewind.demos:
            raise ConfigError(
                "progress is learned from good demonstrations: weighting.rewind.demos=DIR"
            )
        self.config = config

    def __call__(self, episodes: Episodes) -> Tensor:
        """Weights [N] (float64) of all steps."""
        cpu = torch.device("cpu")
        model = rewind.Rewind(self.config.rewind, episodes.spec, cpu, self.config.seed, None)
        parts = []
        for number in range(len(episodes)):
            progress = model.augment_episode(observations(episodes.episode(number)))[PROGRESS]
            last = len(progress) - 1
            later = (torch.arange(last) + self.config.horizon).clamp(max=last)
            parts.append(progress[later] - progress[:-1])
        return weights(torch.cat(parts).double(), self.config.kappa)


def weights(gain: Tensor, kappa: float) -> Tensor:
    """w [N] of gains [N]. ConfigError if no gain is above 0."""
    mean, std = gain.mean(), gain.std(correction=0)
    soft = ((gain - (mean - 2 * std)) / (4 * std).clamp(min=1e-9)).clamp(0, 1)
    found = torch.where(gain > kappa, 1.0, soft) * (gain >= 0)
    if not found.any():
        raise ConfigError("no step of these recordings gains progress: see reward score ... rise")
    return found
