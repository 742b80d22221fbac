"""EasyToHard: a box of tasks that grows from an easy one to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from embodied.core.bounds import Count, CountOrZero, Fraction, Number, Positive, PositiveFraction
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, named_task


@dataclass(frozen=True, kw_only=True)
class EasyToHardConfig(teacher.Config):
    """Settings of the growing box. With `pace` "schedule" its share grows linearly to 1 in
    `episodes` episodes; with "success" it grows with the mean of the last `window` scores in the
    current box."""

    easy: Mapping[str, Fraction] = field(default_factory=dict)  # easy task; others: minimum
    width: PositiveFraction = 0.1  # initial share s
    pace: Literal["schedule", "success"] = "success"  # what the share grows with
    episodes: CountOrZero = 5_000  # episodes until the share is 1
    window: Count = 50  # scores of the mean
    step: Positive = 0.05  # growth of the share
    grow: Number = 0.7  # mean score from which the box grows


class EasyToHard(teacher.Teacher):
    """Samples tasks uniformly from a box that grows from an easy task to all tasks.

    Curriculum learning (Bengio, Louradour, Collobert and Weston, 2009). With share s from 0 to 1
    and the easy task e, the box is [e - s e, e + s (1 - e)]. The memo of an episode is the number
    of resizes before it; `share` is s.
    """

    in_order = True
    remembered = ("share", "size", "ended", "scored")

    def __init__(self, config: EasyToHardConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        self.easy = named_task(self.space, config.easy, 0.0, "easy")
        self.share = config.width
        self.size = 0
        self.ended = 0
        self.scored: list[float] = []

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        low, high = self.bounds()
        points = low + (high - low) * self.random.random((n, len(self.space)))
        return [(point, self.size) for point in points]

    def bounds(self) -> tuple[Floats, Floats]:
        return self.easy * (1 - self.share), self.easy + self.share * (1 - self.easy)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        self.ended += len(scores)
        if self.config.pace == "schedule":
            done = min(self.ended / max(self.config.episodes, 1), 1.0)
            self.share = self.config.width + (1 - self.config.width) * done
            return
        for score, size in zip(scores.tolist(), memos, strict=True):
            if size == self.size:  # ignore episodes of a former box
                self.scored.append(score)
                self.judge()

    def judge(self) -> None:
        """Let the box grow if the mean score of its last `window` episodes is high."""
        if len(self.scored) < self.config.window:
            return
        mean = sum(self.scored[-self.config.window :]) / self.config.window
        if mean >= self.config.grow and self.share < 1:
            self.share = min(self.share + self.config.step, 1.0)
            self.size += 1
            self.scored = []
        else:
            self.scored = self.scored[1 - self.config.window :]

    def metrics(self) -> dict[str, float]:
        return {"share": self.share}
