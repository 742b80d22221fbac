"""What happened in each step as a caption by number, and how often in this episode.

A world that can say what happened has a method

    event_captions(before: Tensors, after: Tensors) -> list[str]

over the observations before and after a step, one sentence a row and "" for nothing. Any other is
asked to `describe` every row after every step, which costs more and repeats itself less. Added are
`privileged/caption` (a number in Captions; 0: nothing was said) and `privileged/times` (how often
it was said in this episode, this time included). `next_obs` has those of the step that led there.
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
from embodied.rewards.wrappers.render_caption import CAPTION, Captions, captioned

TIMES = "privileged/times"
MOST = 2**31 - 1


def told(env: VecEnv, captions: Captions) -> VecEnv:
    """`env` with captions of its steps and their counts; number 0 is the empty caption."""
    captions.of("")
    source = find_protocol(env, HasEventCaptions)
    if source is None:
        return Counted(captioned(env, captions))
    return Counted(Told(env, captions, source.event_captions))


class Told(Wrapper):
    """Adds the caption of the step that led to an observation; the first of an episode has 0."""

    def __init__(
        self, env: VecEnv, captions: Captions, happened: Callable[[Tensors, Tensors], list[str]]
    ) -> None:
        super().__init__(env, env.spec.with_obs(**{CAPTION: Leaf((), "int64", 0, MOST)}))
        self.captions, self.happened = captions, happened
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
        said = self.happened(self.before, step.next_obs)
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


class Counted(Wrapper):
    """Adds how often the caption of an observation came up in its episode."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env, env.spec.with_obs(**{TIMES: Leaf((), "int64", 0, MOST)}))
        self.every = torch.arange(self.num_envs, device=self.device)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self._begin(self.rows(mask))
        return self._with(obs)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        numbers, counts = step.next_obs[CAPTION], self.memory["counts"]
        if (room := int(numbers.max()) + 1) > counts.shape[1]:
            # Twice the room that is needed, so that it seldom grows.
            more = counts.new_zeros(self.num_envs, 2 * room - counts.shape[1])
            counts = self.memory["counts"] = torch.cat([counts, more], 1)
        counts[self.every, numbers] += 1
        times = counts[self.every, numbers].long()
        following = {**step.next_obs, TIMES: times}
        self.memory["times"] = times
        if step.ended.any():
            self._begin(step.ended)
        return replace(step, obs=self._with(step.obs), next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return self._with(obs)

    def _begin(self, rows: Tensor) -> None:
        """Forget the episodes of `rows` [B] (bool)."""
        if "counts" not in self.memory:
            counts = torch.zeros(self.num_envs, 64, dtype=torch.int32, device=self.device)
            self.memory = {"counts": counts, "times": counts[:, 0].long()}
        self.memory["counts"][rows] = 0
        self.memory["times"] = self.memory["times"].masked_fill(rows, 0)

    def _with(self, obs: Tensors) -> Tensors:
        return {**obs, TIMES: self.memory["times"]}
