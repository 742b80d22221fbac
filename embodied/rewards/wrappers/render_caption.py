"""Wrappers that add rendered images or text descriptions of the environment to its observations.

Rewards read them; policies do not. The keys are `privileged/picture` and `privileged/caption`. At
the end of an episode `next_obs` shows the final state, not the next initial state: it is rendered
before the environment resets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.env import Step, VecEnv
from embodied.core.reward import AugmentsEnv, Reward
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper

PICTURE = "privileged/picture"
CAPTION = "privileged/caption"


class RenderObservation(Wrapper):
    """Adds the observation `name`, computed by `render(index [n]) -> [n, ...]` for the parallel
    envs `index`."""

    def __init__(
        self, env: VecEnv, name: str, leaf: Leaf, render: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(env, env.spec.with_obs(**{name: leaf}))
        self.name = name
        self.compute = render
        self.every = torch.arange(self.num_envs)
        self.final: dict[int, Tensor] = {}
        env.add_pre_reset_hook(self._render_final)

    def _render_final(self, rows: Tensor) -> None:
        """Render the envs that are about to reset. Only the first call in a step counts: with
        action repeat, an env may reset twice."""
        index = torch.tensor([i for i in rows.nonzero().flatten().tolist() if i not in self.final])
        if len(index):
            self.final |= dict(zip(index.tolist(), self.compute(index), strict=True))

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        return self.transform_obs(self.env.reset(seed, task, mask))

    def step(self, action: Tensor) -> Step:
        self.final = {}
        step = self.env.step(action)
        now = self.compute(self.every).to(self.device)
        after = now
        if step.ended.any():
            after = now.clone()
            for row in step.ended.nonzero().flatten().tolist():
                if row not in self.final:
                    raise ConfigError(
                        f"this environment cannot be rendered before it resets ({self.name}); "
                        "set reward.picture to an image among its observations"
                    )
                after[row] = self.final[row].to(self.device)
        obs = {**step.obs, self.name: now}
        following = {**step.next_obs, self.name: after}
        return replace(step, obs=obs, next_obs=following)

    def added_observation(self, env_id: int) -> Tensor:
        """The added observation of parallel env `env_id` (protocol `AddedObservation`). Clears the
        stored final observations, as `step` would."""
        final = self.final
        self.final = {}
        return final[env_id] if env_id in final else self.compute(self.every)[env_id]

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**obs, self.name: self.compute(self.every).to(self.device)}


@dataclass(frozen=True)
class Config:
    """Settings of the rendered images."""

    size: Count = 64  # side of the image of each camera view, pixels


class AddRenderObservation(RenderObservation):
    """Adds `privileged/picture`, uint8 [B, size, V size, 3] of V views, for use in YAML.

    Datasets collected in such an environment contain the images, so that a reward can be learned
    from them and then applied to the environment without them.
    """

    def __init__(self, config: Config, env: VecEnv) -> None:
        super().__init__(env, PICTURE, *_render_batch(env, config.size))


def with_render(env: VecEnv, size: int) -> RenderObservation:
    """`env` with `privileged/picture`: its rendered images, uint8 [B, size, V size, 3]."""
    return RenderObservation(env, PICTURE, *_render_batch(env, size))


def _render_batch(env: VecEnv, size: int) -> tuple[Leaf, Callable[[Tensor], Tensor]]:
    leaf = Leaf((size, env.num_views * size, 3), "uint8", 0, 255)
    return leaf, lambda index: env.render_batch(index, size)


class CaptionVocabulary:
    """Maps captions to integers, in the order of their first appearance."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.number: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def of(self, text: str) -> int:
        """The number of `text`; a new caption gets the next free one."""
        if text not in self.number:
            self.number[text] = len(self.texts)
            self.texts.append(text)
        return self.number[text]

    def get_state(self) -> dict[str, Any]:
        return {"texts": list(self.texts)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.texts = list(state["texts"])
        self.number = {text: number for number, text in enumerate(self.texts)}


def with_captions(env: VecEnv, captions: CaptionVocabulary) -> RenderObservation:
    """`env` with `privileged/caption`: `describe(row)` of each env, as its number in `captions`
    (int64 [B])."""

    def describe(index: Tensor) -> Tensor:
        return torch.tensor([captions.of(env.describe(row)) for row in index.tolist()])

    return RenderObservation(env, CAPTION, Leaf((), "int64", 0, 2**31 - 1), describe)


def augment_shared(env: VecEnv, reward: Reward, name: str) -> VecEnv:
    """`env` as `reward` augments it, where another reward may have augmented it already: images
    of the same size are rendered once.

    Raises ConfigError if both want the same observation with different settings; `name` says
    which reward this one is.
    """
    if not isinstance(reward, AugmentsEnv):
        return env
    after, old = reward.augment_env(env), env.spec.obs
    added = after.name if isinstance(after, RenderObservation) else ""
    if after is env or added not in old:
        return after
    if old[added] == after.spec.obs[added] and old[added].is_image:
        return env
    raise ConfigError(
        f"{name} renders {added} with other settings than a reward before it; give both the same "
        "size, or let both use an image among the observations"
    )
