"""Preference labellers: label which of two observations is closer to the goal.

A label is "first", "second", "tie" or "abstain". Three labellers: a simulated one with the true
reward and an error rate (for experiments), an image-text encoder, and a vision-language model with
the two-stage prompts of RL-VLM-F (Wang et al., 2024). The latter gets each pair in both orders,
because models have a position bias; if its answer depends on the order, it abstains.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, NonNegative, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.remembered import Remembered
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import WORKERS, AskPool
from embodied.llm.chat import BudgetSpent, Chat, ChatError, Message, object_schema
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
        """Add labels [m]."""
        self.asked += len(labels)
        self.tied += int((labels == TIE).sum())
        self.abstained += int((labels == ABSTAIN).sum())
        self.labelled = self.asked - self.tied - self.abstained


class Labeller(Protocol):
    """Compares pairs of observations. `needs_images`: it gets `picture` (uint8 [n, H, W, 3]),
    otherwise the environment's `reward` [n]. `stopped`: why labelling ended ("": it has not).
    """

    needs_images: bool
    counts: LabelCounts
    stopped: str

    def submit(self, tickets: Sequence[int], first: Tensors, second: Tensors) -> None:
        """Have n pairs labelled, which `tickets` [n] identify. Does not wait for a model."""
        ...

    def poll(self, wait: bool = False) -> dict[int, int]:
        """The labels since the last call, by ticket; SKIPPED where the labeller had to stop before.
        With `wait` the labels of all pairs that were submitted."""
        ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Ladders(Protocol):
    """An image-text encoder that provides ordered captions, from worst to best, of which the last
    one means the same as a given sentence."""

    def ladder(self, sentence: str) -> list[list[str]] | None: ...


class CountingLabeller(Remembered, Labeller):
    """Base class of labellers: counts, random generator, their state, and labels at once.

    State does not include pairs in flight: they are submitted again.
    """

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
        labels = self.label(first, second)
        self.counts.count(labels)
        self.ready |= dict(zip(tickets, labels.tolist(), strict=True))

    def poll(self, wait: bool = False) -> dict[int, int]:
        ready = self.ready
        self.ready = {}
        return ready


@dataclass(frozen=True)
class SimulatedConfig:
    """Settings of the simulated labeller."""

    error: Fraction = 0.0  # probability of a wrong label
    tie: NonNegative = 0.0  # largest difference of rewards that is a tie
    unsure: Fraction = 0.0  # probability of an abstention


class SimulatedLabeller(CountingLabeller):
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


class EmbeddingLabeller(CountingLabeller):
    """Scores each image separately, so that the order of a pair does not matter."""

    needs_images = True

    def __init__(self, config: EmbeddingConfig, seed: int = 0) -> None:
        super().__init__(seed)
        if not config.goal and not config.rungs:
            raise ConfigError('labeller.goal is empty: describe the goal, labeller.goal="..."')
        self.config = config
        self.model: ImageText
        if isinstance(config.model, dict):
            self.model = build(config.model, ImageText)
        else:  # imported only here: not every labeller needs one
            contrastive = importlib.import_module("embodied.vision.contrastive")
            self.model = contrastive.open_image_text(config.model)
        rungs: list[list[str]] = [[rung] for rung in config.rungs]
        if not rungs and isinstance(self.model, Ladders):
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
    schema: bool = True  # request JSON in the second stage; else one line, parsed strictly
    patience: Count = 3  # failed requests in a row before the rest of a session is skipped
    parallel: Count = WORKERS  # pairs that are asked about at a time


class VisionLanguageLabeller(CountingLabeller):
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
        question = [Message("user", decide)]
        if self.config.schema:
            return WORDS[self._ask(question, SCHEMA).data["nearer"]]
        label = label_of(self._ask(question).text)
        return ABSTAIN if label is None else label

    def _ask(self, messages: Sequence[Message], schema: dict[str, Any] | None = None) -> Any:
        answer = self.chat.ask(messages, schema)
        if not answer.cached:
            with self.lock:
                self.counts.tokens += answer.tokens
        return answer


def label_of(text: str) -> int | None:
    """The label that is the last line of `text`; None if that line is anything else."""
    lines = [line for line in text.splitlines() if line.strip()]
    found = re.fullmatch(r'[\s"\'*]*([a-zA-Z]+)[\s"\'*.]*', lines[-1]) if lines else None
    return WORDS.get(found[1].lower()) if found else None
