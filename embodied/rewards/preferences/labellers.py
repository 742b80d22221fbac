"""Preference labellers: label which of two observations is closer to the goal.

A label is "first", "second", "tie" or "abstain". Three labellers: a simulated one with the true
reward and an error rate (for experiments), an image-text encoder, and a vision-language model with
the two-stage prompts of RL-VLM-F (Wang et al., 2024). The latter gets each pair in both orders,
because models have a position bias; if its answer depends on the order, it abstains.

Labels of a dataset for offline preference learning (Offline RL-VLM-F; Venkataraman et al., 2024):
half of the pairs are two observations of the same episode, half of two episodes, so that long
episodes and their uneventful parts do not dominate.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core import tensors as tt
from embodied.core.bounds import Count, Fraction, NonNegative, Positive
from embodied.core.build import ConfigError, Node, build, nearest
from embodied.core.remembered import Remembered
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.transitions import transitions
from embodied.llm.ask_pool import AskPool
from embodied.llm.chat import BudgetSpent, Chat, ChatError, Message, object_schema
from embodied.nn.statistics import spearman
from embodied.vision.image_text import ImageText

logger = logging.getLogger(__name__)
FIRST, SECOND, TIE, ABSTAIN, SKIPPED = range(5)
Pair = tuple[int, Tensor, Tensor]
"""The ticket and both images (uint8 [H, W, 3]) of a pair."""
SWAPPED = {FIRST: SECOND, SECOND: FIRST, TIE: TIE, ABSTAIN: ABSTAIN}
WORDS = {"first": FIRST, "second": SECOND, "same": TIE, "unsure": ABSTAIN}
SCHEMA = object_schema({"nearer": {"enum": list(WORDS)}})


@dataclass
class LabelCounts:
    """Pairs labelled, by outcome. `failed` counts the abstentions without any answer; `tokens`
    those of answers that were not cached."""

    asked: int = 0
    labelled: int = 0
    tied: int = 0
    abstained: int = 0
    failed: int = 0
    tokens: int = 0

    def count(self, labels: Tensor) -> None:
        self.asked += len(labels)
        self.tied += int((labels == TIE).sum())
        self.abstained += int((labels == ABSTAIN).sum())
        self.labelled = self.asked - self.tied - self.abstained


class Labeller(Remembered):
    """Compares pairs of observations; this base class for labellers that do so at once (`label`).

    `needs_images`: it gets `picture` (uint8 [n, H, W, 3]), otherwise the environment's `reward`
    [n]. `stopped`: why labelling ended ("": it has not). The state does not include pairs in
    flight: they are submitted again.
    """

    needs_images: bool
    remembered = ("counts", "stopped", "random")

    def __init__(self, seed: int) -> None:
        self.counts = LabelCounts()
        self.stopped = ""
        self.random = torch.Generator().manual_seed(seed)
        self.ready: dict[int, int] = {}

    def label(self, first: Tensors, second: Tensors) -> Tensor:
        """Labels [n] (int64) of n pairs, without a request to a model."""
        raise NotImplementedError(f"{type(self).__name__} does not label at once")

    def submit(self, tickets: Sequence[int], first: Tensors, second: Tensors) -> None:
        """Have n pairs labelled, which `tickets` [n] identify. Does not wait for a model."""
        labels = self.label(first, second)
        self.counts.count(labels)
        self.ready |= dict(zip(tickets, labels.tolist(), strict=True))

    def poll(self, wait: bool = False) -> dict[int, int]:
        """The labels since the last call, by ticket; SKIPPED where the labeller had to stop before.
        With `wait` the labels of all pairs that were submitted."""
        ready = self.ready
        self.ready = {}
        return ready


@dataclass(frozen=True)
class SimulatedConfig:
    """Settings of the simulated labeller."""

    error: Fraction = 0.0  # probability of a wrong label
    tie: NonNegative = 0.0  # largest difference of rewards that is a tie
    unsure: Fraction = 0.0  # probability of an abstention


class SimulatedLabeller(Labeller):
    """Labels by the environment's true reward: for experiments, not evidence about a real model."""

    needs_images = False

    def __init__(self, config: SimulatedConfig, seed: int = 0) -> None:
        super().__init__(seed)
        self.config = config

    def label(self, first: Tensors, second: Tensors) -> Tensor:
        gain = (second["reward"] - first["reward"]).cpu()
        wrong, unsure = torch.rand(2, len(gain), generator=self.random)
        labels = ((gain > 0) ^ (wrong < self.config.error)).long()
        labels[gain.abs() <= self.config.tie] = TIE
        labels[unsure < self.config.unsure] = ABSTAIN
        return labels


