"""Progress learned from one's own demonstrations with rewound videos: ReWiND.

Zhang et al., "ReWiND: language-guided rewards teach robot policies without new demonstrations"
(2025). A small network predicts the progress of a video from frozen features of its frames; it is
trained once, when the reward is built, on demonstrations, on rewound ones and on mismatched
episodes. With its prediction Phi,

    r = env_weight r_env + scale F,   F = Phi' - 1 (level), Phi' - Phi (gain),
                                          gamma^k Phi' - Phi (potential; Phi' = 0 at a termination)

Differences from the source: one task without its instruction, so mismatched videos are recordings
of something else instead of wrong instructions; an MLP over a window of frames instead of a
transformer over the whole video; vectors as well as images; `level` is Phi' - 1 instead of Phi', so
that waiting before a terminating success is never worth it.

A video is a sequence of frame features. It is shown in windows; a training window ends at a random
frame of a demonstration, whose progress is its place in it. A rewound video turns round at a random
frame p of a demonstration of T steps, so that losing progress looks like what it is:

    its frame j is frame p - |p - j| of the demonstration, with progress (p - |p - j|) / T

Frames of mismatched episodes, which do something else, have progress 0.

Reward-aligned behaviour cloning: imitates the steps of recordings after which progress rose.

RA-BC, of SARM (Chen et al., 2025). With the progress Phi that a model predicts, the gain of step t
is g_t = Phi_{t+H} - Phi_t (Phi at the end of the episode, if that is sooner), and its weight

    w_t = 1 if g_t > kappa,  0 if g_t < 0,  else clip((g_t - (m - 2 s)) / (4 s), 0, 1)

with mean m and standard deviation s of all gains. The model is ReWiND's (`rewind`), fitted to
`rewind.demos`, instead of SARM's with stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from embodied.buffers.weighted import Weights
from embodied.core import tensors as tt
from embodied.core.bounds import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Number,
    PositiveFraction,
    Units,
)
from embodied.core.build import ConfigError, nearest
from embodied.core.device import forked
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import observations
from embodied.nn.networks import mlp
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.nn.optim import fit
from embodied.policies.networks.encoders import Encoder
from embodied.rewards.fitted import SHAPINGS, FittedReward, Frames
from embodied.rewards.wrappers.added_observations import ObservationWrapper
from embodied.vision.contrastive import open_image_text
from embodied.vision.image_text import ImageText

PROGRESS = "privileged/progress"

BATCH = 256  # images per call of the frozen encoder


class ProgressObservation(ObservationWrapper):
    """Adds `privileged/progress`, float32 [B]: `predict(first, newest)` of the features of each
    episode's first frame [B, F] and of its `reach` newest ones [B, reach, F], oldest first. Before
    the start of an episode, its first frame is repeated.

    `features(obs)` gives the features [B, F] of observations.
    """

    newest = "progress"

    def __init__(
        self,
        env: VecEnv,
        features: Callable[[Tensors], Tensor],
        predict: Callable[[Tensor, Tensor], Tensor],
        reach: int,
    ) -> None:
        super().__init__(env, PROGRESS, Leaf((), low=0.0, high=1.0))
        self.features = features
        self.predict = predict
        self.reach = reach

    def observe(self, following: Tensors) -> Tensor:
        past = torch.cat([self.memory["past"][:, 1:], self.features(following)[:, None]], 1)
        after = self.predict(self.memory["first"], past)
        self.memory = {**self.memory, "past": past, "progress": after}
        return after

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        features = self.features(obs)
        past = features[:, None].expand(-1, self.reach, -1)
        fresh = {"first": features, "past": past, "progress": self.predict(features, past)}
        if not self.memory:
            self.memory = {name: value.clone() for name, value in fresh.items()}
        self.memory = {
            name: torch.where(rows.view(-1, *[1] * (old.ndim - 1)), fresh[name], old)
            for name, old in self.memory.items()
        }


@dataclass(frozen=True)
class Window:
    """The first frame of a video, and its `history` newest ones, `stride` steps apart."""

    history: int
    stride: int

    @property
    def reach(self) -> int:
        return (self.history - 1) * self.stride + 1

    def places(self, newest: Tensor) -> Tensor:
        """Positions [n, history + 1] in a video of the windows that end at `newest` [n]. Before the
        start of the video its first frame is repeated."""
        back = torch.arange(self.reach - 1, -1, -self.stride, device=newest.device)
        recent = (newest[:, None] - back).clamp(min=0)
        return torch.cat([torch.zeros_like(recent[:, :1]), recent], 1)


@dataclass(frozen=True)
class Config:
    """Settings of ReWiND. A window has the first frame and the `history` newest ones."""

    updates: Count = 2000  # gradient steps of the fit
    batch_size: Count = 256  # windows per gradient step
    lr: PositiveFraction = 1e-3  # AdamW's initial learning rate; it falls to 0 as a cosine
    rewind: Fraction = 0.5  # fraction of windows that are rewound; 0: an ablation
    mismatch: Fraction = 0.25  # fraction of windows of mismatched episodes, if there are any
    noise: NonNegative = 0.1  # noise on features, standard deviations
    demos: str | tuple[str, ...] | None = None  # datasets of demonstrations; must be given
    demo_episodes: Count | None = 10  # episodes of each of `demos`, 5 to 20 in all; null: all
    mismatched: str | tuple[str, ...] | None = None  # datasets of other tasks or random actions
    mismatched_episodes: Count | None = 10  # episodes of each of `mismatched`; null: all
    views: tuple[str, ...] = ("state",)  # observations to use; "privileged/picture" is rendered
    model: str = "simclip"  # frozen encoder of images: "simclip", a folder, or a name on the hub
    value: Literal["level", "gain", "potential"] = "level"  # form of the reward F
    scale: Number = 1.0  # weight of F
    env_weight: Number = 1.0  # weight of the environment's reward
    history: Count = 4  # newest frames in a window
    stride: Count = 2  # steps between frames of a window
    hidden: tuple[Units, ...] = (64, 64)  # units of the hidden layers


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


def draw(frames: Frames, won: int, window: Window, how: Config) -> tuple[Tensor, Tensor]:
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


class Rewind(FittedReward):
    """The environment gets the predicted progress of its episodes as an observation."""

    name = "rewind"
    measure = "progress"

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path | None
    ) -> None:
        super().__init__(config, seed)
        self.sums_steps = config.value == "potential"
        shown, mismatched = self.read(spec, config.mismatched, config.mismatched_episodes)
        self.window = Window(config.history, config.stride)
        with forked(seed):
            self.features = FrameFeatures(self.leaves, config.model)
            self.net = ProgressNet(self.features.size, config.history + 1, config.hidden)
        self.fit_once(shown, mismatched, folder, device)

    def fit_model(self, moments: Tensors, frames: Frames, shown: int) -> float:
        how = self.config
        features = self.features.fit(moments)

        def loss() -> Tensor:
            index, label = draw(frames, shown, self.window, how)
            seen = features[index]
            noisy = seen + how.noise * torch.randn_like(seen)
            return (self.net(noisy) - label).square().mean()

        with forked(self.seed):
            return fit(self.net.parameters(), loss, how.updates, how.lr, decreasing=True)

    def augment_env(self, env: VecEnv) -> VecEnv:
        rendered = super().augment_env(env)
        return ProgressObservation(rendered, self._encoded, self._predicted, self.window.reach)

    def augment_episode(self, obs: Tensors) -> Tensors:
        """The progress [T] of the frames of a recorded episode (leaves [T, ...])."""
        for name in self.leaves:
            if name not in obs:
                raise ConfigError(
                    f"the episodes have no observation {name}, which the reward was learned from"
                    f"{nearest(name, obs)}"
                )
        features = self._encoded(obs)
        places = self.window.places(torch.arange(len(features), device=features.device))
        return {PROGRESS: self.progress(features[places])}

    def components(self, transitions: Tensors) -> Tensors:
        before, after = transitions[f"obs/{PROGRESS}"], transitions[f"next_obs/{PROGRESS}"]
        value = SHAPINGS[self.config.value](before, after, transitions["discount"])
        return {
            "env": self.config.env_weight * transitions["reward"],
            "progress": self.config.scale * value,
        }

    @torch.no_grad()
    def progress(self, windows: Tensor) -> Tensor:
        """Progress [N] of windows [N, history + 1, size] of features, on their device."""
        return self.net(windows.to(self.features.norm.mean)).to(windows.device)

    def _encoded(self, obs: Tensors) -> Tensor:
        """Features [N, size] of observations, on their device."""
        seen = {name: obs[name] for name in self.leaves}
        here = next(iter(seen.values())).device
        return self.features(tt.to(seen, self.features.norm.mean.device)).to(here)

    def _predicted(self, first: Tensor, newest: Tensor) -> Tensor:
        return self.progress(torch.cat([first[:, None], newest[:, :: self.config.stride]], 1))


@dataclass(frozen=True)
class WeightingConfig:
    """Settings of reward-aligned behaviour cloning."""

    horizon: Count = 10  # steps over which progress is compared: the length of the policy's chunk
    kappa: Number = 0.01  # a gain in progress above it has the weight 1
    seed: CountOrZero = 0  # seed of the progress model's fit
    rewind: Config = field(default_factory=Config)  # the progress model


class ProgressGain(Weights):
    """A weight for every step."""

    def __init__(self, config: WeightingConfig) -> None:
        if not config.rewind.demos:
            raise ConfigError(
                "progress is learned from good demonstrations: weighting.rewind.demos=DIR"
            )
        self.config = config

    def __call__(self, episodes: Episodes) -> Tensor:
        """Weights [N] (float64) of all steps."""
        cpu = torch.device("cpu")
        model = Rewind(self.config.rewind, episodes.spec, cpu, self.config.seed, None)
        parts = []
        for number in range(len(episodes)):
            progress = model.augment_episode(observations(episodes.episode(number)))[PROGRESS]
            last = len(progress) - 1
            later = (torch.arange(last) + self.config.horizon).clamp(max=last)
            parts.append(progress[later] - progress[:-1])
        return weights(torch.cat(parts).double(), self.config.kappa)


def weights(gain: Tensor, kappa: float) -> Tensor:
    """w [N] of gains [N]. ConfigError if no gain is above 0."""
    mean, std = gain.mean(), gain.std(correction=0)
    soft = ((gain - (mean - 2 * std)) / (4 * std).clamp(min=1e-9)).clamp(0, 1)
    found = torch.where(gain > kappa, 1.0, soft) * (gain >= 0)
    if not found.any():
        raise ConfigError("no step of these recordings gains progress: see reward score ... rise")
    return found
