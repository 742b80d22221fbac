"""The 1D U-Net of LeRobot's Diffusion policy, with its tensor names (Chi et al., 2023).

It differs from `embodied.policies.generative.denoisers.UNet`: two residual blocks per level,
transposed convolutions, a condition that every block projects, and FiLM as scale * h + bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count


@dataclass(frozen=True)
class UNetConfig:
    """Settings of LeRobot's U-Net."""

    channels: tuple[Count, ...] = (512, 1024, 2048)  # of each level, half as long as the last
    kernel: Count = 5  # width of a convolution in steps, odd
    groups: Count = 8  # of group normalisation
    time_dim: Count = 128  # size of the time embedding, even
    scale: bool = True  # FiLM scales too, instead of adding only


class UNet(nn.Module):
    """Maps noisy chunks [n, H, A], levels [n] (int64) and a condition [n, C] to chunks."""

    def __init__(self, config: UNetConfig, action: int, condition: int) -> None:
        super().__init__()
        time = config.time_dim
        widths = config.channels
        self.diffusion_step_encoder = nn.Sequential(
            Sinusoid(time), nn.Linear(time, 4 * time), nn.Mish(), nn.Linear(4 * time, time)
        )
        size = time + condition

        def level(channels: int, out: int, resize: nn.Module) -> nn.ModuleList:
            blocks = [Block(channels, out, size, config), Block(out, out, size, config)]
            return nn.ModuleList([*blocks, resize])

        pairs = list(zip((action, *widths[:-1]), widths, strict=True))
        last = len(widths) - 1
        self.down_modules = nn.ModuleList(
            level(a, b, nn.Conv1d(b, b, 3, 2, 1) if i < last else nn.Identity())
            for i, (a, b) in enumerate(pairs)
        )
        top = widths[-1]
        self.mid_modules = nn.ModuleList(Block(top, top, size, config) for _ in range(2))
        self.up_modules = nn.ModuleList(
            level(2 * b, a, nn.ConvTranspose1d(a, a, 4, 2, 1)) for a, b in reversed(pairs[1:])
        )
        self.final_conv = nn.Sequential(
            ConvBlock(widths[0], widths[0], config.kernel, 8), nn.Conv1d(widths[0], action, 1)
        )

    def forward(self, x: Tensor, level: Tensor, condition: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        c = torch.cat([self.diffusion_step_encoder(level), condition], -1)
        kept: list[Tensor] = []
        for first, second, resize in self.down_modules:  # pyright: ignore[reportGeneralTypeIssues]
            h = second(first(h, c), c)
            kept.append(h)
            h = resize(h)
        for block in self.mid_modules:
            h = block(h, c)
        for first, second, resize in self.up_modules:  # pyright: ignore[reportGeneralTypeIssues]
            h = torch.cat([h, kept.pop()], 1)
            h = resize(second(first(h, c), c))
        return self.final_conv(h).transpose(1, 2)


class Sinusoid(nn.Module):
    """Sines, then cosines [n, dim] of levels [n]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, level: Tensor) -> Tensor:
        half = self.dim // 2
        rate = -math.log(10000) / (half - 1)
        wave = level[:, None] * torch.exp(torch.arange(half, device=level.device) * rate)[None]
        return torch.cat([wave.sin(), wave.cos()], -1)


class ConvBlock(nn.Module):
    """Convolution, group normalisation, Mish."""

    def __init__(self, channels: int, out: int, kernel: int, groups: int) -> None:
        super().__init__()
        conv = nn.Conv1d(channels, out, kernel, padding=kernel // 2)
        self.block = nn.Sequential(conv, nn.GroupNorm(groups, out), nn.Mish())

    def forward(self, h: Tensor) -> Tensor:
        return self.block(h)


class Block(nn.Module):
    """Residual block of two convolutions, with FiLM conditioning between them."""

    def __init__(self, channels: int, out: int, condition: int, config: UNetConfig) -> None:
        super().__init__()
        self.scale = config.scale
        self.conv1 = ConvBlock(channels, out, config.kernel, config.groups)
        modulated = 2 * out if config.scale else out
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, modulated))
        self.conv2 = ConvBlock(out, out, config.kernel, config.groups)
        same = channels == out
        self.residual_conv = nn.Identity() if same else nn.Conv1d(channels, out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map `x` [n, channels, L] and `condition` [n, C] to [n, out, L]."""
        h = self.conv1(x)
        c = self.cond_encoder(condition)[:, :, None]
        if self.scale:
            scale, bias = c.chunk(2, 1)
            h = scale * h + bias
        else:
            h = h + c
        return self.conv2(h) + self.residual_conv(x)
