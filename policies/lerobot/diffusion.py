"""LeRobotDiffusion: LeRobot's Diffusion policy, sampled with DDIM (Chi et al., 2023).

The published policy samples with DDPM, whose noise of every step cannot be chosen. DDIM (Song et
al., 2021) with the same betas depends on the initial sample alone. From level t to s, with the
network's e (or x_0) and x_0 clipped,

    x_0 = (x_t - sqrt(1 - abar_t) e) / sqrt(abar_t),    x_s = sqrt(abar_s) x_0 + sqrt(1 - abar_s) e.

The network predicts `horizon` steps from the oldest observation on; the chunk begins at the newest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.affine import Affine
from embodied.core.bounds import Chunk, Count, Levels, Positive, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import per_row
from embodied.policies.generative.diffusion import Step, steps
from embodied.policies.lerobot.policy import Input, LeRobotPolicy
from embodied.policies.networks.blocks import channels_of, group_norm, resnet
from embodied.policies.wrappers.real_time_chunking import SamplerStep


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
    """ResNet and spatial softmax (Finn et al., 2016): images [n, 3, H, W] to features [n, 2 *
    keypoints], the expected image coordinates of every channel's activation."""

    def __init__(self, config: ImageConfig, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        norm = group_norm if config.groups else nn.BatchNorm2d
        # By their numbers, as LeRobot has them.
        self.backbone = nn.Sequential(*resnet(config.backbone, norm).children())
        size = shape[1:]
        self.resize = None
        if config.resize is not None and config.resize != size:
            size = config.resize
            self.resize = Resize(shape[1:], size)
        # The middle of the picture, by numbers that an exported graph holds.
        high, wide = config.crop or size
        top, left = round((size[0] - high) / 2), round((size[1] - wide) / 2)
        self.crop = slice(top, top + high), slice(left, left + wide)
        height, width = high, wide
        for _ in range(5):  # five layers with stride 2
            height, width = (height + 1) // 2, (width + 1) // 2
        self.pool = SpatialSoftmax(channels_of(config.backbone), height, width, config.keypoints)
        self.size = 2 * config.keypoints
        self.out = nn.Linear(self.size, self.size)

    def forward(self, x: Tensor) -> Tensor:
        if self.resize is not None:
            x = self.resize(x)
        if self.config.crop is not None:
            x = x[..., self.crop[0], self.crop[1]]
        return self.out(self.pool(self.backbone(x)).flatten(1)).relu()


class Resize(nn.Module):
    """Bilinear resizing with antialiasing, [n, C, H, W] to [n, C, *size], as two products with
    matrices: exporters do not know torch's own."""

    rows: Tensor
    columns: Tensor

    def __init__(self, before: tuple[int, ...], size: tuple[int, ...]) -> None:
        super().__init__()
        for name, old, new in zip(("rows", "columns"), before, size, strict=True):
            eye = torch.eye(old, dtype=torch.float64)[None, None]
            weights = functional.interpolate(
                eye, [new, old], mode="bilinear", align_corners=False, antialias=True
            )
            kind = torch.get_default_dtype()
            self.register_buffer(name, weights[0, 0].to(kind), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows @ x @ self.columns.mT


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


@dataclass(frozen=True)
class UNetConfig:
    """Settings of LeRobot's U-Net."""

    channels: tuple[Units, ...] = (512, 1024, 2048)  # of each level, half as long as the last
    kernel: Count = 5  # width of a convolution in steps, odd
    groups: Count = 8  # of group normalisation
    time_dim: Units = 128  # size of the time embedding, even
    scale: bool = True  # FiLM scales too, instead of adding only


class UNet(nn.Module):
    """Maps noisy chunks [n, H, A], embedded levels ([time_dim] or [n, time_dim]) and a condition
    [n, C] to chunks.

    LeRobot's, with its tensor names (Chi et al., 2023). It differs from
    `embodied.policies.generative.chunk_sampler.UNet`: two residual blocks per level, transposed
    convolutions, a condition that every block projects, and FiLM as scale * h + bias.
    """

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

    def embed(self, level: Tensor) -> Tensor:
        """Embeddings [n, time_dim] of levels [n]."""
        return self.diffusion_step_encoder(level)

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        h = x.transpose(1, 2)
        c = torch.cat([time.expand(condition.shape[0], -1), condition], -1)
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
        self.residual_conv = nn.Identity() if channels == out else nn.Conv1d(channels, out, 1)

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


Schedule = Literal["squaredcos_cap_v2", "linear", "scaled_linear"]


@dataclass(frozen=True)
class Config:
    """Settings of LeRobot's diffusion policy; `inputs` and `action` as in
    `embodied.policies.lerobot.policy`.
    """

    inputs: Mapping[str, Input]  # the features that the policy takes, by LeRobot's name
    chunk: Chunk  # actions of one decision, of the `horizon` predicted ones
    horizon: Count  # steps of a prediction
    action: Affine | None = None  # physical values of -1 and +1 (null: the actions are in [-1, 1])
    obs_steps: Count = 2  # observations that the policy sees, the present one included
    steps: Levels = 100  # sampling steps, at most `train_steps`
    train_steps: Levels = 100  # noise levels
    schedule: Schedule = "squaredcos_cap_v2"  # of the noise levels
    beta_start: PositiveFraction = 0.0001  # noise variance of the first level
    beta_end: PositiveFraction = 0.02  # noise variance of the last level
    prediction: Literal["epsilon", "sample"] = "epsilon"  # what the network predicts
    clip_sample: Positive | None = 1.0  # bound of the predicted actions (null: none)
    unet: UNetConfig = field(default_factory=UNetConfig)  # settings of the U-Net
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images

    def __post_init__(self) -> None:
        most = self.horizon - self.obs_steps + 1
        if not 1 <= self.chunk <= most:
            raise ConfigError(f"chunk={self.chunk} is not in 1..{most}: horizon - obs_steps + 1")
        if not 1 <= self.steps <= self.train_steps:
            raise ConfigError(f"steps={self.steps} is not in 1..{self.train_steps} (train_steps)")


class LeRobotDiffusion(LeRobotPolicy):
    """Noise [n, horizon, A] is the initial sample, in the network's units."""

    levels: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(spec, config.inputs, config.action, config.obs_steps)
        self.config = config
        self.chunk = config.chunk
        self.noise_steps = config.horizon
        size = sum(i.shape[0] for i in config.inputs.values() if i.kind != "image")
        cameras = [each.shape for each in config.inputs.values() if each.kind == "image"]
        self.diffusion = nn.Module()
        if cameras:
            made = [
                ImageEncoder(config.images, cameras[0])
                for _ in (cameras if config.images.separate else cameras[:1])
            ]
            self.diffusion.rgb_encoder = nn.ModuleList(made) if config.images.separate else made[0]
            size += made[0].size * len(cameras)
        self.condition_size = size * config.obs_steps
        self.diffusion.unet = UNet(config.unet, spec.act.size, self.condition_size)
        self.size = config.horizon * spec.act.size
        self.first = self.past * spec.act.size
        self.grid = self.ddim_steps()
        levels = torch.tensor([step.t for step in self.grid])
        self.register_buffer("levels", levels, persistent=False)
        self.eval()

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.config.horizon, self.spec.act.size, device=self.middle.device)

    @property
    def feature_size(self) -> int:
        return self.condition_size

    def features(self, obs: Tensors) -> Tensor:
        """The network's condition [n, feature_size]: states and encoded images of all steps."""
        given = self.prepared(obs)
        parts = [values for kind, values in given if kind == "state"]
        parts += self._encoded([values for kind, values in given if kind == "image"])
        parts += [values for kind, values in given if kind == "env"]
        return torch.cat(parts, -1).flatten(1)

    def _encoded(self, images: list[Tensor]) -> list[Tensor]:
        """Features [n, obs_steps, F] of images [n, obs_steps, 3, H, W]."""
        if not images:
            return []
        encoder = cast(nn.Module, self.diffusion.rgb_encoder)
        each = list(encoder) if isinstance(encoder, nn.ModuleList) else [encoder] * len(images)
        size = 2 * self.config.images.keypoints
        return [
            cast(Tensor, net(seen.flatten(0, 1))).view(-1, self.past + 1, size)
            for net, seen in zip(each, images, strict=True)
        ]

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        condition = self.features(obs)
        x = noise.flatten(1)
        for step, time in zip(self.grid, self.embedded().unbind(), strict=True):
            x0, e = self.split(x, step, time, condition)
            x = step.next_keep * x0 + step.next_remain * e
        return self.to_actions(x), carry

    def ddim_steps(self, eta: float = 0.0) -> list[Step]:
        """The sampler's steps; the levels are evenly spaced from 0."""
        stride = self.config.train_steps // self.config.steps
        levels = range((self.config.steps - 1) * stride, -1, -stride)
        return steps(list(alphas(self.config)), levels, eta)

    def embedded(self) -> Tensor:
        """The network's embeddings [K, time_dim] of the sampler's levels."""
        return self.unet.embed(self.levels)

    @property
    def unet(self) -> UNet:
        return cast(UNet, self.diffusion.unet)

    def split(
        self, x: Tensor, step: Step, time: Tensor, condition: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The predicted chunk x_0, clipped, and the noise e, [n, size] each."""
        out = self.net(x, time, condition)
        if self.config.prediction == "sample":
            x0 = out
            e = (x - step.keep * out) / step.remain
        else:
            x0 = (x - step.remain * out) / step.keep
            e = out
        return self._clipped(x0), e

    def net(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """The network's output [n, size] for samples [n, size] at embedded levels `time`."""
        x = x.reshape(-1, self.config.horizon, self.spec.act.size)
        return self.unet(x, time, condition).flatten(1)

    def _clipped(self, x0: Tensor) -> Tensor:
        bound = self.config.clip_sample
        return x0 if bound is None else x0.clamp(-bound, bound)

    def to_actions(self, x: Tensor) -> Tensor:
        """The chunk [n, chunk, A] of samples [n, horizon * A]."""
        x = x.reshape(-1, self.config.horizon, self.spec.act.size)
        return self.units(x[:, self.past : self.past + self.chunk])

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        """The initial sample [n, horizon * A] and the sampler's steps, for guidance."""
        condition = self.features(obs)
        times = self.embedded().unbind()
        steps = zip(self.grid, times, strict=True)
        return noise.flatten(1), [self.stride(step, time, condition) for step, time in steps]

    def stride(self, step: Step, time: Tensor, condition: Tensor) -> SamplerStep:
        """One sampler step, for guidance."""

        def clean(x: Tensor) -> Tensor:
            out = self.net(x, time, condition)
            if self.config.prediction == "sample":
                return out
            return (x - step.remain * out) / step.keep

        def onward(x: Tensor, x0: Tensor) -> Tensor:
            x0 = self._clipped(x0)
            return step.next_keep * x0 + step.next_remain * (x - step.keep * x0) / step.remain

        return SamplerStep(step.keep, step.remain, clean, onward)

    def goal(self, plan: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        after = self.config.horizon - self.past - self.chunk
        around = (0, 0, self.past, after)  # steps of the prediction that are not returned
        wide = functional.pad(weight, around)
        return functional.pad(self.range(plan), around).flatten(1), wide.flatten(1)

    def loss(self, batch: Tensors) -> Tensor:
        """Mean squared error of the predicted noise (or chunk) over the valid steps, [n].

        The steps that a chunk does not have (before the newest observation, and beyond the chunk)
        are copies of its first and last step, and do not count.
        """
        condition = self.features(under(batch, "obs"))
        # A chunk [n, H, A] and its valid steps [n, H] as a prediction of `horizon` steps.
        chunk = self.range(batch["action"])
        after = self.config.horizon - self.past - chunk.shape[1]
        before = chunk[:, :1]
        behind = chunk[:, -1:]
        parts = [before.expand(-1, self.past, -1), chunk, behind.expand(-1, after, -1)]
        target = torch.cat(parts, 1)
        valid = functional.pad(batch["valid"], (self.past, after))
        e = torch.randn_like(target)
        level = torch.randint(self.config.train_steps, (len(target),), device=target.device)
        abar = alphas(self.config).to(target)[level][:, None, None]
        noisy = abar.sqrt() * target + (1 - abar).sqrt() * e
        out = self.unet(noisy, self.unet.embed(level), condition)
        wanted = e if self.config.prediction == "epsilon" else target
        return per_row((out - wanted).square(), valid)


def alphas(config: Config) -> Tensor:
    """Return abar [train_steps], float32 as LeRobot's sampler computes it."""
    total = config.train_steps
    start = config.beta_start
    end = config.beta_end
    if config.schedule == "squaredcos_cap_v2":

        def abar(t: float) -> float:
            return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

        steps = range(total)
        values = [min(1 - abar((i + 1) / total) / abar(i / total), 0.999) for i in steps]
        betas = torch.tensor(values, dtype=torch.float32)
    elif config.schedule == "linear":
        betas = torch.linspace(start, end, total, dtype=torch.float32)
    else:
        betas = torch.linspace(start**0.5, end**0.5, total, dtype=torch.float32) ** 2
    return (1 - betas).cumprod(0)
