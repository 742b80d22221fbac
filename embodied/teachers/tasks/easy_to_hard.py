"""EasyToHard: a box that grows from an easy task to all of them.

Source: curriculum learning in its plain form (Bengio, Louradour, Collobert and Weston, 2009). At
share s of the way the box is [e - s e, e + s (1 - e)] around the easy point e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.task_space import Floats, named_task


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """`easy`: values of task parameters by name; those not named start at their lowest.

    The share starts at `width`. By `pace` "schedule" it is 1 after `episodes`; by "success" it
    grows by `step` when the last `window` scores in the present box have a mean of `grow` or more,
    and falls by it when that is below `shrink`.
    """

    easy: Mapping[str, float] = field(default_factory=dict)
    width: float = 0.1
    pace: Literal["schedule", "success"] = "success"
    episodes: int = 5_000
    window: int = 50
    step: float = 0.05
    grow: float = 0.7
    shrink: float = 0.0


class EasyToHard(teacher.Teacher):
    """Every task of the box as often as every other; never one outside of it."""

    remembered = ("share", "size", "ended", "scored")

    def __init__(self, config: Config, spec: Spec, seed: int = 0) -> None:
        super().__init__(config, spec, seed)
        if not 0 < config.width <= 1 or config.step <= 0 or config.shrink >= config.grow:
            raise ConfigError(
                "teacher: needs 0 < width <= 1, step > 0 and shrink < grow; got "
                f"width={config.width:g} step={config.step:g} "
                f"shrink={config.shrink:g} grow={config.grow:g}"
            )
        self.settings = config
        self.easy = named_task(self.space, config.easy, 0.0, "easy")
        self.share, self.size, self.ended = config.width, 0, 0
        self.scored: list[float] = []

    def propose(self, n: int) -> list[tuple[Floats, Any]]:
        low, high = self.bounds()
        points = low + (high - low) * self.random.random((n, len(self.space)))
        return [(point, self.size) for point in points]

    def bounds(self) -> tuple[Floats, Floats]:
        """Lowest and highest corner [d] of the box."""
        return self.easy * (1 - self.share), self.easy + self.share * (1 - self.easy)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        self.ended += len(scores)
        if self.settings.pace == "schedule":
            done = min(self.ended / max(self.settings.episodes, 1), 1.0)
            self.share = self.settings.width + (1 - self.settings.width) * done
            return
        for score, size in zip(scores.tolist(), memos, strict=True):
            if size == self.size:  # episodes of another box say nothing about this one
                self.scored.append(score)
                self.judge()

    def judge(self) -> None:
        """Change the box once `window` of its episodes have ended."""
        if len(self.scored) < self.settings.window:
            return
        mean = sum(self.scored[-self.settings.window :]) / self.settings.window
        if mean >= self.settings.grow and self.share < 1:
            self.resize(self.share + self.settings.step)
        elif mean < self.settings.shrink and self.share > self.settings.width:
            self.resize(self.share - self.settings.step)
        else:
            self.scored = self.scored[1 - self.settings.window :]

    def resize(self, share: float) -> None:
        self.share = min(max(share, self.settings.width), 1.0)
        self.size += 1
        self.scored = []

    def metrics(self) -> dict[str, float]:
        return {"share": self.share}
