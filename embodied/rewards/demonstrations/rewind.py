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

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.bounds import Count, Fraction, NonNegative, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.reward import Reward
from embodied.core.seeding import forked
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import joined
from embodied.rewards.demonstrations.fitted_once import fitted_once
from embodied.rewards.demonstrations.observations import (
    all_frames,
    read_demonstrations,
    require_observed,
    require_recorded,
    shared_leaves,
)
from embodied.rewards.demonstrations.progress_hops import SHAPINGS, Frames, linear_progress
from embodied.rewards.demonstrations.rewind_model import (
    FitConfig,
    FrameFeatures,
    ProgressNet,
    Window,
    fit,
)
from embodied.rewards.wrappers.progress_observation import PROGRESS, ProgressObservation
from embodied.rewards.wrappers.render_caption import PICTURE, with_render


@dataclass(frozen=True)
class Config:
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
    updates: Count = 2000  # gradient steps of the fit
    batch_size: Count = 256  # windows per gradient step
    lr: Positive = 1e-3  # AdamW's initial learning rate; it falls to 0 as a cosine
    rewind: Fraction = 0.5  # fraction of windows that are rewound; 0: an ablation
    mismatch: Fraction = 0.25  # fraction of windows of mismatched episodes, if there are any
    noise: NonNegative = 0.1  # noise on features, standard deviations

    def __post_init__(self) -> None:
        for name in ("history", "stride", "updates", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"reward.{name}={getattr(self, name)} must be at least 1")
        for name in ("rewind", "mismatch"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"reward.{name}={getattr(self, name)} must be from 0 to 1")


class Rewind(nn.Module, Reward):
    """The fitted model is stored in the run's `folder`; built again with the same settings and
    demonstrations, it is loaded instead of fitted."""

    frozen = True

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path | None
    ) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        won, other = read_demonstrations(
            config.demos, config.demo_episodes, config.mismatched, config.mismatched_episodes
        )
        self.leaves = shared_leaves(config.views, [part.spec for part in won + other])
        require_observed(self.leaves, spec)
        self.window = Window(config.history, config.stride)
        with forked(seed):
            self.features = FrameFeatures(self.leaves, config.model)
            self.net = ProgressNet(self.features.size, config.history + 1, config.hidden)
        frames, count = self._frames(won, other)
        mark = self._fingerprint(frames[0])
        fitted_once(self, folder, "rewind", mark, lambda: self._fit(*frames, count))
        self.to(device).eval().requires_grad_(False)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with the progress of its episodes."""
        if PICTURE in self.leaves and PICTURE not in env.spec.obs:
            env = with_render(env, self.leaves[PICTURE].shape[0])
        return ProgressObservation(env, self._encoded, self._predicted, self.window.reach)

    def augment_episode(self, obs: Tensors) -> Tensors:
        """The progress [T] of the frames of a recorded episode (leaves [T, ...])."""
        require_recorded(self.leaves, obs)
        features = self._encoded(obs)
        places = self.window.places(torch.arange(len(features), device=features.device))
        return {PROGRESS: self.progress(features[places])}

    def __call__(self, rows: Tensors) -> Tensor:
        """The environment's reward plus that for progress, [N]."""
        terms = self.components(rows)
        return terms["env"] + terms["progress"]

    def components(self, rows: Tensors) -> Tensors:
        """Both terms, [N] each."""
        before, after = rows[f"obs/{PROGRESS}"], rows[f"next_obs/{PROGRESS}"]
        value = SHAPINGS[self.config.value](before, after, rows["discount"])
        return {
            "env": self.config.env_weight * rows["reward"],
            "progress": self.config.scale * value,
        }

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Fitted once; nothing to learn."""
        return {}

    @torch.no_grad()
    def progress(self, windows: Tensor) -> Tensor:
        """Progress [N] of windows [N, history + 1, size] of features, on their device."""
        return self.net(windows.to(self.features.norm.mean)).to(windows.device)

    def get_state(self) -> dict[str, Any]:
        return {"module": self.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state["module"])

    def _encoded(self, obs: Tensors) -> Tensor:
        """Features [N, size] of observations, on their device."""
        seen = {name: obs[name] for name in self.leaves}
        here = next(iter(seen.values())).device
        return self.features(tt.to(seen, self.features.norm.mean.device)).to(here)

    def _predicted(self, first: Tensor, newest: Tensor) -> Tensor:
        recent = newest[:, :: self.config.stride]
        return self.progress(torch.cat([first[:, None], recent], 1))

    def _frames(
        self, won: list[Episodes], other: list[Episodes]
    ) -> tuple[tuple[Tensors, Frames], int]:
        """All frames with their progress, and how many of the episodes are demonstrations."""
        shown = joined(won)
        seen, _ = all_frames(shown, self.leaves)
        frames = linear_progress(shown.length + 1)
        if other:
            apart = joined(other)
            seen = tt.cat([seen, all_frames(apart, self.leaves)[0]])
            frames = frames.followed_by(linear_progress(apart.length + 1, succeeds=False))
        return (seen, frames), len(shown)

    def _fit(self, seen: Tensors, frames: Frames, count: int) -> dict[str, Any]:
        settings = {f: getattr(self.config, f) for f in FitConfig.__dataclass_fields__}
        features = self.features.fit(seen)
        with forked(self.seed):
            error = fit(self.net, features, frames, count, self.window, FitConfig(**settings))
        print(f"rewind: fitted to {count} demonstrations, RMSE of progress {math.sqrt(error):.3f}")
        mismatched = int(frames.episode.max()) + 1 - count
        return {
            "demonstrations": count,
            "mismatched": mismatched,
            "frames": len(frames),
            "error": error,
            "config": asdict(self.config),
        }

    def _fingerprint(self, seen: Tensors) -> str:
        """Hash of everything that the fit depends on."""
        digest = hashlib.sha256(json.dumps([asdict(self.config), self.seed]).encode())
        for value in seen.values():
            digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()
