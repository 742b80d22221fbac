"""ResNet backbones with torchvision's parameter names (He et al., 2016), to load trained weights.

The result of `resnet` ends with the last feature map; the classifier is left out. `norm` makes the
normalisation layer of a number of channels: `nn.BatchNorm2d`, `FrozenBatchNorm`, or groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError

Norm = Callable[[int], nn.Module]
DEPTHS: dict[str, tuple[int, int, int, int]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
BOTTLENECK = ("resnet50", "resnet101", "resnet152")


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with fixed statistics and affine parameters, all of them buffers."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [n, C, H, W]."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def group_norm(channels: int) -> nn.Module:
    """Group normalisation with 16 channels a group."""
    return nn.GroupNorm(channels // 16, channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    widening = 1

    def __init__(self, channels: int, width: int, stride: int, dilation: int, norm: Norm) -> None:
        super().__init__()
        if dilation > 1:
            raise ConfigError("dilation needs a ResNet of bottleneck blocks: resnet50 and larger")
        self.conv1 = conv(channels, width, 3, stride)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = norm(width)
        self.relu = nn.ReLU()
        self.downsample = shortcut(channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return self.relu(h + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, and a shortcut."""

    widening = 4

    def __init__(self, channels: int, width: int, stride: int, dilation: int, norm: Norm) -> None:
        super().__init__()
        wide = width * self.widening
        self.conv1 = conv(channels, width, 1)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, stride, dilation)
        self.bn2 = norm(width)
        self.conv3 = conv(width, wide, 1)
        self.bn3 = norm(wide)
        self.relu = nn.ReLU()
        self.downsample = shortcut(channels, wide, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return self.relu(h + (x if self.downsample is None else self.downsample(x)))


def resnet(name: str, norm: Norm, dilate_last: bool = False) -> nn.Sequential:
    """The layers up to the last feature map, named as in torchvision (conv1, bn1, ..., layer4).

    `dilate_last`: dilation instead of a stride in `layer4`. ConfigError for an unknown name.
    """
    if name not in DEPTHS:
        raise ConfigError(f"there is no backbone {name}; there are {', '.join(DEPTHS)}")
    block = Bottleneck if name in BOTTLENECK else BasicBlock
    layers = nn.Sequential()
    layers.add_module("conv1", nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False))
    layers.add_module("bn1", norm(64))
    layers.add_module("relu", nn.ReLU())
    layers.add_module("maxpool", nn.MaxPool2d(3, stride=2, padding=1))
    channels = 64
    for i, depth in enumerate(DEPTHS[name]):
        width = 64 * 2**i
        stride = 1 if i == 0 else 2
        dilated = dilate_last and i == 3
        parts = nn.Sequential()
        for j in range(depth):
            step = stride if j == 0 and not dilated else 1
            parts.append(block(channels, width, step, 2 if dilated and j else 1, norm))
            channels = width * block.widening
        layers.add_module(f"layer{i + 1}", parts)
    return layers


def channels_of(name: str) -> int:
    """The channels of the last feature map of `resnet(name)`."""
    return 512 * (4 if name in BOTTLENECK else 1)


def conv(channels: int, out: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size where the stride is 1."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(channels, out, kernel, stride, padding, dilation, bias=False)


def shortcut(channels: int, out: int, stride: int, norm: Norm) -> nn.Sequential | None:
    """The projection of a shortcut whose input has another shape than its output."""
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(conv(channels, out, 1, stride), norm(out))
