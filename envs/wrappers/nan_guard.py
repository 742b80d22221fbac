"""NanGuard: stops at the first NaN or infinity and saves the steps that led to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.env import NotFinite, NotSavable, Step, VecEnv, require_finite
from embodied.core.tensors import Tensors, nest
from embodied.core.wrapper import Wrapper


@dataclass(frozen=True)
class GuardConfig:
    """Settings of the guard against numbers that are not finite."""

    folder: str = "outputs/not_finite"  # where the file is written
    keep: Count = 5  # saved steps
    states: bool = True  # save `get_state` of each step too (slower)


class NanGuard(Wrapper):
    """Raises NotFinite at the first NaN or infinity and writes the last steps to an .npz file.

    For each of the last `keep` steps ("0" the failed step, "1" the one before), the file has
    `<back>/obs/*`, `<back>/action` and, if the environment can save it, `<back>/state/*`; `next/*`
    and `reward` are the outputs of the failed step, if it returned. The error names the file.
    """

    def __init__(self, config: GuardConfig, env: VecEnv) -> None:
        super().__init__(env)
        self.config = config
        self.kept: deque[Tensors] = deque(maxlen=config.keep)
        self.obs: Tensors = {}
        self.written: Path | None = None
        self.savable = config.states

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self.obs = self.env.reset(seed, task, mask)
        return self.obs

    def transform_obs(self, obs: Tensors) -> Tensors:
        self.obs = obs
        return obs

    def step(self, action: Tensor) -> Step:
        state: Tensors = {}
        if self.savable:
            try:
                state = self.env.get_state()
            except NotSavable:
                self.savable = False
        kept = {**nest(self.obs, "obs"), "action": action, **nest(state, "state")}
        self.kept.append({key: value.detach().cpu().clone() for key, value in kept.items()})
        out: Tensors = {}
        name = "NanGuard"
        try:
            require_finite(torch.zeros(self.num_envs), {"action": action}, name)
            step = self.env.step(action)
            out = {**nest(step.next_obs, "next"), "reward": step.reward}
            require_finite(step.reward, step.next_obs, name)
            require_finite(step.reward, step.obs, name)
        except NotFinite as error:
            raise NotFinite(
                f"{error}; the last {len(self.kept)} steps are in {self._dump(out)}"
            ) from error
        self.obs = step.obs
        return step

    def _dump(self, out: Tensors) -> Path:
        if self.written is None:
            folder = Path(self.config.folder)
            folder.mkdir(parents=True, exist_ok=True)
            self.written = _free(folder)
            arrays = {key: value.detach().cpu().numpy() for key, value in out.items()}
            for back, kept in enumerate(reversed(self.kept)):
                arrays |= {f"{back}/{key}": value.numpy() for key, value in kept.items()}
            with self.written.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
        return self.written


def _free(folder: Path) -> Path:
    """The first path not_finite_<n>.npz in `folder` that does not exist yet."""
    number = 0
    while (file := folder / f"not_finite_{number}.npz").exists():
        number += 1
    return file
