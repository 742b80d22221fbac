"""Annotate: captions of events are labelled helpful or not by a language model and rewarded.

    r = env_weight r_env + weight r(c) / n(c)^beta

c is the caption of a step, n(c) its occurrences in this episode so far, r(c) its current label:
frequent captions get next to no reward. New captions are labelled asynchronously during training,
newest first, each once; an abstention is no label. ONI (Zheng et al., 2024), after Motif (Klissarov
et al., 2023). Transitions are rewarded when they are sampled.

A caption is due at its first occurrence, and again at twice the count if no label resulted. So
common captions are retried soon, those that no labeller can decide cost little, and none is
dropped.

Prompts and parsers for labelling captions with a language model.

The prompt has the goal and numbered captions; the answer is one word per number: helpful, unhelpful
or unsure; for pairs first, second or neither, asked in both orders. Unsure, missing, contradictory
or otherwise worded answers are no label.

Models from labelled captions to a score for every caption.

    LabelTable      r(c) = label of c, 0 without one
    Classification  cross-entropy on labels;          r(c) = 1[P(helpful | c) > threshold]
    Ranking         P(a over b) = sigma(f(a) - f(b)), cross-entropy, 1/2 where neither is better;
                    z = (f - mean) / deviation over recent captions;   r(c) = z 1[z > threshold]

The three reward models of ONI (Zheng et al., 2024); ranking is Motif's (Klissarov et al., 2023).
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, NonNegative, Number, PositiveFraction
from embodied.core.build import ConfigError, Node
from embodied.core.device import forked
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import AskPool
from embodied.llm.chat import Answer, Chat, Message, object_schema
from embodied.llm.client import open_chat
from embodied.nn.optim import Adam, gradient_step
from embodied.rewards.wrappers.added_observations import (
    CAPTION,
    TIMES,
    CaptionVocabulary,
    with_event_captions,
)

Question = tuple[str, ...]
"""A caption, or two that are compared."""
VERSION = "1"  # of the prompts, for provenance
ROLE = (
    "You judge the play of an agent that learns to act. You are given its goal and messages that "
    "it got while it acted. Judge each message by itself: does what it tells bring the goal nearer?"
)
SINGLE = "Answer for every number: helpful, unhelpful, or unsure where you cannot tell."
PAIRED = (
    "Every number has two messages. Answer for every number which of them tells of more progress "
    "towards the goal: first, second, or neither where they are alike or you cannot tell."
)
CONTRADICTED = "another answer in the other order"
VALUES = {"helpful": 1.0, "unhelpful": 0.0}
SIDES = {"first": 1.0, "second": 0.0, "neither": 0.5}


@dataclass(frozen=True)
class Label:
    """The answer to a question. `value` None: no usable answer, and `why`; the rest is provenance
    and cost."""

    question: Question
    value: float | None
    model: str = ""
    key: str = ""
    cached: bool = False
    tokens: int = 0
    seconds: float = 0.0
    why: str = ""


class CaptionLabeller:
    """Labels captions with the language model `chat`, given the goal in words."""

    def __init__(self, chat: Chat, goal: str) -> None:
        self.chat = chat
        self.goal = goal

    def label(self, questions: Sequence[Question]) -> list[Label]:
        """One label per question: of one caption (1: helpful, 0: not), or of two (1: the first is
        better, 0: the second, 0.5: neither)."""
        if len(questions[0]) == 1:
            answer = self._ask([caption for (caption,) in questions], SINGLE, [*VALUES, "unsure"])
            return [
                labelled(q, VALUES.get(w), answer) for q, w in _words_by_question(questions, answer)
            ]
        return self._compared(questions)

    def _compared(self, questions: Sequence[Question]) -> list[Label]:
        one = self._ask([_pair(a, b) for a, b in questions], PAIRED, [*SIDES])
        other = self._ask([_pair(b, a) for a, b in questions], PAIRED, [*SIDES])
        turned = {"first": "second", "second": "first", "neither": "neither"}
        labels = []
        for (question, word), (_, back) in zip(
            _words_by_question(questions, one), _words_by_question(questions, other), strict=True
        ):
            agreed = word in turned and turned[word] == back
            labels.append(labelled(question, SIDES[word] if agreed else None, one, other))
            if not agreed and word in turned and back in turned:
                labels[-1] = replace(labels[-1], why=CONTRADICTED)
        return labels

    def _ask(self, lines: Sequence[str], how: str, words: Sequence[str]) -> Answer:
        listed = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
        text = f"Goal: {self.goal}\n{how}\n{listed}"
        return self.chat.ask([Message("system", ROLE), Message("user", text)], schema(lines, words))


def schema(lines: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    keys = [str(number) for number in range(1, len(lines) + 1)]
    return object_schema({key: {"type": "string", "enum": list(words)} for key in keys})


def labelled(question: Question, value: float | None, answer: Answer, *more: Answer) -> Label:
    """A label with its provenance; several answers belong to one question in several orders."""
    every = (answer, *more)
    return Label(
        question,
        value,
        model=answer.model,
        key=answer.key,
        cached=all(one.cached for one in every),
        tokens=sum(one.tokens for one in every),
        seconds=sum(one.seconds for one in every),
        why="" if value is not None else "abstained",
    )


def _pair(first: str, second: str) -> str:
    return f"first: {first} | second: {second}"


def _words_by_question(questions: Sequence[Question], answer: Answer) -> list[tuple[Question, str]]:
    data = answer.data if isinstance(answer.data, Mapping) else {}
    return [(q, str(data.get(str(number), ""))) for number, q in enumerate(questions, 1)]


LONGEST = 200  # characters of a caption that are used
LETTERS = 128


class CaptionModel(Remembered):
    """Scores [n] (float32) of n captions when it is called, learned from labels (`learn`)."""

    def learn(self, questions: Sequence[Question], values: Sequence[float]) -> dict[str, Tensor]:
        """Learn from new labels; returns metrics."""
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    def normalize_on(self, captions: Sequence[str]) -> None:
        """Normalise the scores on recent captions."""

    def __call__(self, captions: Sequence[str]) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no scores")


class LabelTable(CaptionModel):
    """A dictionary of labels; it does not generalise."""

    remembered = ("value",)

    def __init__(self) -> None:
        self.value: dict[str, float] = {}

    def learn(self, questions: Sequence[Question], values: Sequence[float]) -> dict[str, Tensor]:
        self.value |= {q[0]: value for q, value in zip(questions, values, strict=True)}
        return {}

    def __call__(self, captions: Sequence[str]) -> Tensor:
        return torch.tensor([self.value.get(caption, 0.0) for caption in captions])


class CharCNN(nn.Module):
    """A character-level convolutional network: texts [N, L] (uint8) to [N], with masked pooling
    over length."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 32, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.Conv1d(32 if not i else width, width, 5, padding=2) for i in range(3)
        )
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, text: Tensor) -> Tensor:
        there = (text > 0)[:, None]
        x = self.embed(text.long()).mT
        for layer in self.layers:
            x = functional.gelu(layer(x)) * there
        mean = x.sum(2) / there.sum(2).clamp(min=1)
        return self.head(torch.cat([mean, x.amax(2)], 1))[:, 0]


