"""Progress learned from one's own demonstrations with rewound videos: ReWiND.

Zhang et al., "ReWiND: language-guided rewards teach robot policies without new demonstrations"
(2025). A small network predicts the progress of a video from frozen features of its frames; it is
trained once, when the reward is built, on demonstrations, on rewound ones and on mismatched
episodes (`embodied.rewards.demonstrations.rewind_model`). With its prediction Phi,

    r = env_weight r_env + scale F,   F = Phi' - 1 (level), Phi' - Phi (gain),
                                          gamma^k Phi' - Phi (potential; Phi' = 0 at a termination)

Differences from the source: one task without its instruction, so mismatched videos are recordings
of something else instead of wrong instructions; an MLP over a window of frames instead of a
transformer over the whole video; vectors as well as images; `level` is Phi' - 1 instead of Phi', so
that waiting before a terminating success is never worth it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.bounds import Count, Number
from embodied.core.env import VecEnv
from embodied.core.seeding import forked
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.demonstrations.observations import require_recorded
from embodied.rewards.demonstrations.progress_hops import SHAPINGS, Frames
from embodied.rewards.demonstrations.rewind_model import (
    FitConfig,
    FrameFeatures,
    ProgressNet,
    Window,
    fit_progress,
)
from embodied.rewards.fitted import FittedReward
from embodied.rewards.wrappers.progress_observation import PROGRESS, ProgressObservation


@dataclass(frozen=True)
class Config(FitConfig):
    """Settings of ReWiND. A window has the first frame and the `history` newest ones."""

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
    hidden: tuple[Count, ...] = (64, 64)  # units of the hidden layers


class Rewind(FittedReward):
    """The environment gets the predicted progress of its episodes as an observation."""

    name = "rewind"
    measure = "progress"

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path | None
    ) -> None:
        super().__init__(config, seed)
        shown, mismatched = self.read(spec, config.mismatched, config.mismatched_episodes)
        self.window = Window(config.history, config.stride)
        with forked(seed):
            self.features = FrameFeatures(self.leaves, config.model)
            self.net = ProgressNet(self.features.size, config.history + 1, config.hidden)
        self.fit_once(shown, mismatched, folder, device)

    def fit_model(self, moments: Tensors, frames: Frames, shown: int) -> float:
        features = self.features.fit(moments)
        with forked(self.seed):
            return fit_progress(self.net, features, frames, shown, self.window, self.config)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with the progress of its episodes."""
        rendered = super().augment_env(env)
        return ProgressObservation(rendered, self._encoded, self._predicted, self.window.reach)

    def augment_episode(self, obs: Tensors) -> Tensors:
        """The progress [T] of the frames of a recorded episode (leaves [T, ...])."""
        require_recorded(self.leaves, obs)
        features = self._encoded(obs)
        places = self.window.places(torch.arange(len(features), device=features.device))
        return {PROGRESS: self.progress(features[places])}

    def components(self, transitions: Tensors) -> Tensors:
        """The environment's reward and that for progress, [N] each."""
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
        recent = newest[:, :: self.config.stride]
        return self.progress(torch.cat([first[:, None], recent], 1))
