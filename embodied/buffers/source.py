"""Source: the protocol of everything that learners sample batches from; relabelled, mixed, shifted.

Random-shift augmentation of images in sampled batches (DrQ-v2, Yarats et al., 2021):

    shifted[y, x] = padded[y + dy, x + dx],   dy, dx uniform in {0 .. 2 pad}, sampled per image

where `padded` replicates the edge of the image by `pad` pixels on each side. Images are shifted by
up to `pad` whole pixels in each direction, so they stay uint8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import HISTORY, Tensors

ENV_REWARD = "env_reward"
"""Column of the environment's own rewards, in transitions that a reward model relabelled."""


class Source(Protocol):
    """A collection of transitions, or of action chunks for imitation, that can be sampled.

    A transition is one decision: `obs/*`, `action`, `reward` (discounted sum over the k steps of
    the decision), `discount` (gamma^k; 0 where the environment terminated, never 0 at a time
    limit), `next_obs/*` (the final observation where the episode ended). A
    learner with `uses_executed_steps` gets that column of chunks too: k (int64). An imitation
    sample is `obs/*`, `action` [n, H, A] and `valid` [n, H].
    """

    def __len__(self) -> int: ...

    def sample(self, n: int) -> Tensors:
        """`n` transitions with replacement, by torch's default generator."""
        ...


@dataclass(eq=False)
class Relabel:
    """The transitions of `source` with the rewards of `reward`; the stored one is `env_reward`."""

    source: Source
    reward: Callable[[Tensors], Tensor]

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int) -> Tensors:
        rows = self.source.sample(n)
        return {**rows, "reward": self.reward(rows), ENV_REWARD: rows["reward"]}


class Mixture:
    """Interleaves transitions of several sources, so that minibatch slices keep the fractions. With
    fractions (1/2, 1/2) the sources alternate; in general the pattern repeats every `period`
    transitions, and any slice whose length is a multiple of `period` has the exact fractions."""

    def __init__(self, sources: Sequence[Source], fractions: Sequence[float]) -> None:
        exact = [Fraction(f).limit_denominator(64) for f in fractions]
        if len(sources) != len(exact) or sum(exact) != 1 or min(exact) < 0:
            raise ValueError(f"fractions {list(fractions)} should be one per source and sum to 1")
        self.period = math.lcm(*(f.denominator for f in exact))
        self.counts = [int(f * self.period) for f in exact]
        self.sources = list(sources)

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def sample(self, n: int) -> Tensors:
        """`n` transitions; ValueError if `n` is not a multiple of the period or keys differ."""
        if n % self.period:
            raise ValueError(
                f"batch size {n} should be a multiple of {self.period} to mix the sources exactly"
            )
        times = n // self.period
        parts = [
            source.sample(count * times)
            for source, count in zip(self.sources, self.counts, strict=True)
            if count
        ]
        keys = set(parts[0])
        for part in parts[1:]:
            if set(part) != keys:
                raise ValueError(f"mixed sources differ in columns {sorted(keys ^ set(part))}")
        return {
            key: torch.cat(
                [part[key].reshape(times, -1, *part[key].shape[1:]) for part in parts], 1
            ).flatten(0, 1)
            for key in parts[0]
        }


def random_shift(
    images: Tensor, pad: int, generator: torch.Generator | None = None, alike: int = 1
) -> Tensor:
    """Images [n, H, W, C] of any dtype, each `alike` of them shifted by a random offset of their
    own. `generator` is on the device of the images (None: torch's default generator)."""
    device, (n, height, width) = images.device, images.shape[:3]
    moved = torch.randint(2 * pad + 1, (2, n // alike), generator=generator, device=device) - pad
    moved = moved.repeat_interleave(alike, 1)
    if images.is_cpu and pad < min(height, width):
        return shift_on_cpu(images, moved)
    return shift_by_index(images, moved)


def shift_by_index(images: Tensor, moved: Tensor) -> Tensor:
    """Images [n, H, W, C] shifted by `moved` [2, n] (dy and dx), by indexing every pixel."""
    device, (n, height, width) = images.device, images.shape[:3]
    y = (torch.arange(height, device=device) + moved[0, :, None]).clamp(0, height - 1)
    x = (torch.arange(width, device=device) + moved[1, :, None]).clamp(0, width - 1)
    return images[torch.arange(n, device=device)[:, None, None], y[:, :, None], x[:, None, :]]


def shift_on_cpu(images: Tensor, moved: Tensor) -> Tensor:
    """`shift_by_index` on a CPU, for shifts smaller than the image, by copying slices in numpy. It
    loops over the images and is still ten times as fast, because it copies whole lines instead of
    indexing pixels."""
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
    """Samples the transitions of `source` with every image shifted by up to `pad` pixels; the past
    ones of an observation as the present one."""

    def __init__(self, source: Source, spec: Spec, pad: int) -> None:
        if pad < 0:
            raise ValueError(f"random shift: pad={pad} should be at least 0")
        names = [name for name, leaf in spec.obs.items() if leaf.is_picture]
        self.keys = {f"{when}/{name}" for name in names for when in ("obs", "next_obs")}
        self.source = source
        self.pad = pad

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, n: int) -> Tensors:
        rows = dict(self.source.sample(n))
        for key in [key for key in rows if key in self.keys]:
            past = key.replace("/", f"/{HISTORY}", 1)
            images = rows[key].unsqueeze(-4)
            images = torch.cat([rows[past], images], -4) if past in rows else images
            alike = images.shape[-4]
            shifted = random_shift(images.flatten(0, -4), self.pad, alike=alike).view(images.shape)
            rows[key] = shifted[..., -1, :, :, :]
            if past in rows:
                rows[past] = shifted[..., :-1, :, :, :]
        return rows


def augmented(source: Source, spec: Spec, pad: int) -> Source:
    """`source` with images shifted by up to `pad` pixels (0: unchanged). Raises ConfigError if
    `pad` > 0 and the observations have no images."""
    if not pad:
        return source
    if not any(leaf.is_picture for leaf in spec.obs.values()):
        raise ConfigError(
            "data.random_shift needs image observations; this environment has none: "
            "data.random_shift=0"
        )
    return RandomShift(source, spec, pad)
