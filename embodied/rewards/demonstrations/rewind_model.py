"""Progress model of ReWiND: from the newest frames of a video to its progress.

A video is a sequence of frame features. It is shown in windows; a training window ends at a random
frame of a demonstration, whose progress is its place in it. A rewound video turns round at a random
frame p of a demonstration of T steps, so that losing progress looks like what it is:

    its frame j is frame p - |p - j| of the demonstration, with progress (p - |p - j|) / T

Frames of mismatched episodes, which do something else, have progress 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, NonNegative, Positive
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.nn.fit import fit
from embodied.nn.networks import mlp
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.policies.networks.encoders import Encoder
from embodied.rewards.demonstrations.progress_hops import Frames
from embodied.vision.contrastive import open_image_text
from embodied.vision.image_text import ImageText

BATCH = 256  # images per call of the frozen encoder


@dataclass(frozen=True)
class Window:
    """The first frame of a video, and its `history` newest ones, `stride` steps apart."""

    history: int
    stride: int

    @property
    def reach(self) -> int:
        """Number of newest frames that it spans."""
        return (self.history - 1) * self.stride + 1

    def places(self, newest: Tensor) -> Tensor:
        """Positions [n, history + 1] in a video of the windows that end at `newest` [n]. Before the
        start of the video its first frame is repeated."""
        back = torch.arange(self.reach - 1, -1, -self.stride, device=newest.device)
        recent = (newest[:, None] - back).clamp(min=0)
        return torch.cat([torch.zeros_like(recent[:, :1]), recent], 1)


@dataclass(frozen=True)
class FitConfig:
    """Settings of the fit."""

    updates: Count = 2000  # gradient steps of the fit
    batch_size: Count = 256  # windows per gradient step
    lr: Positive = 1e-3  # AdamW's initial learning rate; it falls to 0 as a cosine
    rewind: Fraction = 0.5  # fraction of windows that are rewound; 0: an ablation
    mismatch: Fraction = 0.25  # fraction of windows of mismatched episodes, if there are any
    noise: NonNegative = 0.1  # noise on features, standard deviations


class FrameFeatures(nn.Module):
    """Features [N, size] of frames (leaves [N, ...]): vectors, and the embeddings of images by a
    frozen image-text encoder; standardised."""

    def __init__(self, leaves: Mapping[str, Leaf], model: str) -> None:
        super().__init__()
        self.images = [name for name, leaf in leaves.items() if leaf.is_image]
        others = {name: leaf for name, leaf in leaves.items() if not leaf.is_image}
        # In a tuple: the frozen encoder is not a submodule, hence neither trained nor saved.
        self.eyes: tuple[ImageText, ...] = (open_image_text(model),) if self.images else ()
        self.vectors = Encoder(others, asymmetric=True) if others else None
        size = 0 if self.vectors is None else self.vectors.size
        self.size = size + sum(len(self.images) * eyes.size for eyes in self.eyes)
        self.norm = MeanStdNormalizer(self.size)

    @torch.no_grad()
    def forward(self, frames: Tensors) -> Tensor:
        return self.norm(self.raw(frames))

    def raw(self, frames: Tensors) -> Tensor:
        parts = [] if self.vectors is None else [self.vectors(frames)]
        for eyes in self.eyes:
            for images in (frames[name] for name in self.images):
                seen = [eyes.images(images[i : i + BATCH]) for i in range(0, len(images), BATCH)]
                parts.append(torch.cat(seen).to(self.norm.mean))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def fit(self, frames: Tensors) -> Tensor:
        """Fit the normalisers; returns the features of `frames`."""
        raw = self.raw(frames)
        self.norm.fit(raw)
        return self.norm(raw)


class ProgressNet(nn.Module):
    """Progress [N] in [0, 1] of windows [N, history + 1, size] of frame features."""

    def __init__(self, size: int, frames: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.frame = nn.Linear(size, hidden[0])
        self.head = mlp(frames * hidden[0], hidden, 1, "silu", layer_norm=True)

    def forward(self, windows: Tensor) -> Tensor:
        return self.head(self.frame(windows).flatten(1))[:, 0].sigmoid()


def fit_progress(
    net: ProgressNet, features: Tensor, frames: Frames, won: int, window: Window, how: FitConfig
) -> float:
    """Fit `net` to windows of `features` [N, size] of `frames`, whose first `won` episodes are
    demonstrations and the others mismatched. Returns the mean squared error. Uses torch's default
    generator."""

    def loss() -> Tensor:
        index, label = draw(frames, won, window, how)
        seen = features[index]
        return (net(seen + how.noise * torch.randn_like(seen)) - label).square().mean()

    return fit(net.parameters(), loss, how.updates, how.lr, decreasing=True)


def draw(frames: Frames, won: int, window: Window, how: FitConfig) -> tuple[Tensor, Tensor]:
    """Indices [n, history + 1] of frames, and the progress [n] of the newest one."""
    length = torch.bincount(frames.episode)
    start = length.cumsum(0) - length
    wins = int(length[:won].sum())
    others = round(how.mismatch * how.batch_size) if wins < len(frames) else 0
    index = torch.randint(wins, (how.batch_size,))
    if others:
        index[:others] = torch.randint(wins, len(frames), (others,))
    episode = frames.episode[index]
    turn = index - start[episode]  # where the video turns round, or ends
    back = (torch.rand(len(turn)) * turn).long() + 1
    back = torch.where(torch.rand(len(turn)) < how.rewind, back.minimum(turn), 0)
    places = turn[:, None] - (turn[:, None] - window.places(turn + back)).abs()
    shown = start[episode][:, None] + places
    return shown, frames.progress[shown[:, -1]]
