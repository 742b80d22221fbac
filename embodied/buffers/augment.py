"""Random shift of pictures in sampled batches (DrQ-v2, Yarats et al., 2021).

    shifted[y, x] = padded[y + dy, x + dx],   dy, dx uniform in {0 .. 2 pad}, drawn for each picture

where padded repeats the picture's edge `pad` pixels outwards: by up to `pad` pixels in each
direction, whole pixels, so that pictures stay uint8.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from embodied.buffers.source import Source
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


def random_shift(images: Tensor, pad: int, generator: torch.Generator | None = None) -> Tensor:
    """Pictures [n, H, W, C] of any dtype, each shifted by its own random amount.

    `generator` is on the pictures' device (None: torch's default one).
    """
    device, (n, height, width) = images.device, images.shape[:3]
    moved = torch.randint(2 * pad + 1, (2, n, 1), generator=generator, device=device) - pad
    if images.is_cpu and pad < min(height, width):
        return shift_on_cpu(images, moved.squeeze(2))
    return shift_by_index(images, moved.squeeze(2))


def shift_by_index(images: Tensor, moved: Tensor) -> Tensor:
    """Pictures [n, H, W, C] shifted by `moved` [2, n] (dy and dx), pixel by pixel."""
    device, (n, height, width) = images.device, images.shape[:3]
    y = (torch.arange(height, device=device) + moved[0, :, None]).clamp(0, height - 1)
    x = (torch.arange(width, device=device) + moved[1, :, None]).clamp(0, width - 1)
    every = torch.arange(n, device=device)
    return images[every[:, None, None], y[:, :, None], x[:, None, :]]


def shift_on_cpu(images: Tensor, moved: Tensor) -> Tensor:
    """The same on a CPU, for shifts smaller than the image: whole slices are copied.

    One picture after the other, in numpy (whose slices cost a microsecond), and still ten times as
    fast as `shift_by_index`: whole lines are copied instead of indexed pixels.
    """
    given, (height, width) = images.numpy(), images.shape[1:3]
    made = np.empty_like(given)
    for old, new, dy, dx in zip(given, made, *moved.tolist(), strict=True):
        top, bottom = max(0, -dy), min(height, height - dy)
        left, right = max(0, -dx), min(width, width - dx)
        lines = old[top + dy : bottom + dy]
        new[top:bottom, left:right] = lines[:, left + dx : right + dx]
        new[top:bottom, :left] = lines[:, :1]
        new[top:bottom, right:] = lines[:, -1:]
        new[:top], new[bottom:] = new[top], new[bottom - 1]
    return torch.from_numpy(made)


class RandomShift:
    """The rows of `source`, every picture in them shifted by up to `pad` pixels."""

    def __init__(self, source: Source, spec: Spec, pad: int) -> None:
        if pad < 0:
            raise ValueError(f"a shift of {pad} pixels should be at least 0")
        names = [name for name, leaf in spec.obs.items() if leaf.is_image]
        self.keys = {f"{when}/{name}" for name in names for when in ("obs", "next_obs")}
        self.source, self.pad = source, pad

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int) -> Tensors:
        rows = self.source.sample(n)
        return {
            key: random_shift(value, self.pad) if key in self.keys else value
            for key, value in rows.items()
        }


def augmented(source: Source, spec: Spec, pad: int) -> Source:
    """`source` with images shifted by up to `pad` pixels (0: as it is); ConfigError without any."""
    if not pad:
        return source
    if not any(leaf.is_image for leaf in spec.obs.values()):
        raise ConfigError("data.random_shift is for images; this environment observes none")
    return RandomShift(source, spec, pad)
