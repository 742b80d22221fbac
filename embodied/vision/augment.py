"""Images changed at random, for training: background, colours, light, camera, sharpness, noise.

At half the resolution, which is that of `ColourMoments`: four times as fast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from embodied.vision.image_text import views_of

SAME = 14  # grey levels by which the background varies
SWAPS = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1], [1, 2, 0], [2, 0, 1]])


def augment(pictures: Tensor, back: Tensor, random: torch.Generator) -> Tensor:
    """Changed images uint8 [N, s, V s, 3] in squares of two by two equal pixels; `back` [s, V s,
    3]: the background of all."""
    changed = with_background(_half(pictures), _half(back[None]), random)
    changed = with_light(with_colours(changed, random), random)
    views = changed.permute(0, 3, 1, 2).chunk(views_of(pictures), dim=3)
    moved = torch.cat([with_blur(with_camera(view, random), random) for view in views], 3)
    noisy = with_noise(moved.permute(0, 2, 3, 1), random).clamp(0, 255).to(torch.uint8)
    return noisy.repeat_interleave(2, 1).repeat_interleave(2, 2)


def _half(pictures: Tensor) -> Tensor:
    """float [N, s / 2, V s / 2, 3]."""
    return functional.avg_pool2d(pictures.permute(0, 3, 1, 2).float(), 2).permute(0, 2, 3, 1)


def with_background(pictures: Tensor, back: Tensor, random: torch.Generator) -> Tensor:
    """Two fifths with another background: blobs of two colours, more or less opaque."""
    count, (height, width) = len(pictures), pictures.shape[1:3]
    colours = 255 * torch.rand(2, count, 1, 1, 3, generator=random)
    blobs = torch.rand(count, 1, 4, 4, generator=random)
    blobs = functional.interpolate(blobs, (height, width), mode="bilinear")[:, 0, ..., None]
    other = colours[0] * blobs + colours[1] * (1 - blobs)
    opaque = torch.rand(count, 1, 1, 1, generator=random) * _some(count, 0.4, random)
    still = (pictures - back).abs().amax(3, keepdim=True) < SAME
    return torch.where(still, pictures + opaque * (other - pictures), pictures)


def with_colours(pictures: Tensor, random: torch.Generator) -> Tensor:
    """A quarter with channels exchanged, all with channels mixed a little and a tint."""
    count = len(pictures)
    which = torch.randint(1, len(SWAPS), (count,), generator=random)
    which[torch.rand(count, generator=random) < 0.5] = 1  # red and blue
    which[torch.rand(count, generator=random) < 0.75] = 0
    mix = functional.one_hot(SWAPS[which], 3).float()
    mix = mix + 0.06 * torch.randn(count, 3, 3, generator=random)
    tint = 0.88 + 0.24 * torch.rand(count, 1, 1, 3, generator=random)
    return (torch.einsum("nhwc,ndc->nhwd", pictures, mix) * tint).clamp(0, 255)


def with_light(pictures: Tensor, random: torch.Generator) -> Tensor:
    """From a third to one and a half as bright, with another contrast and gamma."""
    draw = torch.rand(4, len(pictures), 1, 1, 1, generator=random)
    gain = (math.log(0.35) + (math.log(1.6) - math.log(0.35)) * draw[0]).exp()
    gain = torch.where(_some(len(pictures), 0.7, random), gain, 0.85 + 0.3 * draw[0])
    gamma, contrast, shift = (0.7 * (draw[1] - 0.5)).exp(), 0.8 + 0.4 * draw[2], 24 * draw[3] - 12
    middle = pictures.mean((1, 2, 3), keepdim=True)
    bent = 255 * ((middle + contrast * (pictures - middle)).clamp(0, 255) / 255) ** gamma
    return (gain * bent + shift).clamp(0, 255)


def with_camera(view: Tensor, random: torch.Generator) -> Tensor:
    """Two thirds of images [N, 3, s, s] shifted by up to a tenth and scaled by up to an eighth."""
    count = len(view)
    moves = _some(count, 2 / 3, random).view(count, 1)
    shift = moves * (0.4 * torch.rand(count, 2, generator=random) - 0.2)
    scale = 1 + moves * (0.25 * torch.rand(count, 1, generator=random) - 0.125)
    frame = torch.zeros(count, 2, 3)
    frame[:, 0, 0], frame[:, 1, 1], frame[:, :, 2] = scale[:, 0], scale[:, 0], shift
    grid = functional.affine_grid(frame, list(view.shape), align_corners=False)
    return functional.grid_sample(view, grid, padding_mode="border", align_corners=False)


def with_blur(view: Tensor, random: torch.Generator) -> Tensor:
    """A quarter blurred, a sixth at two thirds of the resolution."""
    soft = functional.avg_pool2d(functional.pad(view, (1, 1, 1, 1), mode="replicate"), 3, 1)
    soft = (view + soft) / 2
    size = (2 * view.shape[2] // 3, 2 * view.shape[3] // 3)
    coarse = functional.interpolate(view, size, mode="area")
    coarse = functional.interpolate(coarse, view.shape[2:], mode="bilinear")
    view = torch.where(_some(len(view), 0.25, random), soft, view)
    return torch.where(_some(len(view), 0.16, random), coarse, view)


def with_noise(pictures: Tensor, random: torch.Generator) -> Tensor:
    """Half with noise, of up to six grey levels (twelve at the full resolution)."""
    # One noise image for all: one for each would cost more than a step of training.
    grain = torch.randn(1, *pictures.shape[1:], generator=random)
    strength = 6 * torch.rand(len(pictures), 1, 1, 1, generator=random)
    return pictures + _some(len(pictures), 0.5, random) * strength * grain


def _some(count: int, share: float, random: torch.Generator) -> Tensor:
    """True for about a `share` of images: [N, 1, 1, 1]."""
    return torch.rand(count, 1, 1, 1, generator=random) < share
