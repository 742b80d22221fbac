"""Models from labelled captions to a score for every caption.

    LabelTable      r(c) = label of c, 0 without one
    Classification  cross-entropy on labels;          r(c) = 1[P(helpful | c) > threshold]
    Ranking         P(a over b) = sigma(f(a) - f(b)), cross-entropy, 1/2 where neither is better;
                    z = (f - mean) / deviation over recent captions;   r(c) = z 1[z > threshold]

The three reward models of ONI (Zheng et al., 2024); ranking is Motif's (Klissarov et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.device import forked
from embodied.core.remembered import Remembered
from embodied.nn.fit import gradient_step
from embodied.rewards.language.prompts import Question

LONGEST = 200  # characters of a caption that are used
LETTERS = 128


class CaptionModel(Protocol):
    """Scores of captions, learned from labels."""

    def learn(self, questions: Sequence[Question], values: Sequence[float]) -> dict[str, Tensor]:
        """Learn from new labels; returns metrics."""
        ...

    def normalize_on(self, captions: Sequence[str]) -> None:
        """Normalise the scores on recent captions."""
        ...

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Scores [len(captions)] (float32)."""
        ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


class LabelTable(Remembered):
    """A dictionary of labels; it does not generalise."""

    remembered = ("value",)

    def __init__(self) -> None:
        self.value: dict[str, float] = {}

    def learn(self, questions: Sequence[Question], values: Sequence[float]) -> dict[str, Tensor]:
        self.value |= {q[0]: value for q, value in zip(questions, values, strict=True)}
        return {}

    def normalize_on(self, captions: Sequence[str]) -> None:
        pass

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
        """Logits or scores [N]."""
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


class LearnedCaptionModel(Remembered):
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
        self.adam = torch.optim.Adam(self.net.parameters(), lr=lr)
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
        return (
            torch.cat([self.net(encode_characters(part)) for part in parts])
            if parts
            else torch.zeros(0)
        )

    def normalize_on(self, captions: Sequence[str]) -> None:
        pass


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
