"""RAPL: an encoder is aligned by comparisons of videos; the reward is optimal transport in it.

Tian et al., "What matters to you? Towards visual representation alignment for robot learning"
(2024). With embeddings phi of the n and m frames of two videos,

    C_ij = 1 - cos(phi(a_i), phi(b_j)) + order |i / n - j / m|
    P = argmin <P, C> - H(P) / sharpness,   P 1 = 1 / n,  P^T 1 = 1 / m       (Sinkhorn, in logs)
    R(a; b) = -<P, C>

A person is shown an anchor and two other videos, and says which of them is more like it in what
matters. Only the encoder learns from that, by the cross-entropy of

    P(second is more like it) = sigmoid((R(second; anchor) - R(first; anchor)) / temperature)

The reward of frame i is then -n sum_j P_ij C_ij, with the plan to the closest of the
demonstrations. Plans are of whole episodes: transitions are rewarded when they are sampled, those
of running episodes with the mean so far.

Differences from the source: cross-entropy in place of 1 - P, so that a tie has its optimum at 1/2;
the triplets are labelled by the recorded reward, by how near a video's mean is to the anchor's;
vectors as well as images; phi is a linear map of frozen features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import (
    Bound,
    Count,
    Fraction,
    NonNegative,
    Number,
    Positive,
    PositiveFraction,
)
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.device import forked
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.nn.optim import fit
from embodied.nn.statistics import spearman
from embodied.rewards.demonstrations.rewind import FrameFeatures
from embodied.rewards.fitted import FittedReward, Folders, Frames
from embodied.rewards.preferences.labellers import SKIPPED, Labeller, targets
from embodied.rewards.wrappers.added_observations import (
    PICTURE,
    VIDEO_INDEX,
    EpisodeVideoWrapper,
    Video,
    VideoRecorder,
)

ITERATIONS = 20  # of Sinkhorn
LEAST = 6  # videos of which triplets are made and checked


def plan(cost: Tensor, sharpness: float, iterations: int = ITERATIONS) -> Tensor:
    """The plan [..., n, m] with uniform marginals that minimises <P, C> - H(P) / sharpness, of
    costs [..., n, m]; its columns sum to 1 / m exactly, its rows to 1 / n in the limit."""
    n, m = cost.shape[-2:]
    score = -sharpness * cost
    row = cost.new_zeros(cost.shape[:-1])
    for _ in range(iterations):
        column = -(score + row[..., None]).logsumexp(-2) - np.log(m)
        row = -(score + column[..., None, :]).logsumexp(-1) - np.log(n)
    column = -(score + row[..., None]).logsumexp(-2) - np.log(m)
    return (score + row[..., None] + column[..., None, :]).exp()


def frame_rewards(one: Tensor, other: Tensor, sharpness: float, order: float = 0.0) -> Tensor:
    """-sum_j P_ij C_ij of each frame of the videos `one` to `other`, [..., n]; embeddings
    [..., n, d] and [..., m, d]."""
    unit, reference = (functional.normalize(video, dim=-1) for video in (one, other))
    cost = 1 - unit @ reference.transpose(-1, -2)
    if order:
        here, there = (
            torch.arange(v.shape[-2], device=v.device) / v.shape[-2] for v in (one, other)
        )
        cost = cost + order * (here[:, None] - there).abs()
    return -(plan(cost, sharpness) * cost).sum(-1)


@dataclass(frozen=True)
class Config:
    """Settings of the alignment and of the reward."""

    demos: Folders = None  # datasets of what is preferred; must be given
    demo_episodes: Count | None = 5  # episodes of each of `demos`; null: all
    data: Folders = None  # datasets of videos that are compared, 20 or more in all; must be given
    data_episodes: Count | None = None  # episodes of each of `data`; null: all
    view: str = PICTURE  # the observation that makes a frame
    model: str = "simclip"  # frozen features of images: "simclip", a folder, or a name on the hub
    labeller: Node | None = None  # compares rewards of videos; must be given
    triplets: Count = 100  # triplets of videos that are labelled
    held_out: Fraction = 0.3  # share of the videos of which no triplet is made
    frames: Annotated[int, Bound(2)] = 12  # most frames of a video, evenly spaced
    size: Count = 32  # elements of an embedding
    sharpness: Positive = 10.0  # inverse weight of the plan's entropy; small: nearly uniform plans
    order: NonNegative = 0.0  # cost of matching frames of other times; 0: order does not count
    temperature: Positive = 0.3  # difference of R by which one is preferred with 73%
    updates: Count = 1500  # gradient steps of the alignment
    batch_size: Count = 16  # triplets per gradient step
    lr: PositiveFraction = 0.03  # AdamW's initial learning rate; it falls to 0 as a cosine
    scale: Number = 1.0  # weight of the reward
    env_weight: Number = 0.0  # weight of the environment's reward

    @property
    def views(self) -> tuple[str, ...]:
        return (self.view,)


def triplet_logit(triplets: Tensor, how: Config) -> Tensor:
    """The logit [n] of the second video being more like the anchor than the first one is, of the
    embeddings [n, 3, frames, d] of anchor, first and second."""
    alike = frame_rewards(triplets[:, 1:], triplets[:, :1], how.sharpness, how.order).sum(2)
    return (alike[:, 1] - alike[:, 0]) / how.temperature


def nearest_demo(videos: Tensor, demos: Tensor, how: Config) -> Tensor:
    """Frame rewards [v, frames] of videos [v, frames, d] to the closest of the demonstrations
    [e, frames', d]."""
    each = frame_rewards(videos[:, None], demos[None], how.sharpness, how.order)
    return each[torch.arange(len(videos)), each.sum(2).argmax(1)]


def evenly(count: int, most: int) -> Tensor:
    """`most` places in 0 .. count - 1, evenly, both ends included; repeated where they are few."""
    return torch.linspace(0, count - 1, most).round().long()


def _number(episodes: Episodes) -> Tensor:
    """The number [N] of the episode of each step."""
    return torch.repeat_interleave(torch.arange(len(episodes)), episodes.length)


class Rapl(FittedReward):
    """The reward by the closest demonstration, in the aligned encoder: fitted when it is built.

    `worth` [videos]: the mean recorded reward of each video, which the labeller judges by.
    """

    name = "rapl"
    measure = "the labels' probability"
    frozen = False
    needs_local_env = True
    preferred: Tensor

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path | None
    ) -> None:
        super().__init__(config, seed)
        if not config.data or config.labeller is None:
            raise ConfigError(
                "rapl learns from compared videos: reward.data=DIR reward.labeller=NODE"
            )
        self.labeller = build(config.labeller, Labeller, seed=seed, folder=folder)
        if self.labeller.needs_images:
            raise ConfigError(
                "reward.labeller compares an image with a goal, and no video with an anchor: "
                "choose one of rewards, such as SimulatedLabeller"
            )
        shown, videos = self.read(spec, config.data, config.data_episodes)
        assert videos is not None
        if len(videos) < LEAST:
            raise ConfigError(f"reward.data has {len(videos)} episodes, and {LEAST} are needed")
        sums = torch.zeros(len(videos)).index_add(
            0, _number(videos), videos.steps["reward"].float()
        )
        self.worth = sums / videos.length
        self.evidence = (self.worth,)
        with forked(seed):
            self.features = FrameFeatures(self.leaves, config.model)
            self.project = nn.Linear(self.features.size, config.size)
        self.register_buffer("preferred", torch.zeros(len(shown), config.frames, config.size))
        self.fit_once(shown, videos, folder, device)
        self.recorder = VideoRecorder(config.frames)
        self.rewards = torch.zeros(0)  # by the number of the observation; NaN: not known yet
        self.mean = 0.0  # of the observations of complete episodes
        self.count = 0

    def fit_model(self, moments: Tensors, frames: Frames, shown: int) -> float:
        """Align the projection to labelled triplets, and embed the demonstrations."""
        how = self.config
        features = self._in_one_scale(moments)
        parts = features.split(torch.bincount(frames.episode).tolist())
        videos = torch.stack([part[evenly(len(part), how.frames)] for part in parts])
        shows, videos = videos[:shown], videos[shown:]
        random = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(videos), generator=random)
        held = min(max(2, round(how.held_out * len(order))), len(order) - 3)
        apart, among = order[:held], order[held:]
        triplets, label = self._labelled(among, random)

        def logit(index: Tensor) -> Tensor:
            return triplet_logit(self.project(videos[triplets[index]]), how)

        def loss() -> Tensor:
            index = torch.randint(len(label), (how.batch_size,))
            return functional.binary_cross_entropy_with_logits(logit(index), label[index])

        with forked(self.seed):
            fit(self.project.parameters(), loss, how.updates, how.lr, decreasing=True)
        with torch.no_grad():
            self.preferred.copy_(self.project(shows))
            aligned = nearest_demo(self.project(videos[apart]), self.preferred, how).sum(1)
            unaligned = nearest_demo(videos[apart], shows, how).sum(1)
            predicted = logit(torch.arange(len(label))).sigmoid()
        self.found = {
            "labels": len(label),
            "aligned": spearman(aligned, self.worth[apart]),
            "unaligned": spearman(unaligned, self.worth[apart]),
        }
        figures = f"{self.found['aligned']:.2f} aligned, {self.found['unaligned']:.2f} before"
        print(f"rapl: rank correlation with the reward of {len(apart)} other videos {figures}")
        return float((predicted - label).square().mean())

    def _in_one_scale(self, moments: Tensors) -> Tensor:
        """Features [N, size] of frames, centred, all elements divided by the same number: the
        geometry of the frozen features is kept."""
        self.features.fit(moments)
        norm = self.features.norm
        norm.std.fill_(norm.std.square().mean().sqrt())
        return self.features(moments)

    def _labelled(self, among: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Triplets [n, 3] of the videos `among`, and the probability [n] that the third one is more
        like the first one than the second one is."""
        scores = torch.rand(self.config.triplets, len(among), generator=random)
        triplets = among[scores.argsort(1)[:, :3]]
        anchor, first, second = self.worth[triplets].unbind(1)
        sides = ({"reward": -(side - anchor).abs()} for side in (first, second))
        self.labeller.submit(range(len(triplets)), *sides)
        found = self.labeller.poll(wait=True)
        answered, label = targets([found.get(each, SKIPPED) for each in range(len(triplets))])
        if not len(label):
            raise ConfigError(
                f"the labeller gave no label ({self.labeller.stopped or 'it abstained'})"
            )
        return triplets[answered], label

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with the numbers of its observations; its frames are recorded."""
        rendered = super().augment_env(env)
        return EpisodeVideoWrapper(
            rendered, self.recorder, self.config.view, hidden=rendered is not env
        )

    def augment_episode(self, obs: Tensors) -> Tensors:
        """The numbers of a recorded episode's observations, whose rewards are known from now on."""
        if self.config.view not in obs:
            raise ConfigError(
                f"the episodes have no observation {self.config.view}"
                f"{nearest(self.config.view, obs)}: reward.view=NAME"
            )
        frames = obs[self.config.view]
        numbers = self.recorder.count + torch.arange(len(frames))
        self.recorder.count += len(numbers)
        self._take_in(Video(numbers.tolist(), list(range(len(frames))), [*frames]))
        return {VIDEO_INDEX: numbers}

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        for video in self.recorder.take():
            self._take_in(video)

    @torch.no_grad()
    def _take_in(self, video: Video) -> None:
        """Remember the rewards of a complete episode's observations."""
        places, frames = video.sampled(self.config.frames)
        device = self.preferred.device
        seen = self.project(self.features({self.config.view: frames.to(device)}))
        found = len(seen) * nearest_demo(seen[None], self.preferred, self.config)[0]
        every = np.interp(np.arange(len(video.numbers)), places, found.cpu().numpy())
        if (more := video.numbers[-1] + 1 - len(self.rewards)) > 0:
            room = torch.full((max(more, len(self.rewards)),), torch.nan)
            self.rewards = torch.cat([self.rewards, room])
        self.rewards[torch.tensor(video.numbers)] = torch.from_numpy(every).float()
        self.count += len(every)
        self.mean += (float(every.sum()) - len(every) * self.mean) / self.count

    def components(self, transitions: Tensors) -> Tensors:
        numbers = transitions[f"next_obs/{VIDEO_INDEX}"].cpu()
        known = numbers < len(self.rewards)
        found = torch.full((len(numbers),), torch.nan)
        found[known] = self.rewards[numbers[known]]
        value = found.nan_to_num(self.mean).to(transitions["reward"])
        return {
            "env": self.config.env_weight * transitions["reward"],
            "transport": self.config.scale * value,
        }

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Nothing is learned from transitions; returns the mean reward of complete episodes."""
        return {"mean": torch.tensor(self.mean)}

    def get_state(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in ("rewards", "mean", "count")}
        return {**super().get_state(), **parts, "recorder": self.recorder.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.recorder.set_state(state["recorder"])
        self.rewards, self.mean, self.count = state["rewards"], state["mean"], state["count"]
