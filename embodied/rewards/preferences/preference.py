"""Preference-based reward: learned from pairwise comparisons of observations by a labeller.

RL-VLM-F (Wang et al., 2024): every so many steps, pairs of the agent's recent observations are
labelled, and an ensemble of scores is fitted to all labels so far. Every transition sampled from
then on is rewarded with the new scores:

    r = (mean_e S_e(observation after the action) - z) / s

s is the standard deviation, and z the mean or the maximum, of the scores of all stored
observations, recomputed after each fit. With the maximum no reward is above 0: ending the episode
at the goal is optimal.

Before the first labels the reward may be log(1 + d) of the distance d to the k-th nearest of the
newest states (`explore`; PEBBLE, Lee et al., 2021), and the first fit may restart the critic.

Image store: each observation is stored once and referred to by its index.

A replay buffer would hold every image twice (`obs` and `next_obs`), and every sampled batch would
run the reward network on it again. With an index, an image is scored once when it is new and once
after every change of the network.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.bounds import (
    Count,
    CountOrZero,
    Fraction,
)
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.rewards.intrinsic.features import Novelty
from embodied.rewards.preferences.labellers import (
    Labeller,
    Labels,
    agreement,
    gather,
    reached_observations,
    rows_of_episodes,
    sample_pairs,
    split,
    targets,
)
from embodied.rewards.preferences.ranker import FitConfig, PolicyTerm, Ranker
from embodied.rewards.wrappers.added_observations import PICTURE, ObservationWrapper, with_render

IMAGE_INDEX = "privileged/sight"


class ImageStore:
    """Ring buffer of the newest `capacity` observations. Indices count up from 0 and are never
    reused; scores are kept for all of them, also for observations that were overwritten."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.images: Tensors = {}
        self.reward = torch.full((capacity,), torch.nan)  # of the env; NaN: initial state
        self.before = torch.full((capacity,), -1)  # index of the one before it; -1: initial state
        self.scores = torch.zeros(1024)

    @property
    def oldest(self) -> int:
        return max(0, self.count - self.capacity)

    def add(self, images: Tensors) -> Tensor:
        """Store observations, leaves [n, ...]; returns their indices [n]."""
        n = tt.length(images)
        numbers = torch.arange(self.count, self.count + n)
        if not self.images:
            self.images = tt.each(images, lambda v: v.new_zeros(self.capacity, *v.shape[1:]).cpu())
        tt.put(self.images, numbers % self.capacity, tt.to(images, "cpu"))
        self.reward[numbers % self.capacity] = torch.nan
        self.before[numbers % self.capacity] = -1
        self.count += n
        if self.count > len(self.scores):
            self.scores = torch.cat([self.scores, torch.zeros(max(len(self.scores), n))])
        return numbers

    def take(self, numbers: Tensor) -> Tensors:
        """The observations with indices `numbers` [n], which must still be stored, and the
        environment's `reward` [n] of the transitions that led to them."""
        slots = numbers % self.capacity
        return {**tt.take(self.images, slots), "reward": self.reward[slots]}

    def reached(self, newest: int | None = None) -> Tensor:
        """Indices of all stored observations that ended a transition (no initial states), or of
        the `newest` of them only."""
        held = torch.arange(self.oldest, self.count)
        found = held[~self.reward[held % self.capacity].isnan()]
        return found if newest is None else found[-newest:]

    def segments(self, ends: Tensor, steps: int) -> Tensor:
        """Indices [m, steps] of the segments of successive observations that end at `ends` [n]:
        those that do not reach back beyond the episode or the store."""
        back = [ends]
        for _ in range(steps - 1):
            earlier = self.before[back[-1] % self.capacity]
            back.append(torch.where(back[-1] >= self.oldest, earlier, -1))
        found = torch.stack(back[::-1], 1)
        there = (found >= self.oldest) & ~self.reward[found % self.capacity].isnan()
        return found[there.all(1)]

    def get_state(self) -> dict[str, Any]:
        filled = min(self.count, self.capacity)
        return {
            "count": self.count,
            "images": {key: value[:filled].clone() for key, value in self.images.items()},
            "reward": self.reward[:filled].clone(),
            "before": self.before[:filled].clone(),
            "scores": self.scores[: self.count].clone(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.__init__(self.capacity)
        self.add(state["images"])
        self.count = state["count"]
        self.reward[: len(state["reward"])] = state["reward"]
        self.before[: len(state["before"])] = state["before"]
        self.scores = torch.zeros(max(1024, 2 * self.count))
        self.scores[: self.count] = state["scores"]


class ImageIndexWrapper(ObservationWrapper):
    """Adds the observations `names` to `store` and their index `privileged/sight` (int64 [B]) to
    the observations, from which `hidden` ones are then removed."""

    def __init__(
        self, env: VecEnv, store: ImageStore, names: Sequence[str], hidden: Sequence[str] = ()
    ) -> None:
        super().__init__(env, IMAGE_INDEX, Leaf((), "int64", 0, 2**31 - 1), hidden)
        self.store = store
        self.names = names

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        now = self._store(step.obs)
        after = now
        if step.ended.any():
            ended = step.ended.nonzero().flatten()
            after = now.clone()
            after[ended] = self._store(tt.take(step.next_obs, ended))
        obs, following = self.having(step.obs, now), self.having(step.next_obs, after)
        return replace(step, obs=obs, next_obs=following)

    def transform_obs(self, obs: Tensors) -> Tensors:
        return self.having(obs, self._store(obs))

    def _store(self, obs: Tensors) -> Tensor:
        return self.store.add({name: obs[name] for name in self.names}).to(self.device)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Settings of preference learning."""

    labeller: Node  # compares pairs of observations
    leaf: str | None = None  # the observation that is scored; null: a rendered image
    only: tuple[str, ...] = ()  # names of its elements that are scored; empty: all
    size: Count = 64  # side of a rendered image, pixels
    picture: str | None = None  # the image that a labeller is given; null: the rendered image
    every: Count = 1000  # environment steps between sessions
    pairs: Count = 40  # pairs labelled in a session
    segment: Count = 1  # successive observations of a side; the sums of their scores are compared
    labels: Count = 1000  # number of labels at which labelling ends
    recent: Count = 5000  # newest observations, of which pairs are drawn
    ties: Fraction = 0.6  # a session with a larger fraction of ties is the last one
    zero: Literal["mean", "highest"] = "mean"  # score with reward 0
    memory: Count = 100_000  # stored observations; best the size of the replay buffer
    synchronous: bool = False  # training waits for the labels, so that it is repeatable
    explore: CountOrZero = 0  # k: before the first labels the distance to the k-th neighbour pays
    explore_steps: CountOrZero = 0  # environment steps before the first session
    restart: CountOrZero | None = None  # updates of a new critic after the first fit; null: kept
    fit: FitConfig = field(default_factory=FitConfig)  # training of the ensemble


class Preference(Remembered, Reward):
    """Applied when transitions are sampled, by the index of the observation that they led to;
    transitions without an index are scored directly. Before the first labels: see `explore`."""

    frozen = False
    remembered = (
        *("ranker", "store", "labeller", "random", "metrics", "zero", "scale"),
        *("steps", "done", "pairs", "arrived", "issued", "restart", "novelty"),
    )
    needs_local_env = True
    policy_term: PolicyTerm | None = None

    def __init__(
        self,
        config: Config,
        spec: Spec,
        device: torch.device,
        seed: int = 0,
        folder: Path | None = None,
    ) -> None:
        if distributed.world() > 1:
            raise ConfigError("preferences are learned in one process: start without torchrun")
        self.config = config
        self.labeller = build(config.labeller, Labeller, seed=seed, folder=folder)
        self.scored = PICTURE if config.leaf is None else config.leaf
        self.shown = PICTURE if config.picture is None else config.picture
        leaf = Leaf((config.size, config.size, 3), "uint8", 0, 255)
        if config.leaf is not None:
            if config.leaf not in spec.obs:
                like = nearest(config.leaf, spec.obs)
                raise ConfigError(f"reward.leaf: no observation {config.leaf}{like}")
            leaf = spec.obs[config.leaf]
        self.columns = _columns(config, leaf)
        shape = leaf.shape if self.columns is None else (len(self.columns),)
        self.ranker = Ranker(replace(leaf, shape=shape, names=()), config.fit, device, seed)
        self.random = torch.Generator().manual_seed(seed)
        self.store = ImageStore(config.memory)
        self.zero = 0.0
        self.scale = 1.0
        self.steps = 0
        self.done = ""  # why labelling ended
        self.pairs: dict[int, tuple[Tensors, Tensors]] = {}  # of the running session, by ticket
        self.arrived: dict[int, int] = {}  # labels of the running session, by ticket
        self.issued = 0  # number of tickets so far
        self.metrics: dict[str, Tensor] = {}
        self.restarts_critic = config.restart is not None
        self.restart = False  # whether it is to be restarted now
        self.novelty = Novelty(spec.obs, config.explore, device)

    def augment_env(self, env: VecEnv) -> VecEnv:
        names = {self.scored, self.shown} if self.labeller.needs_images else {self.scored}
        rendered = with_render(env, self.config.size) if PICTURE in names else env
        return ImageIndexWrapper(rendered, self.store, sorted(names), (PICTURE,))

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        """Store the transitions' observations; every `every` steps label pairs and learn."""
        numbers = transitions[f"next_obs/{IMAGE_INDEX}"].cpu()
        self.store.reward[numbers % self.store.capacity] = transitions["reward"].cpu()
        earlier = transitions[f"obs/{IMAGE_INDEX}"].cpu()
        self.store.before[numbers % self.store.capacity] = earlier
        if len(self.ranker):
            self.store.scores[numbers] = self.ranker.score(
                self.view(self.store.take(numbers)[self.scored])
            )
        else:
            self.novelty.add(transitions)
        before = self.steps
        self.steps = self.steps + len(step.reward)
        every = self.config.every
        due = self.steps // every > before // every and self.steps >= self.config.explore_steps
        if due and not self.pairs and not self.done and len(self.ranker) < self.config.labels:
            ends = self.store.reached(self.config.recent)
            pool = self.store.segments(ends, self.config.segment)
            count = min(self.config.pairs, self.config.labels - len(self.ranker))
            if len(pool):
                drawn = pool[torch.randint(len(pool), (2, count), generator=self.random)]
                self._submit(*(self._sides(self.take, side) for side in drawn))
        found = self._collect(self.config.synchronous) if self.pairs else None
        if found is not None:  # fit all labels so far, and update all scores
            self.restart |= self.restarts_critic and not len(self.ranker)
            self.metrics |= self.ranker.learn(found, self.policy_term)
            held = self.store.reached()
            pictures = self.view(self.store.take(held)[self.scored])
            self.store.scores[held] = self.ranker.score(pictures)
            self.measure(self.store.scores[held])

    def _sides(self, take: Callable[[Tensor], Tensors], numbers: Tensor) -> Tensors:
        """What `take` has of segments `numbers` [n, steps]: leaves [n, steps, ...]."""
        flat = take(numbers.flatten())
        return tt.each(flat, lambda value: value.unflatten(0, tuple(numbers.shape)))

    def take(self, numbers: Tensor) -> Tensors:
        """What is known of the observations with indices `numbers` [n]."""
        return self.store.take(numbers)

    def ask(self, first: Tensors, second: Tensors) -> Labels | None:
        """Have pairs of segments labelled, given both sides' observations [n, steps, ...],
        `reward`, and the image if needed, and wait; None if no label resulted."""
        self._submit(first, second)
        return self._collect(wait=True)

    def _submit(self, first: Tensors, second: Tensors) -> None:
        """Begin a session: hand pairs to the labeller."""
        count = tt.length(first)
        tickets = range(self.issued, self.issued + count)
        self.issued += count
        for number, ticket in enumerate(tickets):
            one = {key: value[number] for key, value in first.items()}
            self.pairs[ticket] = (one, {key: value[number] for key, value in second.items()})
        self.labeller.submit(tickets, self._evidence(first), self._evidence(second))

    def _collect(self, wait: bool) -> Labels | None:
        """The labels of the session's pairs, once all of them were answered; None before, or if no
        label resulted."""
        self.arrived |= self.labeller.poll(wait)
        if len(self.arrived) < len(self.pairs):
            return None
        answered, target = targets([self.arrived[ticket] for ticket in self.pairs])
        sides = [tt.stack(list(side)) for side in zip(*self.pairs.values(), strict=True)]
        self.pairs = {}
        self.arrived = {}
        self._update_counts(target)
        if not len(answered):
            return None
        return self.labelled([tt.take(side, answered) for side in sides], target)

    def labelled(self, sides: list[Tensors], target: Tensor) -> Labels:
        """The labels of answered pairs, of both sides [n, ...] and the targets [n]."""
        one, other = (self.view(side[self.scored]) for side in sides)
        return one, other, target

    def set_state(self, state: dict[str, Any]) -> None:
        """Pairs that were not answered yet are submitted again."""
        super().set_state(state)
        left = {t: pair for t, pair in self.pairs.items() if t not in self.arrived}
        if left:
            first, second = (tt.stack(list(side)) for side in zip(*left.values(), strict=True))
            self.labeller.submit(list(left), self._evidence(first), self._evidence(second))

    def _evidence(self, side: Tensors) -> Tensors:
        """What the labeller gets of segments: the sum of the rewards, and the last image."""
        reward = side["reward"].sum(1)
        if self.labeller.needs_images:
            return {"picture": side[self.shown][:, -1], "reward": reward}
        return {"reward": reward}

    def _update_counts(self, target: Tensor) -> None:
        """Decide whether to continue labelling, and update the metrics."""
        tied = float((target == 0.5).float().mean()) if len(target) else 0.0
        if self.labeller.stopped:
            self.done = self.labeller.stopped
        elif tied > self.config.ties:
            self.done = f"{tied:.0%} of the last pairs were ties"
            logger.warning("preference: %s; labelling ends", self.done)
        for name in ("asked", "tied", "abstained", "tokens"):
            self.metrics[name] = torch.tensor(float(getattr(self.labeller.counts, name)))

    def view(self, images: Tensor) -> Tensor:
        """The elements of observations [..., size] that are scored."""
        return images if self.columns is None else images[..., self.columns]

    def measure(self, scores: Tensor) -> None:
        """Set the reward's zero and scale from scores [N]."""
        self.scale = max(float(scores.std()), 1e-3)
        self.zero = float(scores.mean() if self.config.zero == "mean" else scores.max())
        self.metrics["scale"] = torch.tensor(self.scale)

    def __call__(self, transitions: Tensors) -> Tensor:
        number, key = f"next_obs/{IMAGE_INDEX}", f"next_obs/{self.scored}"
        if not len(self.ranker):
            return self.novelty(transitions)
        if number in transitions:
            scores = self.store.scores[transitions[number].cpu()]
        elif key in transitions:
            scores = self.ranker.score(self.view(transitions[key]))
        else:
            raise ConfigError(
                f"the transitions have no {self.scored}, to which the reward was fitted"
            )
        return ((scores - self.zero) / self.scale).to(transitions["reward"].device)

    def take_restart(self) -> int | None:
        due = self.restart
        self.restart = False
        return self.config.restart if due else None

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Metrics of the last session; learning happens in `observe_step`."""
        return self.metrics

    def fit_from(self, episodes: Episodes, held_out: float = 0.2) -> dict[str, float]:
        """Have pairs of a dataset labelled and fit the reward to them; returns metrics.

        On the fraction `held_out` of the episodes: `accuracy`, how often the reward agrees with the
        labeller; `pairs` and `returns`, its agreement with the recorded reward. Raises ConfigError
        if the labeller gives no label.
        """
        names = {self.scored, self.shown} if self.labeller.needs_images else {self.scored}
        rows = reached_observations(episodes, names)
        steps = self.config.segment
        if int(episodes.length.min()) < steps:
            raise ConfigError(
                f"reward.segment={steps}: an episode has {int(episodes.length.min())} steps only"
            )
        kept, apart = split(len(episodes), held_out, self.random)

        def ask(among: Tensor) -> Callable[[int], Labels | None]:
            def some(n: int) -> Labels | None:
                first = sample_pairs(episodes, among, n, self.random, steps)[..., None]
                sides = (first + torch.arange(steps)).unbind(0)
                taken = (self._sides(lambda at: tt.take(rows, at), side) for side in sides)
                return None if self.done else self.ask(*taken)

            return some

        labels = gather(ask(kept), self.config.labels, self.config.pairs)
        if labels is None:
            raise ConfigError(f"the labeller gave no label ({self.done or 'it always abstained'})")
        self.ranker.learn(labels)
        checks = gather(ask(apart), max(20, self.config.labels // 5), self.config.pairs)
        scores = self.ranker.score(self.view(rows[self.scored]))
        self.measure(scores)
        tested = rows_of_episodes(rows | {"score": scores}, apart)
        return {
            "labels": float(len(labels[2])),
            "accuracy": math.nan if checks is None else self.ranker.accuracy(checks),
            **agreement(tested["score"], tested["reward"], tested["episode"]),
        }


def _columns(config: Config, leaf: Leaf) -> Tensor | None:
    """Indices of the elements that are scored; None: all."""
    for name in config.only:
        if name not in leaf.names:
            shown = "the rendered image" if config.leaf is None else config.leaf
            raise ConfigError(f"{shown} has no element {name}{nearest(name, leaf.names)}")
    return torch.tensor([leaf.names.index(name) for name in config.only]) if config.only else None
