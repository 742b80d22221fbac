"""Annotate: captions of events are labelled helpful or not by a language model and rewarded.

    r = env_weight r_env + weight r(c) / n(c)^beta

c is the caption of a step, n(c) its occurrences in this episode so far, r(c) its current label:
frequent captions get next to no reward. New captions are labelled asynchronously during training,
newest first, each once; an abstention is no label. ONI (Zheng et al., 2024), after Motif (Klissarov
et al., 2023). Transitions are rewarded when they are sampled.

A caption is due at its first occurrence, and again at twice the count if no label resulted. So
common captions are retried soon, those that no labeller can decide cost little, and none is
dropped.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Count, NonNegative, Number, Positive
from embodied.core.build import ConfigError, Node
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import AskPool
from embodied.llm.client import open_chat
from embodied.rewards.language.caption_models import (
    CaptionModel,
    Classification,
    LabelTable,
    Ranking,
)
from embodied.rewards.language.prompts import (
    CONTRADICTED,
    VERSION,
    CaptionLabeller,
    Label,
    Question,
)
from embodied.rewards.wrappers.event_captions import TIMES, with_event_captions
from embodied.rewards.wrappers.render_caption import CAPTION, CaptionVocabulary

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
        """Count occurrences of captions [n]."""
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
        """All other captions that have occurred."""
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
        """Mark as labelled."""
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
    lr: Positive = 1e-3  # Adam's learning rate of the network
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
        """The environment with a caption of every step."""
        return with_event_captions(env, self.captions)

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        """Count captions, and submit those that are due for labelling."""
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
        """Take in new labels, before transitions are rewarded."""
        self._collect_labels()

    def __call__(self, transitions: Tensors) -> Tensor:
        terms = self.components(transitions)
        self.intrinsic = terms["captions"].mean().detach()
        return terms["env"] + terms["captions"]

    def components(self, transitions: Tensors) -> dict[str, Tensor]:
        """The environment's reward and the reward of captions, [N] each."""
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
        """The questions about a caption."""
        text = self.captions.texts[number]
        self.counts.asked(number)
        if self.config.model != "ranking":
            return [(text,)]
        others = self.counts.others(number)
        if not len(others):
            self.counts.again(number)
            return []
        count = min(self.config.partners, len(others))
        chosen = self.random.choice(others, count, replace=False)
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