@dataclass(frozen=True)
class EmbeddingConfig:
    """Settings of the labeller with an image-text encoder. One sentence is scored by its
    similarity, several by the expected position sum_k k softmax_k(sharpness cos_k)."""

    goal: str  # the goal in words
    rungs: tuple[str, ...] = ()  # sentences from worst to best; empty: the encoder's, or the goal
    model: str | Node = "simclip"  # "simclip", a folder, a name on the hub, or an encoder's node
    sharpness: Positive = 30.0  # inverse temperature of the softmax over sentences
    tie: NonNegative = 0.0  # largest difference of scores that is a tie


class EmbeddingLabeller(Labeller):
    """Scores each image separately, so that the order of a pair does not matter."""

    needs_images = True

    def __init__(self, config: EmbeddingConfig, seed: int = 0) -> None:
        super().__init__(seed)
        if not config.goal and not config.rungs:
            raise ConfigError('labeller.goal is empty: describe the goal, labeller.goal="..."')
        self.config = config
        self.model: Any
        if isinstance(config.model, dict):
            self.model = build(config.model, ImageText)
        else:  # imported only here: not every labeller needs one
            contrastive = importlib.import_module("embodied.vision.contrastive")
            self.model = contrastive.open_image_text(config.model)
        rungs: list[list[str]] = [[rung] for rung in config.rungs]
        if not rungs and hasattr(self.model, "ladder"):  # ordered captions, from worst to best
            rungs = self.model.ladder(config.goal) or []
        # Several phrasings of a sentence are averaged.
        means = [self.model.texts(phrases).mean(0) for phrases in rungs or [[config.goal]]]
        self.texts = functional.normalize(torch.stack(means), dim=1)

    @torch.no_grad()
    def score(self, pictures: Tensor) -> Tensor:
        """Scores [n] of images uint8 [n, H, W, 3]."""
        alike = self.model.images(pictures) @ self.texts.T
        if alike.shape[1] == 1:
            return alike[:, 0].cpu()
        rung = torch.arange(alike.shape[1], device=alike.device, dtype=alike.dtype)
        return ((alike * self.config.sharpness).softmax(1) @ rung).cpu()

    def label(self, first: Tensors, second: Tensors) -> Tensor:
        gain = self.score(second["picture"]) - self.score(first["picture"])
        labels = (gain > 0).long()
        labels[gain.abs() <= self.config.tie] = TIE
        return labels


@dataclass(frozen=True)
class VisionLanguageConfig:
    """Settings of the labeller with a vision-language model."""

    chat: Node  # the vision-language model
    goal: str  # the goal in one sentence
    swap: bool = True  # ask in both orders; abstain if they disagree
    patience: Count = 3  # failed requests in a row before the rest of a session is skipped
    parallel: Count = 32  # pairs that are asked about at a time


class VisionLanguageLabeller(Labeller):
    """First describes both images, then decides from the description alone."""

    needs_images = True

    def __init__(
        self, config: VisionLanguageConfig, seed: int = 0, folder: Path | None = None
    ) -> None:
        super().__init__(seed)
        if not config.goal:
            raise ConfigError('labeller.goal is empty: describe the goal, labeller.goal="..."')
        self.config = config
        self.chat: Chat = importlib.import_module("embodied.llm.client").open_chat(
            config.chat, folder
        )
        self.pool = AskPool[Pair, int](
            lambda pairs: [self._judge(one, two) for _, one, two in pairs], workers=config.parallel
        )
        self.lock = threading.Lock()
        self.lost = 0  # failed requests in a row

    def submit(self, tickets: Sequence[int], first: Tensors, second: Tensors) -> None:
        if not self.pool.pending:
            self.lost = 0
        pairs = list(zip(tickets, first["picture"], second["picture"], strict=True))
        self.pool.submit(pairs[::-1])  # so that the first is asked first

    def poll(self, wait: bool = False) -> dict[int, int]:
        if wait:
            self.pool.drain()
        found = {one.question[0]: one.answer for one in self.pool.poll() if one.answer is not None}
        labels = torch.tensor([label for label in found.values() if label != SKIPPED])
        self.counts.count(labels)
        if self.pool.spent:
            if not self.stopped:
                text = "labeller: %s; the %d labels before that are kept"
                logger.warning(text, self.pool.spent, len(labels))
            self.stopped = self.pool.spent
            found |= {pair[0]: SKIPPED for pair in self.pool.discard()}
        return found

    def set_state(self, state: dict[str, Any]) -> None:
        self.pool.clear()
        super().set_state(state)

    def _judge(self, one: Tensor, two: Tensor) -> int:
        """The label of a pair; SKIPPED after too many failed requests. Called in a thread."""
        if self.lost >= self.config.patience:
            return SKIPPED
        try:
            label = self._label(one, two)
        except BudgetSpent:
            raise
        except ChatError as error:
            with self.lock:
                self.lost += 1
                self.counts.failed += 1
                if self.lost == self.config.patience:
                    logger.warning("labeller: %s; continuing in the next session", error)
            return ABSTAIN
        with self.lock:
            self.lost = 0
        return label

    def _label(self, one: Tensor, two: Tensor) -> int:
        if torch.equal(one, two):
            return TIE
        label = self._label_in_order(one, two)
        if not self.config.swap or label == ABSTAIN:
            return label
        return label if self._label_in_order(two, one) == SWAPPED[label] else ABSTAIN

    def _label_in_order(self, one: Tensor, two: Tensor) -> int:
        """The label of one order, from two requests."""
        wish = f'Somebody wants this: "{self.config.goal}".'
        describe = (
            f"Two pictures of the same place follow: the first, then the second. {wish} In a few "
            "sentences: what of it does the first picture show, what does the second, and which "
            "one is nearer to it, if they differ at all?"
        )
        seen = self._ask([Message("user", describe, (one, two))])
        decide = (
            f"{wish} Two pictures were compared, with these words:\n\n{seen.text.strip()}\n\nBy "
            'these words, which picture is nearer to what is wanted? Answer "first", "second", '
            '"same" if they do not differ in it, or "unsure".'
        )
        return WORDS[self._ask([Message("user", decide)], SCHEMA).data["nearer"]]

    def _ask(self, messages: Sequence[Message], schema: dict[str, Any] | None = None) -> Any:
        answer = self.chat.ask(messages, schema)
        if not answer.cached:
            with self.lock:
                self.counts.tokens += answer.tokens
        return answer


