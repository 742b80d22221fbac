"""What rewards look at beside a policy's observations: pictures and sentences of every row.

The leaves are `privileged/picture` and `privileged/caption`. `next_obs` shows the end of an episode
itself, not the start of the next one: a row that ends is drawn before the world begins it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper

PICTURE = "privileged/picture"
CAPTION = "privileged/caption"


class Watched(Wrapper):
    """Adds `name`: what `look(index [n])` returns of rows, [n, ...]."""

    def __init__(
        self, env: VecEnv, name: str, leaf: Leaf, look: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(env, env.spec.with_obs(**{name: leaf}))
        self.name, self.look = name, look
        self.every = torch.arange(self.num_envs)
        self.ends: dict[int, Tensor] = {}
        env.add_pre_reset_hook(self._keep)

    def _keep(self, rows: Tensor) -> None:
        """The first time in a step counts: a repeated action may end a row twice."""
        index = torch.tensor([i for i in rows.nonzero().flatten().tolist() if i not in self.ends])
        if len(index):
            self.ends |= dict(zip(index.tolist(), self.look(index), strict=True))

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.transform_obs(self.env.reset(seed, task, mask))

    def step(self, action: Tensor) -> Step:
        self.ends = {}
        step = self.env.step(action)
        now = self.look(self.every).to(self.device)
        after = now
        if step.ended.any():
            after = now.clone()
            for row in step.ended.nonzero().flatten().tolist():
                if row not in self.ends:
                    raise ConfigError(
                        f"this world cannot be looked at before it begins again ({self.name}); "
                        "give the reward a picture that is among the observations (reward.picture)"
                    )
                after[row] = self.ends[row].to(self.device)
        obs = {**step.obs, self.name: now}
        following = {**step.next_obs, self.name: after}
        return replace(step, obs=obs, next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, self.name: self.look(self.every).to(self.device)}


def pictured(env: VecEnv, size: int) -> Watched:
    """`env` with its photographs, uint8 [B, size, V size, 3] of V views."""
    leaf = Leaf((size, env.views * size, 3), "uint8", 0, 255)
    return Watched(env, PICTURE, leaf, lambda index: env.photographs(index, size))


class Captions:
    """Sentences by number, in the order in which they were first met."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.number: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def of(self, text: str) -> int:
        """The number of `text`; a new one gets the next."""
        if text not in self.number:
            self.number[text] = len(self.texts)
            self.texts.append(text)
        return self.number[text]

    def get_state(self) -> dict[str, Any]:
        return {"texts": list(self.texts)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.texts = list(state["texts"])
        self.number = {text: number for number, text in enumerate(self.texts)}


def captioned(env: VecEnv, captions: Captions) -> Watched:
    """`env` with what `describe` says of each row, as a number in `captions` (int64 [B])."""

    def look(index: Tensor) -> Tensor:
        return torch.tensor([captions.of(env.describe(row)) for row in index.tolist()])

    return Watched(env, CAPTION, Leaf((), "int64", 0, 2**31 - 1), look)
