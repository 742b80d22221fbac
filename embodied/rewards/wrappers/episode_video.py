"""Wrapper that keeps frames of every running episode, and numbers all observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper

VIDEO_INDEX = "privileged/video_index"


@dataclass
class Video:
    """An episode: `numbers` of its T observations; `places` of the kept `images` in it, the newest
    one included."""

    numbers: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    stride: int = 1

    def append(self, number: int, image: Tensor, most: int) -> None:
        """The next observation. Of a long episode only every second, fourth, ... image is kept, at
        most 2 x `most` and the newest."""
        if self.places and self.places[-1] % self.stride:
            del self.places[-1], self.images[-1]  # it was kept as the newest only
        self.places.append(len(self.numbers))
        self.images.append(image)
        self.numbers.append(number)
        if len(self.places) > 2 * most:
            self.stride *= 2
            kept = [i for i, at in enumerate(self.places) if at % self.stride == 0]
            kept += [len(self.places) - 1] if kept[-1] != len(self.places) - 1 else []
            self.places = [self.places[i] for i in kept]
            self.images = [self.images[i] for i in kept]

    def sampled(self, most: int) -> tuple[list[int], Tensor]:
        """At most `most` of the kept frames, evenly, the first and the last included: their places,
        and the images [n, H, W, 3]."""
        count = min(most, len(self.places))
        at = torch.linspace(0, len(self.places) - 1, count).round().long().tolist()
        return [self.places[i] for i in at], torch.stack([self.images[i] for i in at])

    def get_state(self) -> dict[str, Any]:
        images = torch.stack(self.images) if self.images else torch.zeros(0)
        return {
            "numbers": list(self.numbers),
            "places": list(self.places),
            "images": images,
            "stride": self.stride,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Video:
        return cls(
            list(state["numbers"]), list(state["places"]), [*state["images"]], state["stride"]
        )


class VideoRecorder:
    """Records `most` to 2 x `most` frames of each running episode, and numbers observations from
    0."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self.running: list[Video] = []
        self.finished: list[Video] = []

    def begin(self, images: Tensor, rows: Sequence[int]) -> Tensor:
        """Episodes begin in the envs `rows` with `images` [B, H, W, 3]; returns the numbers of
        these observations [len(rows)]."""
        self.running += [Video() for _ in range(len(images) - len(self.running))]
        for row in rows:
            self.running[row] = Video()
        return self.append(images, rows)

    def append(self, images: Tensor, rows: Sequence[int]) -> Tensor:
        """The next observations of the episodes in the envs `rows`; returns their numbers."""
        numbers = torch.arange(self.count, self.count + len(rows))
        self.count += len(rows)
        for row, number in zip(rows, numbers.tolist(), strict=True):
            self.running[row].append(number, images[row].cpu(), self.most)
        return numbers

    def end(self, rows: Sequence[int]) -> None:
        """The episodes in the envs `rows` are complete."""
        self.finished += [self.running[row] for row in rows]

    def take(self) -> list[Video]:
        """The episodes that were completed since the last call."""
        done = self.finished
        self.finished = []
        return done

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count, "running": [one.get_state() for one in self.running]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.running = [Video.from_state(one) for one in state["running"]]
        self.finished = []


class EpisodeVideoWrapper(Wrapper):
    """Adds `privileged/video_index` (int64 [B]), the number of each observation, and removes the
    image `name` if it is `hidden`. `recorder` gets the frames."""

    def __init__(self, env: VecEnv, recorder: VideoRecorder, name: str, hidden: bool) -> None:
        spec = env.spec.with_obs(**{VIDEO_INDEX: Leaf((), "int64", 0, 2**31 - 1)})
        self.name = name
        self.hidden = hidden
        self.recorder = recorder
        super().__init__(env, replace(spec, obs=self._without(dict(spec.obs))))
        self.every = list(range(self.num_envs))

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        index = self.memory.get("index", torch.zeros(self.num_envs, dtype=torch.int64))
        self.memory = {"index": self._begun(obs, self.rows(mask), index)}
        return self.transform_obs(obs)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        reached = self.recorder.append(step.next_obs[self.name], self.every).to(self.device)
        self.memory = {"index": reached}
        if step.ended.any():
            self.recorder.end(step.ended.nonzero().flatten().tolist())
            self.memory = {"index": self._begun(step.obs, step.ended, reached)}
        following = {**self._without(step.next_obs), VIDEO_INDEX: reached}
        return replace(step, obs=self.transform_obs(step.obs), next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return {**self._without(obs), VIDEO_INDEX: self.memory["index"]}

    def _begun(self, obs: Tensors, rows: Tensor, index: Tensor) -> Tensor:
        """`index` [B] with the numbers of the first observations of the envs `rows` [B] (bool)."""
        numbers = self.recorder.begin(obs[self.name], rows.nonzero().flatten().tolist())
        return index.to(self.device).masked_scatter(rows, numbers.to(self.device))

    def _without(self, obs: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in obs.items() if key != self.name or not self.hidden}