Labels = tuple[Tensor, Tensor, Tensor]  # images [n, ...] of both, P(second preferred) [n]
CHECKED = 2000  # pairs to compare with the recorded reward
AT_ONCE = 256  # pairs that a labeller gets at once


def joined(parts: Sequence[Labels]) -> Labels:
    first, second, target = (torch.cat(each) for each in zip(*parts, strict=True))
    return first, second, target


def targets(labels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The indices [m] of the pairs that were answered, and P(second preferred) [m] of each."""
    found = torch.tensor(labels)
    answered = ((found != ABSTAIN) & (found != SKIPPED)).nonzero().flatten()
    return answered, torch.where(found == TIE, 0.5, (found == SECOND).float())[answered]


def reached_observations(episodes: Episodes, names: set[str]) -> Tensors:
    """The observation after every step of a dataset: `names`, with `reward` and `episode`."""
    for name in names - set(episodes.final):
        raise ConfigError(
            f"the dataset has no {name}{nearest(name, episodes.final)}; choose another: "
            "reward.leaf=NAME (and reward.picture=NAME if the labeller needs images)"
        )
    rows = transitions(episodes, gamma=1.0)
    following = {name: rows[f"next_obs/{name}"] for name in names}
    return {**following, "reward": rows["reward"], "episode": rows["episode"]}


def split(count: int, held_out: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of training and of held-out episodes; at least one of each."""
    if count < 2:
        raise ConfigError("at least two episodes are needed: one is held out to check the reward")
    order = torch.randperm(count, generator=random)
    apart = min(max(1, round(held_out * count)), count - 1)
    return order[apart:], order[:apart]


def sample_pairs(
    episodes: Episodes, among: Tensor, n: int, random: torch.Generator, steps: int = 1
) -> Tensor:
    """Indices of n pairs [2, n], uniform in time; every other pair is within one episode. With
    `steps` they are first steps of segments of that length, which the episodes `among` hold."""
    pick = among[torch.randint(len(among), (2, n), generator=random)]
    pick[1, ::2] = pick[0, ::2]
    place = torch.rand(2, n, generator=random) * (episodes.length[pick] - steps + 1)
    return episodes.start[pick] + place.long()


def gather(ask: Callable[[int], Labels | None], want: int, at_once: int) -> Labels | None:
    """Labels of up to `want` pairs; fewer if labelling ends early, None if there are none."""
    parts: list[Labels] = []
    while (known := sum(len(part[2]) for part in parts)) < want:
        found = ask(min(at_once, want - known))
        if found is None:
            break
        parts.append(found)
    return joined(parts) if parts else None


def agreement(score: Tensor, reward: Tensor, episode: Tensor) -> dict[str, float]:
    """Agreement of scores [N] with recorded rewards [N]: `pairs`, the fraction of random pairs
    (without ties) in the same order; `returns`, Spearman's correlation of the episodes' sums."""
    one, two = torch.randint(len(score), (2, CHECKED), generator=torch.Generator().manual_seed(0))
    true = reward[two] - reward[one]
    told = true.abs() > 1e-6
    same = ((score[two] - score[one]) * true > 0) & told
    count = int(episode.max()) + 1
    present = torch.bincount(episode, minlength=count) > 0
    sums = [torch.zeros(count).index_add(0, episode, each)[present] for each in (score, reward)]
    return {"pairs": float(same.sum() / told.sum()), "returns": spearman(sums[0], sums[1])}


def rows_of_episodes(transitions: Tensors, among: Tensor) -> Tensors:
    return tt.take(transitions, torch.isin(transitions["episode"], among).nonzero().flatten())


class SegmentPairs:
    """A `Source` of labelled pairs of segments, for a learner that learns from preferences itself.

    A batch of n has the leaves of `rows` (`obs/*`, `action`) as [n, 2, segment, ...], and `label`
    [n] (float32), the probability that the second segment is preferred: 0, 1/2 or 1. A segment is
    `segment` successive steps of one episode. A labeller that needs images sees the last one of a
    segment, another one the sum of its rewards.

    The labels are part of the state; they are asked for when they are first needed, so that a
    resumed run asks for none.
    """

    def __init__(
        self,
        rows: Tensors,
        episodes: Episodes,
        labeller: Labeller,
        segment: int,
        count: int,
        picture: str | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if segment < 1:
            raise ValueError(f"segment={segment} should be at least 1")
        self.among = (episodes.length >= segment).nonzero().flatten()
        if not len(self.among):
            raise ConfigError(
                f"no episode has the {segment} steps of a segment; the longest has "
                f"{int(episodes.length.max())}"
            )
        self.picture = _picture(episodes, picture) if labeller.needs_images else None
        self.rows = {key: value.to(device).contiguous() for key, value in rows.items()}
        self.episodes, self.labeller = episodes, labeller
        self.segment, self.count = segment, count
        self.device = torch.device(device)
        self.random = torch.Generator().manual_seed(seed)
        self.labels: Labels | None = None  # first steps of both segments, and the targets

    def __len__(self) -> int:
        return self.count

    def labelled(self) -> Labels:
        """The first steps [m] of both segments and the targets [m], which are asked for now if they
        were not yet; ConfigError if there is no label."""
        if self.labels is None:
            found = gather(self._ask, self.count, AT_ONCE)
            if found is None:
                reason = self.labeller.stopped or "it always abstained"
                raise ConfigError(f"the labeller gave no label ({reason})")
            if len(found[2]) < self.count:
                reason = self.labeller.stopped or "it abstained"
                logger.warning("%d of %d pairs are labelled: %s", len(found[2]), self.count, reason)
            self._set(found)
        assert self.labels is not None
        return self.labels

    def _set(self, labels: Labels) -> None:
        first, second, target = (part.to(self.device) for part in labels)
        self.labels = first, second, target

    def _ask(self, n: int) -> Labels | None:
        """Labels of up to `n` new pairs; None where labelling ended."""
        if self.labeller.stopped:
            return None
        first, second = sample_pairs(self.episodes, self.among, n, self.random, self.segment)
        self.labeller.submit(range(n), self._evidence(first), self._evidence(second))
        found = self.labeller.poll(wait=True)
        answered, target = targets([found.get(pair, SKIPPED) for pair in range(n)])
        return (first[answered], second[answered], target) if len(answered) else None

    def _evidence(self, first: Tensor) -> Tensors:
        """What the labeller gets of the segments that begin at `first` [n]."""
        within = first[:, None] + torch.arange(self.segment)
        evidence = {"reward": self.episodes.steps["reward"][within].sum(1)}
        if self.picture is not None:
            shown = {"picture": self.episodes.steps[f"obs/{self.picture}"]}
            evidence |= load(tt.take(shown, within[:, -1]))
        return evidence

    def sample(self, n: int) -> Tensors:
        """`n` pairs with replacement, by torch's default generator."""
        first, second, target = self.labelled()
        pick = torch.randint(len(target), (n,), device=self.device)
        begin = torch.stack([first[pick], second[pick]], 1)
        index = begin[:, :, None] + torch.arange(self.segment, device=self.device)
        rows = load(tt.take(self.rows, index.flatten()))
        pairs = tt.each(rows, lambda value: value.unflatten(0, tuple(index.shape)))
        return {**pairs, "label": target[pick]}

    def metrics(self) -> dict[str, float]:
        target = self.labelled()[2]
        ties = float((target == 0.5).float().mean())
        return {"data/pairs": float(len(target)), "data/tied_pairs": ties}

    def get_state(self) -> dict[str, Any]:
        return {"labels": list(self.labelled())}

    def set_state(self, state: dict[str, Any]) -> None:
        first, second, target = state["labels"]
        self._set((first, second, target))


def _picture(episodes: Episodes, name: str | None) -> str:
    images = [leaf for leaf, spec in episodes.spec.obs.items() if spec.is_image]
    if name is None and len(images) == 1:
        return images[0]
    if name not in images:
        raise ConfigError(
            f"the labeller needs an image of each segment, and {name or 'none'} is no image of the "
            f"dataset{nearest(name or '', images)}: data.pairs.picture=NAME"
        )
    return name
