"""Teachers that widen or narrow the range of a task by its last scores: boxes, ADR, assistance."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from embodied.core.bounds import Count, CountOrZero, Fraction, Number, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, Teacher, named_task


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


@dataclass(frozen=True, kw_only=True)
class AdrConfig(teacher.Config):
    """Settings of ADR. Task parameters that `easy` does not name start in the middle of their
    box."""

    easy: Mapping[str, Fraction] = field(default_factory=dict)  # initial task, values by name
    boundary: Fraction = 0.5  # probability of an episode at a bound
    delta: PositiveFraction = 0.05  # step of a bound, as a fraction of the parameter's box
    queue: Count = 10  # episodes at a bound between its moves
    low: Number = 0.1  # a mean score up to this moves a bound inward
    high: Number = 0.75  # a mean score from this on moves a bound outward


class Adr(teacher.Teacher):
    """ADR (automatic domain randomization): bounds of the task range grow with success at each.

    OpenAI et al., "Solving Rubik's cube with a robot hand", 2019. With probability `boundary` an
    episode is played with one random task parameter set to one of its two bounds. After `queue`
    such episodes, a mean score >= high moves the bound outward by delta; a mean <= low moves it
    inward. The memo of an episode: its bound (side, parameter) and how often the bound had moved.
    """

    remembered = ("bounds", "moved", "queues")

    def __init__(self, config: AdrConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        if config.low >= config.high:
            raise ConfigError(
                f"teacher: needs low < high; got low={config.low:g} high={config.high:g}"
            )
        easy = named_task(self.space, config.easy, 0.5, "easy")
        self.bounds = np.stack([easy, easy])  # [2, d]: lowest and highest
        self.moved = [[0] * len(easy) for _ in range(2)]
        self.queues: list[list[list[float]]] = [[[] for _ in easy] for _ in range(2)]

    def one(self) -> tuple[Floats, Any]:
        point = self.bounds[0] + np.diff(self.bounds, axis=0)[0] * self.random.random(
            len(self.space)
        )
        if self.random.random() >= self.config.boundary:
            return point, None
        side, element = divmod(int(self.random.integers(2 * len(self.space))), len(self.space))
        point[element] = self.bounds[side, element]
        return point, [side, element, self.moved[side][element]]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for score, memo in zip(scores.tolist(), memos, strict=True):
            if memo is None:
                continue
            side, element, moved = memo
            if moved == self.moved[side][element]:  # ignore episodes of a former bound
                self.queues[side][element].append(score)
                self.judge(side, element)

    def judge(self, side: int, element: int) -> None:
        """Move the bound if its queue is full and the mean score passes a threshold."""
        queue = self.queues[side][element]
        if len(queue) < self.config.queue:
            return
        mean = sum(queue) / len(queue)
        outward = 1 if side else -1
        if mean >= self.config.high:
            self.move(side, element, self.bounds[side, element] + outward * self.config.delta)
        elif mean <= self.config.low:
            self.move(side, element, self.bounds[side, element] - outward * self.config.delta)
        self.queues[side][element] = []

    def move(self, side: int, element: int, to: float) -> None:
        """Move a bound to `to`, clipped to the box and to the opposite bound."""
        limits = (self.bounds[0, element], 1.0) if side else (0.0, self.bounds[1, element])
        self.bounds = self.bounds.copy()
        self.bounds[side, element] = min(max(to, limits[0]), limits[1])
        self.moved[side][element] += 1

    def metrics(self) -> dict[str, float]:
        width = np.diff(self.bounds, axis=0)[0]
        return {"volume": float(width.prod()), "width": float(width.mean())}


@dataclass(frozen=True, kw_only=True)
class PrivilegeConfig(teacher.Config):
    """Settings of the privileged-action curriculum."""

    name: str = "help"  # the task parameter that is the assistance
    first: Fraction = 1.0  # initial level p
    step: PositiveFraction = 0.03  # change of p after success or failure
    enough: Fraction = 0.7  # mean score above which p decreases
    little: Fraction = 0.3  # mean score below which p increases
    batch: Count = 100  # episodes of that mean
    below: Fraction = 0.25  # an episode gets up to this much less than p, at least 0


class Privilege(Teacher):
    """Privileged-action curriculum: assistance that falls with success and rises with failure.

    One element of the task vector is the amount of assistance. Its level is p; an episode gets
    p - below u^2 with u uniform in [0, 1], so that the student also trains with less assistance. If
    the mean score of the last `batch` episodes at this p is above `enough`, p decreases by `step`;
    below `little` it increases. The other task parameters are sampled uniformly. Evaluation runs
    without assistance, which is the environments' default. `level` is p, in whole steps below
    `first`.
    """

    needs = "help"
    remembered = ("level", "recent")

    def __init__(self, config: PrivilegeConfig, spec: Spec, seed: int = 0) -> None:
        names = () if spec.task is None else spec.task.names
        if config.name not in names:
            raise ConfigError(
                f'this teacher needs an environment with assistance in its task ("{config.name}"): '
                "env=fr3_lift_magnet"
            )
        super().__init__(config, spec, seed)
        if config.name not in self.space.names:
            raise ConfigError(f"teacher.box fixes {config.name}: the assistance cannot be annealed")
        if config.little >= config.enough:
            raise ConfigError("teacher: needs little < enough")
        self.place = self.space.names.index(config.name)
        self.level = float(config.first)
        self.recent: deque[float] = deque(maxlen=config.batch)

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        points = self.random.random((n, len(self.space)))
        less = self.config.below * self.random.random(n) ** 2
        points[:, self.place] = np.maximum(self.level - less, 0)
        return [(point, self.level) for point in points]

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        """Ignores episodes that were sampled at another p."""
        for score, level in zip(scores, memos, strict=True):
            if level != self.level:
                continue
            self.recent.append(float(score))
            if len(self.recent) < self.config.batch:
                continue
            mean = float(np.mean(self.recent))
            if mean > self.config.enough:
                self._move(-1)
            elif mean < self.config.little:
                self._move(1)

    def _move(self, way: int) -> None:
        level = round(self.level + way * self.config.step, 6)
        level = min(max(level, 0.0), self.config.first)
        if level != self.level:
            self.level = level
            self.recent.clear()

    def metrics(self) -> dict[str, float]:
        return {"help": self.level}
