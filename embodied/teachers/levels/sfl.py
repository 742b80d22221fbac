"""SFL, sampling for learnability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, Fraction
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.teachers import teacher
from embodied.teachers.teacher import Floats, LevelSpace, LevelTeacher

TRAIN = -1


@dataclass(frozen=True, kw_only=True)
class SflConfig(teacher.Config):
    """Settings of sampling for learnability."""

    candidates: Count = 4_000  # levels that are tested in a round
    plays: Annotated[int, Bound(2)] = 4  # episodes on each of them; 1 cannot tell p (1 - p) from 0
    size: Count = 400  # candidates that are kept, at most `candidates`
    every: Count = 8_000  # episodes between rounds
    replay: Fraction = 1.0  # share of these on kept levels
    train_on_tests: bool = True  # the student learns from the tests too


class Sfl(LevelTeacher):
    """Sampling for learnability: train on levels that the student solves now and then.

    Rutherford et al., "No regrets: Investigating and improving regret approximations for curriculum
    discovery", 2024. With p the student's success rate on a level, its learnability is p (1 - p).
    A round tests `candidates` random levels `plays` times each and keeps the `size` most learnable
    ones. Then a share `replay` of the episodes is on levels of this set, uniformly, and the others
    on random levels, until `every` of them have ended. The source tests 25,000 levels for 2,000
    steps, keeps 1,000, trains on as many random levels as kept ones, and does not train on the
    tests. Here these steps count too, and the tests are the random levels that the student trains
    on. The memo of an episode is the place of its level among the candidates (-1: it is no test).
    """

    uses_estimates = True  # only so does the student leave episodes out of its training
    remembered = (
        *("kept", "tested", "waiting", "wins", "plays"),
        *("trained", "rounds", "learnability"),
    )

    def __init__(
        self, config: SflConfig, spec: Spec, levels: LevelSpace | None = None, seed: int = 0
    ) -> None:
        super().__init__(config, spec, levels, seed)
        if config.size > config.candidates:
            raise ConfigError(
                f"teacher.size={config.size} should be at most "
                f"teacher.candidates={config.candidates}"
            )
        self.kept = np.zeros((0, len(self.space)))
        self.trained = 0
        self.rounds = 0
        self.learnability = 0.0
        self.begin_round()

    def begin_round(self) -> None:
        """Draw candidates and put their tests in line."""
        count = self.config.candidates
        self.tested = self.levels.random(count, self.random)
        order = np.tile(np.arange(count), self.config.plays)
        self.waiting: list[int] = self.random.permutation(order).tolist()
        self.wins = np.zeros(count)
        self.plays = np.zeros(count)

    def choose(self, n: int) -> list[tuple[Floats, Any]]:
        return [self.one() for _ in range(n)]

    def one(self) -> tuple[Floats, int]:
        if self.waiting:
            place = self.waiting.pop()
            return self.tested[place], place
        if len(self.kept) and self.random.random() < self.config.replay:
            return self.kept[int(self.random.integers(len(self.kept)))], TRAIN
        return self.levels.random(1, self.random)[0], TRAIN

    def trains(self, ticket: Tensor) -> Tensor:
        if self.config.train_on_tests:
            return super().trains(ticket)
        memos = (self.pending[number][1] for number in ticket.tolist())
        return torch.tensor([memo == TRAIN for memo in memos], dtype=torch.bool)

    def learn(self, points: Floats, scores: Floats, memos: list[Any]) -> None:
        for score, place in zip(scores.tolist(), memos, strict=True):
            if place == TRAIN:
                self.trained += 1
            else:
                self.wins[place] += score
                self.plays[place] += 1
        if len(self.tested) and not self.waiting and not self.running:
            self.keep()
        if not len(self.tested) and self.trained >= self.config.every:
            self.begin_round()

    @property
    def running(self) -> bool:
        return any(memo != TRAIN for _, memo in self.pending.values())

    def keep(self) -> None:
        """End the round: keep the most learnable candidates."""
        # Fewer plays where an episode had no score.
        rate = self.wins / self.plays.clip(min=1)
        worth = rate * (1 - rate)
        best = np.argsort(-worth, kind="stable")[: self.config.size]
        self.kept = self.tested[best]
        self.learnability = float(worth[best].mean())
        self.rounds = self.rounds + 1
        self.trained = 0
        self.tested = self.tested[:0]
        self.wins = self.wins[:0]
        self.plays = self.plays[:0]

    def forget(self) -> None:
        """Interrupted tests are repeated."""
        self.waiting += [memo for _, memo in self.pending.values() if memo != TRAIN]
        super().forget()

    def metrics(self) -> dict[str, float]:
        counts = {"rounds": float(self.rounds), "learnability": self.learnability}
        if not len(self.kept):
            return {**super().metrics(), **counts}
        kept = {f"kept_{name}": value for name, value in self.levels.traits(self.kept).items()}
        return {**super().metrics(), **counts, **kept}
