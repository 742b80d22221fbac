"""Wrappers that add observations for rewards to read; policies do not.

    privileged/picture      uint8, the rendered environment
    privileged/caption      int64, number of a text in a `CaptionVocabulary`; 0: the empty caption
    privileged/times        int64, occurrences of the caption in this episode, this one included
    privileged/video_index  int64, number of the observation in a `VideoRecorder`
    privileged/visits       int64, visits of the state in this episode, 1 at the first

At the end of an episode `next_obs` has what belongs to the final state, not to the next initial
state: images are rendered before the environment resets. An environment that implements
`core.env.HasEventCaptions` has a method

    event_captions(before: Tensors, after: Tensors) -> list[str]

of the observations before and after a step: one sentence per parallel env, "" for no event. Any
other environment is captioned with `describe` after every step, which is slower. Visited states are
compared by a 64-bit hash of the policy's observations (floats rounded to 1/1000).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.env import HasEventCaptions, Step, VecEnv
from embodied.core.reward import AugmentsEnv, Reward
from embodied.core.spec import Leaf, hidden
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper, find_protocol

PICTURE = "privileged/picture"
CAPTION = "privileged/caption"
TIMES = "privileged/times"
VIDEO_INDEX = "privileged/video_index"
VISITS = "privileged/visits"
MOST = 2**31 - 1
GRID = 1000.0  # floats are rounded to 1 / GRID where states are compared
ROOM = 64  # steps by which the history of states grows


class ObservationWrapper(Wrapper):
    """Adds the observation `key`: `observe` returns its values [B] after a step, `begin` is called
    for new episodes, and `memory[newest]` has the newest values. Those of `hidden` go."""

    newest: ClassVar[str]

    def __init__(self, env: VecEnv, key: str, leaf: Leaf, hidden: Sequence[str] = ()) -> None:
        spec = env.spec.with_obs(**{key: leaf})
        self.key = key
        self.hidden = hidden
        super().__init__(env, replace(spec, obs=self.without_hidden(spec.obs)))

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        """Episodes begin in the envs `rows` [B] (bool) with `obs`."""

    def end(self, rows: Tensor) -> None:
        """The episodes of the envs `rows` [B] (bool) are over."""

    def observe(self, following: Tensors) -> Tensor:
        """The values [B] of `following`, to which a step led."""
        raise NotImplementedError(f"{type(self).__name__} observes nothing")

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        obs = self.env.reset(seed, task, mask)
        self.begin(obs, self.rows(mask))
        return self.transform_obs(obs)

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        after = self.observe(step.next_obs)
        if step.ended.any():
            self.end(step.ended)
            self.begin(step.obs, step.ended)
        obs, following = self.transform_obs(step.obs), self.having(step.next_obs, after)
        return replace(step, obs=obs, next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return self.having(obs, self.memory[self.newest])

    def having(self, obs: Tensors, value: Tensor) -> Tensors:
        """`obs` with the added observation, and without the hidden ones."""
        return {**self.without_hidden(obs), self.key: value}

    def without_hidden(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in obs.items() if name not in self.hidden}


class RenderObservation(ObservationWrapper):
    """Adds the observation `name`, computed by `render(index [n]) -> [n, ...]` for the parallel
    envs `index`."""

    def __init__(
        self, env: VecEnv, name: str, leaf: Leaf, render: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(env, name, leaf)
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
                        f"this environment cannot be rendered before it resets ({self.key}); "
                        "set reward.picture to an image among its observations"
                    )
                after[row] = self.final[row].to(self.device)
        obs, following = self.having(step.obs, now), self.having(step.next_obs, after)
        return replace(step, obs=obs, next_obs=following)

    def added_observation(self, env_id: int) -> Tensor:
        """The added observation of parallel env `env_id` (protocol `AddedObservation`). Clears the
        stored final observations, as `step` would."""
        final = self.final
        self.final = {}
        return final[env_id] if env_id in final else self.compute(self.every)[env_id]

    def transform_obs(self, obs: Tensors) -> Tensors:
        return self.having(obs, self.compute(self.every).to(self.device))


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
        size = config.size
        leaf = Leaf((size, env.num_views * size, 3), "uint8", 0, 255)
        super().__init__(env, PICTURE, leaf, lambda index: env.render_batch(index, size))


def with_render(env: VecEnv, size: int) -> RenderObservation:
    """`env` with `privileged/picture`: its rendered images, uint8 [B, size, V size, 3]."""
    return AddRenderObservation(Config(size), env)


def with_pictures(env: VecEnv, leaves: Mapping[str, Leaf]) -> VecEnv:
    """`env` with rendered images, if they are among `leaves` and not observed."""
    if PICTURE not in leaves or PICTURE in env.spec.obs:
        return env
    return with_render(env, leaves[PICTURE].shape[0])


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

    return RenderObservation(env, CAPTION, Leaf((), "int64", 0, MOST), describe)


def augment_shared(env: VecEnv, reward: Reward, name: str) -> VecEnv:
    """`env` as `reward` augments it, where another reward may have augmented it already: images
    of the same size are rendered once.

    Raises ConfigError if both want the same observation with different settings; `name` says
    which reward this one is.
    """
    if not isinstance(reward, AugmentsEnv):
        return env
    after, old = reward.augment_env(env), env.spec.obs
    added = after.key if isinstance(after, RenderObservation) else ""
    if after is env or added not in old:
        return after
    if old[added] == after.spec.obs[added] and old[added].is_image:
        return env
    raise ConfigError(
        f"{name} renders {added} with other settings than a reward before it; give both the same "
        "size, or let both use an image among the observations"
    )


def with_event_captions(env: VecEnv, captions: CaptionVocabulary) -> VecEnv:
    """`env` with captions of its steps and their counts; caption 0 is the empty one."""
    captions.of("")
    source = find_protocol(env, HasEventCaptions)
    if source is None:
        return CaptionCountWrapper(with_captions(env, captions))
    return CaptionCountWrapper(EventCaptionWrapper(env, captions, source.event_captions))


class EventCaptionWrapper(ObservationWrapper):
    """Adds the caption of the step that led to an observation; initial states have caption 0."""

    newest = "caption"

    def __init__(
        self,
        env: VecEnv,
        captions: CaptionVocabulary,
        describe_step: Callable[[Tensors, Tensors], list[str]],
    ) -> None:
        super().__init__(env, CAPTION, Leaf((), "int64", 0, MOST))
        self.captions = captions
        self.describe_step = describe_step
        self.before: Tensors = {}

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        zero = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.memory = {"caption": self.memory.get("caption", zero).masked_fill(rows, 0)}

    def observe(self, following: Tensors) -> Tensor:
        said = self.describe_step(self.before, following)
        numbers = torch.tensor([self.captions.of(text) for text in said], device=self.device)
        self.memory = {"caption": numbers}
        return numbers

    def transform_obs(self, obs: Tensors) -> Tensors:
        self.before = obs
        return super().transform_obs(obs)


class CaptionCountWrapper(ObservationWrapper):
    """Adds the number of occurrences of an observation's caption in its episode."""

    newest = "times"

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env, TIMES, Leaf((), "int64", 0, MOST))
        self.every = torch.arange(self.num_envs, device=self.device)

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        if "counts" not in self.memory:
            counts = torch.zeros(self.num_envs, 64, dtype=torch.int32, device=self.device)
            self.memory = {"counts": counts, "times": counts[:, 0].long()}
        self.memory["counts"][rows] = 0
        self.memory["times"] = self.memory["times"].masked_fill(rows, 0)

    def observe(self, following: Tensors) -> Tensor:
        numbers, counts = following[CAPTION], self.memory["counts"]
        if (room := int(numbers.max()) + 1) > counts.shape[1]:
            # Twice the size needed, so that it grows rarely.
            more = counts.new_zeros(self.num_envs, 2 * room - counts.shape[1])
            counts = self.memory["counts"] = torch.cat([counts, more], 1)
        counts[self.every, numbers] += 1
        self.memory["times"] = counts[self.every, numbers].long()
        return self.memory["times"]


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
        return {
            "numbers": list(self.numbers),
            "places": list(self.places),
            "images": torch.stack(self.images) if self.images else torch.zeros(0),
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


class EpisodeVideoWrapper(ObservationWrapper):
    """Adds `privileged/video_index` (int64 [B]), the number of each observation, and removes the
    image `name` if it is `hidden`. `recorder` gets the frames."""

    newest = "index"

    def __init__(self, env: VecEnv, recorder: VideoRecorder, name: str, hidden: bool) -> None:
        super().__init__(env, VIDEO_INDEX, Leaf((), "int64", 0, MOST), (name,) if hidden else ())
        self.name = name
        self.recorder = recorder
        self.every = list(range(self.num_envs))

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        numbers = self.recorder.begin(obs[self.name], rows.nonzero().flatten().tolist())
        index = self.memory.get("index", torch.zeros(self.num_envs, dtype=torch.int64))
        index = index.to(self.device).masked_scatter(rows, numbers.to(self.device))
        self.memory = {"index": index}

    def observe(self, following: Tensors) -> Tensor:
        reached = self.recorder.append(following[self.name], self.every).to(self.device)
        self.memory = {"index": reached}
        return reached

    def end(self, rows: Tensor) -> None:
        self.recorder.end(rows.nonzero().flatten().tolist())


class VisitCountWrapper(ObservationWrapper):
    """Adds the visits of the state, as the policy observes it, in this episode."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env, VISITS, Leaf((), "int64", 1, MOST))
        self.leaves = [name for name in sorted(env.spec.obs) if not hidden(name)]
        size = sum(env.spec.obs[name].size for name in self.leaves)
        generator = torch.Generator().manual_seed(0)
        self.salt = torch.randint(2**62, (size,), generator=generator) * 2 + 1
        self.memory = {
            "past": torch.zeros(self.num_envs, ROOM, dtype=torch.int64),
            "age": torch.zeros(self.num_envs, dtype=torch.int64),
        }

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        self.memory["age"][rows.cpu()] = 0
        self._record(obs, rows.cpu())

    def observe(self, following: Tensors) -> Tensor:
        self._record(following, torch.ones(self.num_envs, dtype=torch.bool))
        return self._counts(following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return self.having(obs, self._counts(obs))

    def _record(self, obs: Tensors, who: Tensor) -> None:
        """Record the observations of the envs `who` [B] (bool)."""
        age, past = self.memory["age"], self.memory["past"]
        if int(age.max()) >= past.shape[1]:
            past = torch.cat([past, torch.zeros_like(past)], 1)
            self.memory["past"] = past
        index = who.nonzero().flatten()
        past[index, age[index]] = self._hash(obs)[index]
        age[index] += 1

    def _counts(self, obs: Tensors) -> Tensor:
        """Visits [B] so far of the states that `obs` show."""
        past = self.memory["past"]
        lived = torch.arange(past.shape[1]) < self.memory["age"][:, None]
        same = past == self._hash(obs)[:, None]
        return (same & lived).sum(1).clamp(min=1).to(self.device)

    def _hash(self, obs: Tensors) -> Tensor:
        whole = [
            (part * GRID).round().long() if part.is_floating_point() else part.long()
            for part in [obs[name].cpu().reshape(self.num_envs, -1) for name in self.leaves]
        ]
        # Integer overflow wraps around, which makes this a hash.
        return (torch.cat(whole, 1) * self.salt).sum(1)
