"""ADR, automatic domain randomization: bounds that grow with success at each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied.core.bounds import Count, Fraction, Number, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, named_task


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

    in_order = True
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
