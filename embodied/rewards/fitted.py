"""Rewards with a model that is fitted to recorded episodes, and its file and card in a folder.

The card is a JSON file beside the weights. It holds the fingerprint of everything that the fit
depends on, so that the same model is not fitted twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.env import VecEnv
from embodied.core.reward import SummedReward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import joined
from embodied.rewards.demonstrations.observations import (
    Folders,
    all_frames,
    read_demonstrations,
    require_observed,
    shared_leaves,
)
from embodied.rewards.demonstrations.progress_hops import Frames, linear_progress
from embodied.rewards.wrappers.render_caption import PICTURE, with_render


def fingerprint(settings: Any, seed: int, data: Iterable[Tensor]) -> str:
    """Hash of everything that a fit depends on; `settings` are a dataclass."""
    digest = hashlib.sha256(json.dumps([asdict(settings), seed]).encode())
    for value in data:
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_fitted(module: nn.Module, weights: Path, card: Path, facts: dict[str, Any]) -> None:
    """Write weights and card; the card last, so that a folder with a card is complete."""
    weights.parent.mkdir(parents=True, exist_ok=True)
    card.unlink(missing_ok=True)
    save_file({k: v.cpu().contiguous() for k, v in module.state_dict().items()}, weights)
    card.write_text(json.dumps(facts, indent=1))


def fingerprint_of(card: Path) -> str | None:
    """The fingerprint in a card; None if there is no card."""
    return json.loads(card.read_text())["fingerprint"] if card.exists() else None


class FittedReward(nn.Module, SummedReward):
    """Reward from the progress that a model predicts, fitted to demonstrations and other episodes.

    The model is stored in the run's `folder`; built again with the same settings and episodes, it
    is loaded instead of fitted. A subclass sets `name` and `measure`, and fits in `fit_model`.
    """

    frozen = True
    name: ClassVar[str]
    """Name of the model's files, and in messages."""
    measure: ClassVar[str]
    """What the error of the fit is of."""
    leaves: dict[str, Leaf]
    __call__ = SummedReward.__call__  # not that of modules

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__()
        self.config = config
        self.seed = seed

    def read(
        self, spec: Spec, others: Folders, other_limit: int | None
    ) -> tuple[Episodes, Episodes | None]:
        """The demonstrations and the other episodes; sets `leaves`, the observations in use."""
        shown, rest = read_demonstrations(
            self.config.demos, self.config.demo_episodes, others, other_limit
        )
        self.leaves = shared_leaves(self.config.views, [part.spec for part in shown + rest])
        require_observed(self.leaves, spec)
        return joined(shown), joined(rest) if rest else None

    def fit_model(self, moments: Tensors, frames: Frames, shown: int) -> float:
        """Fit the model to all frames (leaves [N, ...]), of which the first `shown` episodes are
        demonstrations. Returns the mean squared error."""
        raise NotImplementedError(f"{type(self).__name__} has no model to fit")

    def fit_once(
        self, shown: Episodes, rest: Episodes | None, folder: Path | None, device: torch.device
    ) -> None:
        """Load the model from `folder` if it was fitted to the same data, else fit and store it
        (None: it is not stored)."""
        moments, _ = all_frames(shown, self.leaves)
        frames = linear_progress(shown.length + 1)
        if rest is not None:
            moments = tt.cat([moments, all_frames(rest, self.leaves)[0]])
            frames = frames.followed_by(linear_progress(rest.length + 1, succeeds=False))
        mark = fingerprint(self.config, self.seed, [*moments.values(), frames.progress])
        files = None
        if folder is not None:
            files = (folder / f"{self.name}.safetensors", folder / f"{self.name}.json")
        if files is not None and fingerprint_of(files[1]) == mark:
            self.load_state_dict(load_file(files[0]))
        else:
            error = self.fit_model(moments, frames, len(shown))
            print(
                f"{self.name}: fitted to {len(shown)} demonstrations, "
                f"RMSE of {self.measure} {math.sqrt(error):.3f}"
            )
            facts = {
                "version": 1,
                "fingerprint": mark,
                "demonstrations": len(shown),
                "others": 0 if rest is None else len(rest),
                "frames": len(frames),
                "error": error,
                "config": asdict(self.config),
            }
            if files is not None:
                save_fitted(self, *files, facts)
        self.to(device).eval().requires_grad_(False)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with rendered images, if they are needed and not observed."""
        if PICTURE not in self.leaves or PICTURE in env.spec.obs:
            return env
        return with_render(env, self.leaves[PICTURE].shape[0])

    def get_state(self) -> dict[str, Any]:
        return {"module": self.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state["module"])
