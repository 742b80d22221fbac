"""PLR, prioritized level replay, its robust variant, and ACCEL."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, LevelSpace, LevelTeacher, Outcome

NEW, AGAIN, EDIT = 0, 1, 2


class LevelBuffer:
    """At most `size` levels [D]. Each has a number, which it keeps while it is in the buffer."""

    def __init__(self, size: int, width: int, beta: float, staleness: float) -> None:
        self.size = size
        self.beta = beta
        self.staleness = staleness
        self.level = np.zeros((size, width))
        self.score = np.zeros(size)
        self.best = np.zeros(size)
        self.drawn = np.zeros(size, np.int64)
        self.number = np.zeros(size, np.int64)
        self.count = 0
        self.given = 0
        self.clock = 0
        self.place: dict[int, int] = {}  # of a number
        self.named: dict[bytes, int] = {}  # the number of a level

    def __len__(self) -> int:
        return self.count

    def chances(self, played: Collection[int] = ()) -> Floats:
        """Sampling probabilities [n] of the levels in the buffer; 0 for the numbers `played`,
        unless these are all."""
        n = self.count
        free = np.ones(n, dtype=bool)
        free[[self.place[number] for number in played if number in self.place]] = False
        if not free.any():
            free[:] = True
        rank = np.empty(n)
        order = np.argsort(np.where(free, -self.score[:n], np.inf), kind="stable")
        rank[order] = np.arange(1, n + 1)
        # In logarithms: the power itself may underflow.
        weight = np.exp(-np.log(rank) / self.beta) * free
        old = (self.clock - self.drawn[:n]) * free.astype(float)
        old = old / old.sum() if old.any() else free / free.sum()
        return (1 - self.staleness) * weight / weight.sum() + self.staleness * old

    def sample(self, random: np.random.Generator, played: Collection[int] = ()) -> int:
        """Sample a level that is not one of the numbers `played`; returns its number."""
        place = int(random.choice(self.count, p=self.chances(played)))
        self.clock += 1
        self.drawn[place] = self.clock
        return int(self.number[place])

    def get(self, number: int) -> Floats | None:
        """Level `number` [D]; None if it was replaced."""
        place = self.place.get(number)
        return None if place is None else self.level[place].copy()

    def find(self, level: Floats) -> int | None:
        """The number of `level`; None if it is not in the buffer."""
        return self.named.get(level.tobytes())

    def best_of(self, number: int | None) -> float:
        """The highest return on level `number`; -inf if it is not in the buffer."""
        place = None if number is None else self.place.get(number)
        return -np.inf if place is None else float(self.best[place])

    def update_score(self, number: int, score: float, best: float) -> None:
        """Set the score of level `number`, if it is still in the buffer."""
        place = self.place.get(number)
        if place is not None:
            self.score[place], self.best[place] = score, max(best, float(self.best[place]))

    def add(self, level: Floats, score: float, best: float) -> bool:
        """Add a new level if there is room, or if its score is above that of the level with the
        lowest probability, which it then replaces; returns whether it was added."""
        place = self.count
        if place == self.size:
            place = int(self.chances().argmin())
            if score <= self.score[place]:
                return False
            del self.place[int(self.number[place])], self.named[self.level[place].tobytes()]
        else:
            self.count += 1
        self.level[place] = level
        self.score[place] = score
        self.best[place] = best
        self.drawn[place], self.number[place] = self.clock, self.given
        self.place[self.given], self.named[level.tobytes()] = place, self.given
        self.given += 1
        return True

    def get_state(self) -> dict[str, Any]:
        n = self.count
        arrays: dict[str, NDArray[Any]] = {
            name: getattr(self, name)[:n].copy()
            for name in ("level", "score", "best", "drawn", "number")
        }
        return {**arrays, "given": self.given, "clock": self.clock}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = n = len(state["score"])
        for name in ("level", "score", "best", "drawn", "number"):
            getattr(self, name)[:n] = state[name]
        self.given = state["given"]
        self.clock = state["clock"]
        numbers = self.number[:n].tolist()
        self.place = {number: place for place, number in enumerate(numbers)}
        self.named = {self.level[place].tobytes(): numbers[place] for place in range(n)}


@dataclass(frozen=True, kw_only=True)
class PlrConfig(teacher.Config):
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


class Plr(LevelTeacher):
    """Prioritized level replay: levels with a high learning potential are replayed.

    Jiang, Grefenstette and Rocktaschel, "Prioritized level replay", 2021; `robust`: Jiang et al.,
    "Replay-guided adversarial environment design", 2021; `edits` (ACCEL): Parker-Holder, Jiang et
    al., "Evolving curricula with regret-based environment design", 2022. Once the level buffer is
    full enough, an episode's level is sampled from it with probability `replay`, else it is a new
    one. Robust PLR trains the student on replayed levels only. Scores that estimate the regret:

        gain  1/T sum_t max(A_t, 0)        error  1/T sum_t |A_t|
        maxmc 1/T sum_t (R_max - V(s_t)),  R_max the highest return on this level so far

    The sampling probabilities follow from score ranks (1: best) and staleness:

        P = (1 - c) P_score + c P_stale,   P_score ~ (1 / rank)^(1 / beta),   P_stale ~ C - C_i

    C is the number of samples so far, C_i its value when level i was last sampled. Ranks are those
    among the levels that are not being played: with many parallel envs and a low beta, most of them
    would otherwise play the level with the best score at the same time.

    The memo of an episode is its kind (new, replayed, edited) and the number of its level in the
    buffer (-1: not from the buffer).
    """

    uses_estimates = True
    remembered = ("library", "queue", "kinds", "taken")

    def __init__(
        self, config: PlrConfig, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
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
        settings = self.config
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
        return len(self.library) >= max(1, self.config.fill * self.config.size)

    def trains(self, ticket: Tensor) -> Tensor:
        if not self.config.robust:
            return super().trains(ticket)
        memos = (self.pending[number][1] for number in ticket.tolist())
        return torch.tensor([kind == AGAIN for kind, _ in memos], dtype=torch.bool)

    def scores(self, outcome: Outcome) -> Floats:
        """[n, 3]: estimate, return and mean value; NaN if the student's estimates are missing."""
        if outcome.gain is None or outcome.error is None or outcome.value is None:
            raise ConfigError("this teacher needs the student's value estimates: learner=ppo")
        estimate = outcome.error if self.config.score == "error" else outcome.gain
        columns = (estimate, outcome.ret, outcome.value)
        return np.stack([column.double().cpu().numpy() for column in columns], 1)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for level, (estimate, ret, value), (kind, number) in zip(
            points, scores.tolist(), memos, strict=True
        ):
            self.rate(level, estimate, ret, value, number if kind == AGAIN else None)
        again = np.array([kind == AGAIN for kind, _ in memos])
        if self.config.edits and again.any():  # batched: much faster
            self.queue.extend(self.levels.mutate(points[again], self.config.edits, self.random))

    def rate(
        self, level: Floats, estimate: float, ret: float, value: float, number: int | None
    ) -> None:
        """Score `level` [D] after an episode; `number` in the buffer (None: new)."""
        if number is None:
            number = self.library.find(level)
        best = max(ret, self.library.best_of(number))
        score = best - value if self.config.score == "maxmc" else estimate
        if number is not None:
            self.library.update_score(number, score, best)
        else:
            self.taken += self.library.add(level, score, best)

    def metrics(self) -> dict[str, float]:
        kinds, count = np.array(self.kinds), len(self.library)
        return {
            **super().metrics(),
            "library": float(count),
            "score": float(self.library.score[:count].mean()) if count else 0.0,
            "again": float((kinds == AGAIN).mean()) if len(kinds) else 0.0,
            "taken": float(self.taken),
        }
