"""HistoryEncoder: an encoder with a short code of the past, by convolutions over time.

Of SkillMimic-V2 (Yu et al., 2025): what a few numbers say of the last frames stands for what is
not observed. Here the code is learned with the policy; the authors pretrain it to predict the next
state. `policy.extractor=embodied.policies.networks.history.HistoryEncoder` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig

FRAMES, FRAME = "history_frames", "reference"
CHANNELS = (64, 32)  # of the convolutions of kernel 3
CODE = 8  # numbers of the code; the released model has 3


class HistoryEncoder(Encoder):
    """Encodes `history_frames` [n, K D] (the frames of `embodied.envs.wrappers.mimic`, whose
    `reference` has D elements) to CODE numbers, and the other observations as `Encoder` does."""

    def __init__(
        self,
        obs: Mapping[str, Leaf],
        images: ImageConfig | None = None,
        asymmetric: bool = False,
        points: PointConfig | None = None,
    ) -> None:
        if FRAMES not in obs or FRAME not in obs:
            raise ConfigError(f"HistoryEncoder needs the observations {FRAMES} and {FRAME}")
        others = {name: leaf for name, leaf in obs.items() if name != FRAMES}
        super().__init__(others, images, asymmetric, points)
        self.width = obs[FRAME].size
        steps = obs[FRAMES].size // self.width
        layers: list[nn.Module] = []
        sizes = (self.width, *CHANNELS)
        for inputs, outputs in zip(sizes, CHANNELS, strict=False):
            layers += [nn.Conv1d(inputs, outputs, 3, padding=1), nn.ReLU()]
        self.past = nn.Sequential(*layers, nn.Flatten(), nn.Linear(CHANNELS[-1] * steps, CODE))
        self.names = [*self.names, FRAMES]
        self.size += CODE

    def forward(self, obs: Tensors) -> Tensor:
        frames = obs[FRAMES].unflatten(1, (-1, self.width)).transpose(1, 2)
        return torch.cat([super().forward(obs), self.past(frames)], 1)