def encode_characters(captions: Sequence[str]) -> Tensor:
    """Captions as [N, L] (uint8), zero-padded; non-ASCII characters become "?"."""
    rows = [caption.encode("ascii", "replace")[:LONGEST] for caption in captions]
    text = torch.zeros(len(rows), max(map(len, rows), default=1) or 1, dtype=torch.uint8)
    for row, letters in zip(text, rows, strict=True):
        row[: len(letters)] = torch.tensor(list(letters), dtype=torch.uint8)
    return text


class LearnedCaptionModel(CaptionModel):
    """A character network and its labels: `steps` of Adam on minibatches of all labels whenever
    there are new ones, with its own random generator."""

    remembered = ("net", "adam", "generator", "questions", "values")

    def __init__(self, steps: int, lr: float, batch: int, threshold: float, seed: int) -> None:
        self.steps = steps
        self.batch = batch
        self.threshold = threshold
        self.generator = torch.Generator().manual_seed(seed)
        with forked(seed):
            self.net = CharCNN()
        self.adam = Adam(self.net.parameters(), lr=lr, local=True)
        self.questions: list[Question] = []
        self.values: list[float] = []

    def learn(self, questions: Sequence[Question], values: Sequence[float]) -> dict[str, Tensor]:
        self.questions += questions
        self.values += values
        sides = [encode_characters(side) for side in zip(*self.questions, strict=True)]
        target = torch.tensor(self.values)
        metrics: dict[str, Tensor] = {}
        for _ in range(self.steps):
            pick = torch.randint(len(target), (self.batch,), generator=self.generator)
            logit = self.logit([side[pick] for side in sides])
            loss = functional.binary_cross_entropy_with_logits(logit, target[pick])
            gradient_step(self.adam, loss)
            right = ((logit > 0) == (target[pick] > 0.5)).float().mean()
            metrics = {"model_loss": loss.detach(), "model_accuracy": right}
        return metrics

    def logit(self, sides: list[Tensor]) -> Tensor:
        """Logits [n] of the answers; `sides` are the captions [n, length] of each question."""
        raise NotImplementedError(f"{type(self).__name__} has no logits")

    @torch.no_grad()
    def scores(self, captions: Sequence[str]) -> Tensor:
        """Raw outputs [N] of the network."""
        parts = [captions[i : i + 4096] for i in range(0, len(captions), 4096)]
        return torch.cat([torch.zeros(0), *(self.net(encode_characters(part)) for part in parts)])


