"""RIAC: regions of the task space, split by learning progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.bounds import Count, Fraction, NonNegative
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.tasks.gmm import pick
from embodied.teachers.teacher import Floats


@dataclass(frozen=True, kw_only=True)
class RiacConfig(teacher.Config):
    """Settings of RIAC. A cut leaves at least `fewest` episodes and the width `narrowest` on both
    sides; without such a cut, the oldest share `discard` of the region's episodes is dropped."""

    most: Count = 200  # episodes of a region above which it is split
    fewest: Count = 10  # least number of episodes of a part
    attempts: Count = 50  # random cuts, of which the best is used
    narrowest: Fraction = 1 / 15  # least width of a part
    discard: Fraction = 0.25  # share of episodes dropped if a region cannot be split
    window: Count = 200  # last scores from which progress is computed
    random: Fraction = 0.2  # share of tasks that are uniform over the whole space
    mutated: Fraction = 0.1  # share of tasks near the region's task with the lowest score
    mutation: NonNegative = 0.1  # standard deviation of the noise on these


Region = dict[str, Any]
"""`low`, `high` [d], `rows` (a list of [*point, score], oldest first), `alp`, and `cut`:
[parameter, threshold, index of the lower child, index of the upper child], None for a leaf."""


class Riac(teacher.Teacher):
    """RIAC: a tree of regions; an episode counts in every region that contains its task.

    Baranes and Oudeyer, "R-IAC: robust intrinsically motivated exploration and active learning",
    2009. The absolute learning progress (ALP) of a region is |mean of the older half - mean of the
    newer half| of its last scores. A full region is split where |R1| |R2| |ALP(R1) - ALP(R2)| is
    highest.
    """

    remembered = ("regions",)

    def __init__(self, config: RiacConfig, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        if config.random + config.mutated > 1 or 2 * config.fewest > config.most:
            raise ConfigError(
                "teacher: needs random + mutated <= 1 and most >= 2 fewest; got "
                f"random={config.random:g} mutated={config.mutated:g} "
                f"most={config.most} fewest={config.fewest}"
            )
        d = len(self.space)
        self.regions: list[Region] = [self.region([0.0] * d, [1.0] * d, [])]

    def one(self) -> tuple[Floats, Any]:
        return self.point(), None

    def point(self) -> Floats:
        kind, settings = self.random.random(), self.config
        if kind < settings.random:
            return self.random.random(len(self.space))
        region = self.regions[pick([region["alp"] for region in self.regions], self.random)]
        low, high = np.array(region["low"]), np.array(region["high"])
        if kind < settings.random + settings.mutated and region["rows"]:
            worst = min(region["rows"], key=lambda row: row[-1])
            shift = settings.mutation * self.random.standard_normal(len(low))
            return np.clip(np.array(worst[:-1]) + shift, low, high)
        return low + (high - low) * self.random.random(len(low))

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for point, score in zip(points.tolist(), scores.tolist(), strict=True):
            self.add([*point, score])

    def add(self, row: list[float]) -> None:
        """Add an episode to every region that contains its task; split the leaf if it is full."""
        number: int = 0
        while True:
            region = self.regions[number]
            region["rows"].append(row)
            if region["cut"] is None:
                break
            del region["rows"][: -self.config.most - 1]
            region["alp"] = self.progress(region["rows"])
            element, threshold, below, above = region["cut"]
            number = below if row[element] < threshold else above
        if len(region["rows"]) > self.config.most:
            self.split(region)
        region["alp"] = self.progress(region["rows"])

    def progress(self, rows: list[list[float]]) -> float:
        """|mean of the older half - mean of the newer half| of the last scores (0 up to two)."""
        scores = [row[-1] for row in rows[-self.config.window :]]
        half = len(scores) // 2
        if len(scores) <= 2:
            return 0.0
        return abs(sum(scores[:half]) / half - sum(scores[half:]) / (len(scores) - half))

    def split(self, region: Region) -> None:
        cut = self.best_cut(region)
        if cut is None:
            del region["rows"][: max(int(self.config.discard * len(region["rows"])), 1)]
            return
        element, threshold = cut
        below, above = self.parts(region["rows"], element, threshold)
        low, high = region["low"], region["high"]
        first = len(self.regions)
        inner_high = [threshold if i == element else x for i, x in enumerate(high)]
        inner_low = [threshold if i == element else x for i, x in enumerate(low)]
        self.regions.append(self.region(low, inner_high, below))
        self.regions.append(self.region(inner_low, high, above))
        region["cut"] = [element, threshold, first, first + 1]

    def region(self, low: list[float], high: list[float], rows: list[list[float]]) -> Region:
        alp = self.progress(rows)
        return {"low": list(low), "high": list(high), "rows": rows, "alp": alp, "cut": None}

    def best_cut(self, region: Region) -> tuple[int, float] | None:
        """The (parameter, threshold) with the best score; None if no attempt was valid."""
        best, chosen = -1.0, None
        for _ in range(self.config.attempts):
            element = int(self.random.integers(len(self.space)))
            low, high = region["low"][element], region["high"][element]
            threshold = low + (high - low) * self.random.random()
            parts = self.parts(region["rows"], element, threshold)
            sides = (threshold - low, high - threshold)
            if min(map(len, parts)) < self.config.fewest or min(sides) < self.config.narrowest:
                continue
            score = self.score(*parts)
            if score > best:
                best, chosen = score, (element, threshold)
        return chosen

    def score(self, below: list[list[float]], above: list[list[float]]) -> float:
        return len(below) * len(above) * abs(self.progress(below) - self.progress(above))

    @staticmethod
    def parts(
        rows: list[list[float]], element: int, threshold: float
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Episodes below and above the threshold."""
        below = [row for row in rows if row[element] < threshold]
        return below, [row for row in rows if row[element] >= threshold]

    def metrics(self) -> dict[str, float]:
        return {"regions": float(len(self.regions)), "alp": self.regions[0]["alp"]}
