"""The image encoder of LeRobot's Diffusion policy: ResNet and spatial softmax (Finn et al., 2016).

The spatial softmax gives the expected image coordinates of every channel's activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count
from embodied.policies.networks.resnet import channels_of, group_norm, resnet


@dataclass(frozen=True)
class ImageConfig:
    """Settings of LeRobot's image encoder."""

    backbone: str = "resnet18"  # resnet18, resnet34, ...
    resize: tuple[Count, Count] | None = None  # height and width in pixels (null: as they are)
    crop: tuple[Count, Count] | None = None  # of the centre, after `resize` (null: all)
    groups: bool = False  # group instead of batch normalisation
    keypoints: Count = 32  # of the spatial softmax
    separate: bool = True  # one encoder for each camera


class ImageEncoder(nn.Module):
    """Maps images [n, 3, H, W] to features [n, 2 * keypoints]."""

    def __init__(self, config: ImageConfig, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        norm = group_norm if config.groups else nn.BatchNorm2d
        # By their numbers, as LeRobot has them.
        self.backbone = nn.Sequential(*resnet(config.backbone, norm).children())
        height, width = config.crop or config.resize or shape[1:]
        for _ in range(5):  # five layers with stride 2
            height, width = (height + 1) // 2, (width + 1) // 2
        channels = channels_of(config.backbone)
        self.pool = SpatialSoftmax(channels, height, width, config.keypoints)
        self.size = 2 * config.keypoints
        self.out = nn.Linear(self.size, self.size)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        if config.resize is not None and x.shape[-2:] != config.resize:
            x = functional.interpolate(
                x, list(config.resize), mode="bilinear", align_corners=False, antialias=True
            )
        if config.crop is not None:
            x = center_crop(x, config.crop)
        return self.out(self.pool(self.backbone(x)).flatten(1)).relu()


class SpatialSoftmax(nn.Module):
    """Maps [n, C, H, W] to keypoints [n, K, 2], x and y in [-1, 1]."""

    pos_grid: Tensor

    def __init__(self, channels: int, height: int, width: int, keypoints: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, keypoints, 1)
        x, y = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
        grid = torch.tensor(np.stack([x.ravel(), y.ravel()], 1), dtype=torch.float32)
        self.register_buffer("pos_grid", grid)

    def forward(self, features: Tensor) -> Tensor:
        weights = cast(Tensor, self.nets(features)).flatten(2).softmax(-1)
        return weights @ self.pos_grid


def center_crop(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle of images [..., H, W]."""
    top, left = (round((have - want) / 2) for have, want in zip(x.shape[-2:], size, strict=True))
    return x[..., top : top + size[0], left : left + size[1]]
