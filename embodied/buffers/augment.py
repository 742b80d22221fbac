"""Random-shift augmentation of images in sampled batches (DrQ-v2, Yarats et al., 2021).

    shifted[y, x] = padded[y + dy, x + dx],   dy, dx uniform in {0 .. 2 pad}, sampled per image

where `padded` replicates the edge of the image by `pad` pixels on each side. Images are shifted by
up to `pad` whole pixels in each direction, so they stay uint8.
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
    """Images [n, H, W, C] of any dtype, each shifted by its own random offset.

    `generator` is on the device of the images (None: torch's default generator).
    """
    device, (n, height, width) = images.device, images.shape[:3]
    moved = torch.randint(2 * pad + 1, (2, n, 1), generator=generator, device=device) - pad
    if images.is_cpu and pad < min(height, width):
        return shift_on_cpu(images, moved.squeeze(2))
    return shift_by_index(images, moved.squeeze(2))


def shift_by_index(images: Tensor, moved: Tensor) -> Tensor:
    """Images [n, H, W, C] shifted by `moved` [2, n] (dy and dx), by indexing every pixel."""
    device, (n, height, width) = images.device, images.shape[:3]
    y = (torch.arange(height, device=device) + moved[0, :, None]).clamp(0, height - 1)
    x = (torch.arange(width, device=device) + moved[1, :, None]).clamp(0, width - 1)
    return images[torch.arange(n, device=device)[:, None, None], y[:, :, None], x[:, None, :]]


def shift_on_cpu(images: Tensor, moved: Tensor) -> Tensor:
    """`shift_by_index` on a CPU, for shifts smaller than the image, by copying slices in numpy.

    It loops over the images and is still ten times as fast, because it copies whole lines instead
    of indexing pixels.
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
    """Samples the transitions of `source` with every image shifted by up to `pad` pixels."""

    def __init__(self, source: Source, spec: Spec, pad: int) -> None:
        if pad < 0:
            raise ValueError(f"random shift: pad={pad} should be at least 0")
        names = [name for name, leaf in spec.obs.items() if leaf.is_picture]
        self.keys = {f"{when}/{name}" for name in names for when in ("obs", "next_obs")}
        self.source, self.pad = source, pad

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int) -> Tensors:
        rows = self.source.sample(n)
        return {
            key: self._shifted(value) if key in self.keys else value for key, value in rows.items()
        }

    def _shifted(self, images: Tensor) -> Tensor:
        """Images [..., H, W, C], each with its own offset."""
        return random_shift(images.flatten(0, -4), self.pad).view(images.shape)


def augmented(source: Source, spec: Spec, pad: int) -> Source:
    """`source` with images shifted by up to `pad` pixels (0: unchanged).

    Raises ConfigError if `pad` > 0 and the observations have no images.
    """
    if not pad:
        return source
    if not any(leaf.is_picture for leaf in spec.obs.values()):
        raise ConfigError(
            "data.random_shift needs image observations; this environment has none: "
            "data.random_shift=0"
        )
    return RandomShift(source, spec, pad)