class Classification(LearnedCaptionModel):
    """Helpful or not; 0 before the first label."""

    def logit(self, sides: list[Tensor]) -> Tensor:
        return self.net(sides[0])

    def __call__(self, captions: Sequence[str]) -> Tensor:
        if not self.values:
            return torch.zeros(len(captions))
        return (self.scores(captions).sigmoid() > self.threshold).float()


class Ranking(LearnedCaptionModel):
    """Better or worse, normalised on recent captions."""

    remembered = ("mean", "deviation")
    mean = 0.0
    deviation = 1.0

    def logit(self, sides: list[Tensor]) -> Tensor:
        both = [functional.pad(side, (0, LONGEST - side.shape[1])) for side in sides]
        widest = max(side.shape[1] for side in sides)
        first, second = self.net(torch.cat([side[:, :widest] for side in both])).chunk(2)
        return first - second

    def normalize_on(self, captions: Sequence[str]) -> None:
        if len(captions) > 1:
            scores = self.scores(captions)
            self.mean = float(scores.mean())
            self.deviation = float(scores.std()) + 1e-6

    def __call__(self, captions: Sequence[str]) -> Tensor:
        if not self.values:
            return torch.zeros(len(captions))
        z = (self.scores(captions) - self.mean) / self.deviation
        return z * (z > self.threshold)


NEVER = np.iinfo(np.int64).max  # a count that is never reached

MEASURED = 1000  # newest captions that normalise the scores of ranking
KINDS: dict[str, type[Classification | Ranking]] = {
    "classification": Classification,
    "ranking": Ranking,
}


class CaptionCounts(Remembered):
    """Counters by caption number; number 0, the empty caption, is never due."""

    remembered = ("visits", "due", "labelled")

    def __init__(self) -> None:
        self.visits = np.zeros(0, np.int64)
        self.due = np.zeros(0, np.int64)  # count at which it is due (again)
        self.labelled = np.zeros(0, np.bool_)

    def count(self, numbers: NDArray[np.int64]) -> None:
        if (room := int(numbers.max()) + 1) > len(self.visits):
            more = 2 * room - len(self.visits)
            self.visits = np.append(self.visits, np.zeros(more, np.int64))
            self.due = np.append(self.due, np.ones(more, np.int64))
            self.labelled = np.append(self.labelled, np.zeros(more, np.bool_))
        np.add.at(self.visits, numbers, 1)

    def wanted(self, numbers: NDArray[np.int64]) -> list[int]:
        """Return the due captions of `numbers`, each once."""
        due = (self.visits[numbers] >= self.due[numbers]) & (numbers > 0)
        return np.unique(numbers[due]).tolist()

    def others(self, number: int) -> NDArray[np.int64]:
        met = np.flatnonzero(self.visits[1:]) + 1
        return met[met != number]

    def asked(self, number: int) -> None:
        """Mark as in flight: not due until there is an answer."""
        self.due[number] = NEVER

    def again(self, number: int) -> None:
        """Mark as unanswered: due again at twice the count."""
        if not self.labelled[number]:
            self.due[number] = 2 * max(int(self.visits[number]), 1)

    def settled(self, number: int) -> None:
        self.labelled[number], self.due[number] = True, NEVER

    @property
    def coverage(self) -> float:
        """Fraction of all occurrences that are of labelled captions."""
        known = float(self.visits[1:].sum())
        return float(self.visits[self.labelled].sum()) / known if known else 0.0


