"""Wrappers that add captions of events, and how often each one occurred in the episode.

An environment that implements `core.env.HasEventCaptions` has a method

    event_captions(before: Tensors, after: Tensors) -> list[str]

of the observations before and after a step: one sentence per parallel env, "" for no event. Any
other environment is captioned with `describe` after every step, which is slower. Added observations
(those in `next_obs` belong to the step that led there):

    privileged/caption   int64, number of the caption in a `CaptionVocabulary`; 0: the empty caption
    privileged/times     int64, occurrences of the caption in this episode, this one included
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from embodied.core.env import HasEventCaptions, Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol
from embodied.rewards.wrappers.render_caption import CAPTION, CaptionVocabulary, with_captions

TIMES = "privileged/times"
MOST = 2**31 - 1


def with_event_captions(env: VecEnv, captions: CaptionVocabulary) -> VecEnv:
    """`env` with captions of its steps and their counts; caption 0 is the empty one."""
    captions.of("")
    source = find_protocol(env, HasEventCaptions)
    if source is None:
        return CaptionCountWrapper(with_captions(env, captions))
    return CaptionCountWrapper(EventCaptionWrapper(env, captions, source.event_captions))


class EventCaptionWrapper(Wrapper):
    """Adds the caption of the step that led to an observation; initial states have caption 0."""

    def __init__(
        self,
        env: VecEnv,
        captions: CaptionVocabulary,
        describe_step: Callable[[Tensors, Tensors], list[str]],
    ) -> None:
        super().__init__(env, env.spec.with_obs(**{CAPTION: Leaf((), "int64", 0, MOST)}))
        self.captions = captions
        self.describe_step = describe_step
        self.before: Tensors = {}

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        self.before = self.env.reset(seed, task, mask)
        zero = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        last = self.memory.get("caption", zero)
        self.memory = {"caption": last.masked_fill(self.rows(mask), 0)}
        return self._with(self.before)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        said = self.describe_step(self.before, step.next_obs)
        numbers = torch.tensor([self.captions.of(text) for text in said], device=self.device)
        following = {**step.next_obs, CAPTION: numbers}
        self.before = step.obs
        self.memory = {"caption": numbers.masked_fill(step.ended, 0)}
        return replace(step, obs=self._with(step.obs), next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        self.before = obs
        return self._with(obs)

    def _with(self, obs: Tensors) -> Tensors:
        return {**obs, CAPTION: self.memory["caption"]}


class CaptionCountWrapper(Wrapper):
    """Adds the number of occurrences of an observation's caption in its episode."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env, env.spec.with_obs(**{TIMES: Leaf((), "int64", 0, MOST)}))
        self.every = torch.arange(self.num_envs, device=self.device)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self._reset_counts(self.rows(mask))
        return self._with(obs)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        numbers, counts = step.next_obs[CAPTION], self.memory["counts"]
        if (room := int(numbers.max()) + 1) > counts.shape[1]:
            # Twice the size needed, so that it grows rarely.
            more = counts.new_zeros(self.num_envs, 2 * room - counts.shape[1])
            counts = self.memory["counts"] = torch.cat([counts, more], 1)
        counts[self.every, numbers] += 1
        times = counts[self.every, numbers].long()
        following = {**step.next_obs, TIMES: times}
        self.memory["times"] = times
        if step.ended.any():
            self._reset_counts(step.ended)
        return replace(step, obs=self._with(step.obs), next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return self._with(obs)

    def _reset_counts(self, rows: Tensor) -> None:
        """Reset the counts of the envs `rows` [B] (bool)."""
        if "counts" not in self.memory:
            counts = torch.zeros(self.num_envs, 64, dtype=torch.int32, device=self.device)
            self.memory = {"counts": counts, "times": counts[:, 0].long()}
        self.memory["counts"][rows] = 0
        self.memory["times"] = self.memory["times"].masked_fill(rows, 0)

    def _with(self, obs: Tensors) -> Tensors:
        return {**obs, TIMES: self.memory["times"]}
