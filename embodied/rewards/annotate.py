"""Annotate: a language model reads what happened to the agent and says what helps; that pays.

    r = own r_env + weight r(c) / n(c)^beta

c is the caption of a step, n(c) how often it came up in this episode so far, r(c) the newest word
on it: what is said often pays next to nothing. Captions that nobody has judged yet are asked about
beside training, the newest first, each once; no answer is no label. ONI (Zheng et al., 2024) and
its ancestor Motif (Klissarov et al., 2023). Rows are rewarded when they are sampled.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError, Node
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.foundation.endpoint import open_chat
from embodied.rewards.annotator import Annotator, Label, Question
from embodied.rewards.caption_models import Classification, Hash, Ranking, Worth
from embodied.rewards.reading import VERSION, Reader
from embodied.rewards.told import TIMES, told
from embodied.rewards.watched import CAPTION, Captions

NEVER = np.iinfo(np.int64).max
KINDS: dict[str, type[Classification | Ranking]] = {
    "classification": Classification,
    "ranking": Ranking,
}


@dataclass(frozen=True)
class Config:
    """`judge` is a language model's node; `goal` what to judge by (None: the world's own text).

    `model` of the labels: "hash" (a dictionary), "classification" or "ranking" (a network of
    letters, which judges captions nobody was asked about); `threshold`: of P(helpful), or in
    deviations. A new caption is compared with `partners` others when ranking. `stride`: of a row,
    only captions of every so many steps are asked about. `batch` captions a call, `room` wait.

    `synchronous` asks in the training thread before rows are rewarded: slow, and repeatable number
    for number, as what a thread has ready when is not.
    """

    judge: Node
    goal: str | None = None
    model: Literal["hash", "classification", "ranking"] = "hash"
    weight: float = 0.1
    own: float = 1.0
    beta: float = 3.0
    threshold: float = 0.5
    partners: int = 4
    stride: int = 1
    batch: int = 20
    room: int = 1000
    synchronous: bool = False
    steps: int = 32
    lr: float = 1e-3
    learn_batch: int = 64


class Annotate:
    """Labels are in `folder/labels.jsonl` with who gave them; a checkpoint holds them too."""

    frozen = False

    def __init__(
        self, config: Config, spec: Spec, folder: Path, seed: int, device: torch.device
    ) -> None:
        goal = spec.text if config.goal is None else config.goal
        if not goal:
            raise ConfigError("nothing to judge by: say what the task is with reward.goal=...")
        for name in ("partners", "stride", "batch", "room"):
            if getattr(config, name) < 1:
                raise ConfigError(f"reward.{name}={getattr(config, name)} must be at least 1")
        self.config, self.goal, self.folder, self.device = config, goal, folder, device
        self.captions = Captions()
        self.reader = Reader(open_chat(config.judge), goal)
        self.annotator = Annotator(
            self.reader.judge, config.batch, config.room, beside=not config.synchronous
        )
        self.model = _model(config, seed)
        self.random = np.random.default_rng(seed)
        self.scores = torch.zeros(1, device=device)
        self.visits = np.zeros(0, np.int64)
        self.due = np.zeros(0, np.int64)  # visits at which a caption is asked about (again)
        self.labelled = np.zeros(0, np.bool_)
        self.said: dict[str, float] = {"labels": 0, "abstained": 0, "helpful": 0}
        self.learned: dict[str, Tensor] = {}
        self.intrinsic = torch.zeros((), device=device)
        self.clock = 0

    def watch(self, env: VecEnv) -> VecEnv:
        """The world with a caption of every step."""
        return told(env, self.captions)

    def note(self, rows: Tensors, who: Tensor, step: Step) -> None:
        """Count captions, and ask about those that are due."""
        numbers = rows[f"next_obs/{CAPTION}"].cpu().numpy()
        self._room(int(numbers.max()) + 1)
        np.add.at(self.visits, numbers, 1)
        if self.config.stride > 1:
            numbers = numbers[(who.cpu().numpy() + self.clock) % self.config.stride == 0]
        self.clock += 1
        due = np.unique(numbers[(self.visits[numbers] >= self.due[numbers]) & (numbers > 0)])
        if len(due):
            self._submit([question for number in due for question in self._questions(int(number))])

    def at(self, step: int) -> None:
        """Take what was answered since, before rows are rewarded."""
        self._take()

    def __call__(self, rows: Tensors) -> Tensor:
        terms = self.terms(rows)
        self.intrinsic = terms["captions"].mean().detach()
        return terms["world"] + terms["captions"]

    def terms(self, rows: Tensors) -> dict[str, Tensor]:
        """What the world pays and what captions pay, [N] each."""
        numbers, times = rows[f"next_obs/{CAPTION}"], rows[f"next_obs/{TIMES}"]
        self._scored()
        bonus = self.scores[numbers] / times.clamp(min=1).float() ** self.config.beta
        own = self.config.own * rows["reward"]
        return {"world": own, "captions": self.config.weight * bonus}

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Nothing is learned from rows; how the annotation stands."""
        self._take()
        annotator, said = self.annotator, self.said
        known = float(self.visits[1:].sum())
        facts = {
            "coverage": float(self.visits[self.labelled].sum()) / known if known else 0.0,
            "captions": len(self.captions) - 1,
            "queue": len(annotator.questions()),
            "asked": annotator.asked,
            "dropped": annotator.dropped,
            "failed": annotator.failed,
            "latency": annotator.seconds / max(annotator.calls, 1),
            "spent": bool(annotator.spent),
            "labels": said["labels"],
            "abstained": said["abstained"],
            "helpful": said["helpful"] / max(said["labels"], 1),
        }
        metrics = {name: torch.tensor(float(value)) for name, value in facts.items()}
        return metrics | self.learned | {"intrinsic": self.intrinsic}

    def _questions(self, number: int) -> list[Question]:
        """What to ask about a caption; it is not due again before there is an answer."""
        text = self.captions.texts[number]
        self.due[number] = NEVER
        if self.config.model != "ranking":
            return [(text,)]
        others = np.flatnonzero(self.visits[1:]) + 1
        others = others[others != number]
        if not len(others):
            self.due[number] = 2 * self.visits[number]
            return []
        count = min(self.config.partners, len(others))
        chosen = self.random.choice(others, count, replace=False)
        return [(text, self.captions.texts[int(other)]) for other in chosen]

    def _submit(self, questions: list[Question]) -> None:
        for question in self.annotator.submit(questions):
            self._again(question)

    def _again(self, question: Question) -> None:
        """Nothing was said of a caption: it is due again when it came up twice as often."""
        number = self.captions.of(question[0])
        if not self.labelled[number]:
            self.due[number] = 2 * max(int(self.visits[number]), 1)

    def _take(self) -> None:
        while self.config.synchronous and self.annotator.work():
            pass
        labels = self.annotator.poll()
        if self.annotator.spent and not self.said.get("spent"):
            self.said["spent"] = 1
            warnings.warn(f"no more labels: {self.annotator.spent}", stacklevel=2)
        if not labels:
            return
        self._write(labels)
        for label in labels:
            self._settle(label)
        useful = [(one.question, one.value) for one in labels if one.value is not None]
        if useful:
            questions, values = zip(*useful, strict=True)
            self.learned |= self.model.learn(questions, values)
            self.model.settle(self.captions.texts[1:])
            self.scores = self.scores[:1]

    def _settle(self, label: Label) -> None:
        if label.value is None:
            self.said["abstained"] += 1
            self._again(label.question)
            return
        self.said["labels"] += 1
        self.said["helpful"] += label.value
        for text in label.question:
            number = self.captions.of(text)
            self.labelled[number], self.due[number] = True, NEVER

    def _scored(self) -> None:
        """A worth for every caption there is; the empty one has none."""
        if (known := len(self.scores)) < len(self.captions):
            more = self.model(self.captions.texts[known:]).to(self.device)
            self.scores = torch.cat([self.scores, more])

    def _room(self, count: int) -> None:
        """Counters for `count` captions."""
        if count > len(self.visits):
            more = 2 * count - len(self.visits)
            self.visits = np.append(self.visits, np.zeros(more, np.int64))
            self.due = np.append(self.due, np.ones(more, np.int64))
            self.labelled = np.append(self.labelled, np.zeros(more, np.bool_))

    def _write(self, labels: list[Label]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "labels.jsonl").open("a") as file:
            for label in labels:
                file.write(
                    json.dumps({**asdict(label), "goal": self.goal, "words": VERSION}) + "\n"
                )

    def get_state(self) -> dict[str, Any]:
        """All but the answers that are still out: their questions are asked again."""
        self._take()
        return {
            "captions": self.captions.get_state(),
            "visits": torch.from_numpy(self.visits.copy()),
            "due": torch.from_numpy(self.due.copy()),
            "labelled": torch.from_numpy(self.labelled.copy()),
            "model": self.model.get_state(),
            "waiting": [list(question) for question in self.annotator.questions()],
            "said": dict(self.said),
            "random": json.dumps(self.random.bit_generator.state),
            "clock": self.clock,
            "scores": self.scores.clone(),
            "learned": dict(self.learned),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.annotator.stop()
        self.captions.set_state(state["captions"])
        self.visits, self.due = state["visits"].numpy().copy(), state["due"].numpy().copy()
        self.labelled = state["labelled"].numpy().copy()
        self.model.set_state(state["model"])
        self.said, self.clock = dict(state["said"]), state["clock"]
        self.random.bit_generator.state = json.loads(state["random"])
        self.scores, self.learned = state["scores"].to(self.device), dict(state["learned"])
        self.annotator.submit([tuple(question) for question in state["waiting"]])


def _model(config: Config, seed: int) -> Worth:
    if config.model == "hash":
        return Hash()
    kind = KINDS[config.model]
    return kind(config.steps, config.lr, config.learn_batch, config.threshold, seed)