@dataclass(frozen=True)
class Config:
    """Settings of the captions' reward."""

    labeller: Node  # the language model that labels captions
    goal: str | None = None  # the task in words; null: the environment's text
    model: Literal["hash", "classification", "ranking"] = "hash"  # table, or a character network
    weight: Number = 0.1  # weight of the captions' reward
    env_weight: Number = 1.0  # weight of the environment's reward
    beta: NonNegative = 3.0  # the n-th occurrence in an episode is rewarded with 1 / n^beta
    threshold: Number = 0.5  # of P(helpful); for ranking in standard deviations
    partners: Count = 4  # captions that a new one is compared with, for ranking
    stride: Count = 1  # only captions of every so many steps of an env are labelled
    batch: Count = 20  # captions per request
    room: Count = 1000  # size of the queue; the oldest captions are dropped
    synchronous: bool = False  # label in the training thread: slow, but exactly reproducible
    steps: Count = 32  # gradient steps of the network after new labels
    lr: PositiveFraction = 1e-3  # Adam's learning rate of the network
    learn_batch: Count = 64  # labels per gradient step of the network


class Annotate(Remembered, SummedReward):
    """Labels are appended to `folder/labels.jsonl` with their provenance, and checkpointed."""

    frozen = False
    needs_local_env = True
    remembered = (
        *("captions", "counts", "model", "said", "random", "clock"),
        *("scores", "current", "learned"),
    )

    def __init__(
        self, config: Config, spec: Spec, folder: Path, seed: int, device: torch.device
    ) -> None:
        goal = spec.text if config.goal is None else config.goal
        if not goal:
            raise ConfigError("no goal: describe the task with reward.goal=...")
        self.config = config
        self.goal = goal
        self.folder = folder
        self.device = device
        self.captions = CaptionVocabulary()
        self.labeller = CaptionLabeller(open_chat(config.labeller, folder), goal)
        self.pool = AskPool[Question, Label](
            self.labeller.label,
            batch=config.batch,
            workers=1,
            room=config.room,
            synchronous=config.synchronous,
        )
        learning = (config.steps, config.lr, config.learn_batch, config.threshold, seed)
        self.model: CaptionModel = (
            LabelTable() if config.model == "hash" else KINDS[config.model](*learning)
        )
        self.random = np.random.default_rng(seed)
        self.scores = torch.zeros(1, device=device)  # by caption number
        self.current = torch.ones(1, dtype=torch.bool, device=device)
        self.counts = CaptionCounts()
        self.said: Counter[str] = Counter()
        self.learned: dict[str, Tensor] = {}
        self.intrinsic = torch.zeros((), device=device)
        self.clock = 0

    def augment_env(self, env: VecEnv) -> VecEnv:
        return with_event_captions(env, self.captions)

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        numbers = transitions[f"next_obs/{CAPTION}"].cpu().numpy()
        self.counts.count(numbers)
        if self.config.stride > 1:
            numbers = numbers[(env_ids.cpu().numpy() + self.clock) % self.config.stride == 0]
        self.clock += 1
        questions = [
            one for number in self.counts.wanted(numbers) for one in self._questions_about(number)
        ]
        for question in self.pool.submit(questions) if questions else ():
            self.counts.again(self.captions.of(question[0]))

    def set_step(self, step: int) -> None:
        self._collect_labels()

    def __call__(self, transitions: Tensors) -> Tensor:
        terms = self.components(transitions)
        self.intrinsic = terms["captions"].mean().detach()
        return terms["env"] + terms["captions"]

    def components(self, transitions: Tensors) -> dict[str, Tensor]:
        numbers, times = transitions[f"next_obs/{CAPTION}"], transitions[f"next_obs/{TIMES}"]
        bonus = self.caption_scores(numbers) / times.clamp(min=1).float() ** self.config.beta
        own = self.config.env_weight * transitions["reward"]
        return {"env": own, "captions": self.config.weight * bonus}

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Nothing is learned from transitions; returns metrics of the annotation."""
        self._collect_labels()
        pool, said = self.pool, self.said
        facts = {
            "coverage": self.counts.coverage,
            "captions": len(self.captions) - 1,
            "queue": pool.pending,
            "asked": pool.asked,
            "dropped": pool.dropped,
            "failed": pool.failed,
            "latency": pool.seconds / max(pool.calls, 1),
            "spent": bool(pool.spent),
            "labels": said["labels"],
            "abstained": said["abstained"],
            "contradicted": said["contradicted"] / max(said["labels"] + said["abstained"], 1),
            "helpful": said["helpful"] / max(said["labels"], 1),
        }
        metrics = {name: torch.tensor(float(value)) for name, value in facts.items()}
        return metrics | self.learned | {"intrinsic": self.intrinsic}

    def _questions_about(self, number: int) -> list[Question]:
        text = self.captions.texts[number]
        self.counts.asked(number)
        if self.config.model != "ranking":
            return [(text,)]
        others = self.counts.others(number)
        if not len(others):
            self.counts.again(number)
            return []
        chosen = self.random.choice(others, min(self.config.partners, len(others)), replace=False)
        return [(text, self.captions.texts[int(other)]) for other in chosen]

    def _collect_labels(self) -> None:
        labels = [
            Label(asked.question, None, why=asked.why) if asked.answer is None else asked.answer
            for asked in self.pool.poll()
        ]
        if self.pool.spent and not self.said["spent"]:
            self.said["spent"] = 1
            warnings.warn(f"no more labels: {self.pool.spent}", stacklevel=2)
        if not labels:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "labels.jsonl").open("a") as file:
            for label in labels:
                line = {**asdict(label), "goal": self.goal, "words": VERSION}
                file.write(json.dumps(line) + "\n")
        for label in labels:
            self._count_label(label)
        useful = [(one.question, one.value) for one in labels if one.value is not None]
        if useful:
            questions, values = zip(*useful, strict=True)
            self.learned |= self.model.learn(questions, values)
            self.model.normalize_on(self.captions.texts[1:][-MEASURED:])
            self.current[1:] = False

    def _count_label(self, label: Label) -> None:
        if label.value is None:
            self.said["abstained"] += 1
            self.said["contradicted"] += label.why == CONTRADICTED
            self.counts.again(self.captions.of(label.question[0]))
            return
        self.said["labels"] += 1
        self.said["helpful"] += label.value > 0.5
        for text in label.question:
            self.counts.settled(self.captions.of(text))

    def caption_scores(self, numbers: Tensor) -> Tensor:
        """Current scores [N] of the captions with numbers [N]. Only these are computed: an
        environment that describes its state has an unbounded number of captions."""
        if (more := len(self.captions) - len(self.scores)) > 0:
            self.scores = torch.cat([self.scores, self.scores.new_zeros(more)])
            self.current = torch.cat([self.current, self.current.new_zeros(more)])
        stale = numbers.unique()
        stale = stale[~self.current[stale]]
        if len(stale):
            texts = [self.captions.texts[number] for number in stale.tolist()]
            self.scores[stale] = self.model(texts).to(self.device)
            self.current[stale] = True
        return self.scores[numbers]

    def get_state(self) -> dict[str, Any]:
        """Everything but answers still in flight: their questions are submitted again."""
        self._collect_labels()
        questions = [list(question) for question in self.pool.questions()]
        return {**super().get_state(), "questions": questions}

    def set_state(self, state: dict[str, Any]) -> None:
        self.pool.clear()
        super().set_state(state)
        self.pool.submit([tuple(question) for question in state["questions"]])
