"""Prioritized level replay (PLR): levels with a high learning potential are replayed.

Jiang, Grefenstette and Rocktaschel, "Prioritized level replay", 2021; `robust`: Jiang et al.,
"Replay-guided adversarial environment design", 2021; `edits` (ACCEL): Parker-Holder, Jiang et al.,
"Evolving curricula with regret-based environment design", 2022. Once the level buffer is full
enough, an episode's level is sampled from it with probability `replay`, else it is a new one.
Robust PLR trains the student on replayed levels only. Scores that estimate the regret:

    gain  1/T sum_t max(A_t, 0)        error  1/T sum_t |A_t|
    maxmc 1/T sum_t (R_max - V(s_t)),  R_max the highest return on this level so far
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.levels import level_teacher
from embodied.teachers.levels.level_buffer import LevelBuffer
from embodied.teachers.levels.level_teacher import LevelSpace
from embodied.teachers.task_space import Floats
from embodied.teachers.teacher import Outcome

NEW, AGAIN, EDIT = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Config(teacher.Config):
    """Settings of prioritized level replay."""

    robust: bool = False  # the student learns from replayed levels only
    score: Literal["maxmc", "gain", "error"] = "maxmc"  # estimate of the regret
    replay: Fraction = 0.5  # share of episodes on levels of the buffer
    size: Count = 4_000  # size of the level buffer
    fill: Fraction = 0.5  # share of the buffer that is filled before it is sampled from
    beta: Positive = 0.1  # temperature of the rank prioritisation
    staleness: Fraction = 0.3  # weight of staleness in the sampling probabilities
    first: Literal["random", "plain"] = "random"  # kind of new levels; plain: the simplest
    edits: CountOrZero = 0  # ACCEL: edits of a copy of a replayed level, played next; 0: none


class Plr(level_teacher.LevelTeacher):
    """The memo of an episode is its kind (new, replayed, edited) and the number of its level in the
    buffer (-1: not from the buffer)."""

    uses_estimates = True
    remembered = ("library", "queue", "kinds", "taken")

    def __init__(
        self, config: Config, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        self.settings = config
        if config.robust and not config.replay:
            raise ConfigError(
                "teacher.robust=true trains on replayed levels only: set teacher.replay above 0"
            )
        self.library = LevelBuffer(config.size, len(self.space), config.beta, config.staleness)
        self.queue: deque[Floats] = deque()  # edited levels, not played yet
        self.kinds: deque[int] = deque(maxlen=1000)
        self.taken = 0  # number of levels added to the buffer

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        played = {number for _, (kind, number) in self.pending.values() if kind == AGAIN}
        return [self.one(played) for _ in range(n)]

    def one(self, played: set[int]) -> tuple[Floats, tuple[int, int]]:
        """The next episode; the numbers `played` of replayed levels are not replayed, and the next
        one's is added."""
        settings = self.settings
        level = None
        kind = NEW
        number = -1
        if self.queue:
            level, kind = self.queue.popleft(), EDIT
        elif self.ready and self.random.random() < settings.replay:
            number, kind = self.library.sample(self.random, played), AGAIN
            level = self.library.get(number)
            played.add(number)
        if level is None:
            draw = self.levels.random if settings.first == "random" else self.levels.plain
            level = draw(1, self.random)[0]
        self.kinds.append(kind)
        return level, (kind, number)

    @property
    def ready(self) -> bool:
        """Whether the buffer is full enough to sample from."""
        return len(self.library) >= max(1, self.settings.fill * self.settings.size)

    def trains(self, ticket: Tensor) -> Tensor:
        if not self.settings.robust:
            return super().trains(ticket)
        memos = (self.pending[number][1] for number in ticket.tolist())
        return torch.tensor([kind == AGAIN for kind, _ in memos], dtype=torch.bool)

    def scores(self, outcome: Outcome) -> Floats:
        """[n, 3]: estimate, return and mean value; NaN if the student's estimates are missing."""
        if outcome.gain is None or outcome.error is None or outcome.value is None:
            raise ConfigError("this teacher needs the student's value estimates: learner=ppo")
        estimate = outcome.error if self.settings.score == "error" else outcome.gain
        columns = (estimate, outcome.ret, outcome.value)
        return np.stack([column.double().cpu().numpy() for column in columns], 1)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for level, (estimate, ret, value), (kind, number) in zip(
            points, scores.tolist(), memos, strict=True
        ):
            self.rate(level, estimate, ret, value, number if kind == AGAIN else None)
        again = np.array([kind == AGAIN for kind, _ in memos])
        if self.settings.edits and again.any():  # batched: much faster
            self.queue.extend(self.levels.mutate(points[again], self.settings.edits, self.random))

    def rate(
        self, level: Floats, estimate: float, ret: float, value: float, number: int | None
    ) -> None:
        """Score `level` [D] after an episode; `number` in the buffer (None: new)."""
        if number is None:
            number = self.library.find(level)
        best = max(ret, self.library.best_of(number))
        score = best - value if self.settings.score == "maxmc" else estimate
        if number is not None:
            self.library.update_score(number, score, best)
        else:
            self.taken += self.library.add(level, score, best)

    def metrics(self) -> dict[str, float]:
        kinds, count = np.array(self.kinds), len(self.library)
        mean = float(self.library.score[:count].mean()) if count else 0.0
        return {
            **super().metrics(),
            "library": float(count),
            "score": mean,
            "again": float((kinds == AGAIN).mean()) if len(kinds) else 0.0,
            "taken": float(self.taken),
        }
