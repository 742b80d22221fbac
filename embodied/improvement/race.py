"""A race of ways to improve a policy: all get the same budget, and the better half goes on.

Successive halving (Jamieson and Talwalkar, 2016): every rung has the same share of the budget,
which those that are still racing divide equally, so that the last one has most of it. Whoever was
measured is in the journal, so that an interrupted race goes on where it was.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied.improvement.advice import Score

BASE = "base"  # the name of the policy that is to be improved
SAMPLER = "best sampler"  # the same with other settings of its sampler
RUNGS = 3  # of a race, at least
ENOUGH = 0.95  # lower end of a success rate at which nothing is left to win


@dataclass(frozen=True)
class Leg:
    """What a way did in one rung: the budget that it had, what it was measured at, and the policy.

    `policy`: a checkpoint folder, or a server's address; `sampler`: the words of `embodied eval`
    with which it acts best, where these were searched; `change`: the mean change of an action's
    elements from one step to the next (0: not known); `problem`: why it is out of the race;
    `outcomes`: of each episode, where they are kept.
    """

    way: str
    rung: int
    budget: float = 0.0
    minutes: float = 0.0
    score: Score | None = None
    policy: str = ""
    sampler: tuple[str, ...] = ()
    change: float = 0.0
    problem: str = ""
    outcomes: tuple[float, ...] = ()


class Journal:
    """The legs that were run so far, in a file with a line for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.legs = [leg_of(json.loads(line)) for line in lines]
        self._adding = threading.Lock()

    def find(self, way: str, rung: int) -> Leg | None:
        return next((leg for leg in self.legs if (leg.way, leg.rung) == (way, rung)), None)

    def of(self, way: str) -> list[Leg]:
        """The legs of a way, in order."""
        return [leg for leg in self.legs if leg.way == way]

    def add(self, leg: Leg) -> Leg:
        with self._adding, self.path.open("a") as sink:
            self.legs.append(leg)
            sink.write(json.dumps(asdict(leg)) + "\n")
        return leg


def leg_of(row: dict[str, Any]) -> Leg:
    """The leg of a line of the journal."""
    score = row.pop("score")
    for name in ("sampler", "outcomes"):
        row[name] = tuple(row.get(name, ()))
    return Leg(**row, score=None if score is None else Score(**score))


def amount(budget: float) -> str:
    """A budget in words: 14,672 steps, 2.67 minutes."""
    return f"{budget:,.0f}" if budget >= 100 else f"{budget:.3g}"


def shares(contenders: int, at_once: int = 1) -> list[tuple[int, float]]:
    """How many race in each rung, and the share of the whole budget that each of them has in it;
    `at_once`: how many can spend the same minutes. There are at least `RUNGS`: the winner is
    measured on its way, and what goes in rounds has several."""
    counts = [contenders] if contenders else []
    while counts and (counts[-1] > 1 or len(counts) < RUNGS):
        counts.append(-(-counts[-1] // 2))
    return [(count, min(at_once, count) / (len(counts) * count)) for count in counts]


def best(legs: Iterable[Leg]) -> Leg | None:
    """The leg with the highest lower end of its interval, of equal ones the cheapest; None if none
    was measured."""
    scored = [leg for leg in legs if leg.score is not None]
    return max(scored, key=_rank, default=None)


def _rank(leg: Leg) -> tuple[float, float]:
    assert leg.score is not None
    return leg.score.low, -leg.minutes


def race(
    ways: Sequence[str],
    rungs: Sequence[tuple[int, float]],
    run: Callable[[str, int, float], Leg],
    journal: Journal,
    pool: Executor,
    finished: Callable[[Leg], None] = lambda _: None,
    out: Callable[[Leg], None] = lambda _: None,
) -> list[Leg]:
    """Let `ways` race; returns the legs that were run, rung by rung.

    `rungs`: how many race in each, and what each of them spends; `run(way, rung, budget)` spends
    it, in `pool`. The race ends early where a success rate is known to be above `ENOUGH`.
    `finished` is called after each leg, `out` with the last leg of a way that does not go on, when
    those that do have begun.
    """
    racing, every, legs = list(ways), list[Leg](), list[Leg]()
    for rung, (count, budget) in enumerate(rungs):

        def one(way: str, rung: int = rung, budget: float = budget) -> Leg:
            leg = journal.find(way, rung) or journal.add(run(way, rung, budget))
            finished(leg)
            return leg

        begun = [pool.submit(one, way) for way in racing[:count]]
        for leg in legs:
            if leg.way in racing[count:]:
                out(leg)
        legs = [each.result() for each in begun]
        every += legs
        measured = sorted((leg for leg in legs if leg.score is not None), key=_rank, reverse=True)
        racing = [leg.way for leg in measured]
        if not racing or won(measured[0]):
            break
    return every


class AtOnce(Executor):
    """Does what is submitted before it goes on, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **kwargs))
        return done


def won(leg: Leg) -> bool:
    """Whether nothing is left to win after `leg`."""
    return leg.score is not None and leg.score.is_rate and leg.score.low >= ENOUGH


def gain(after: Score, before: Score) -> tuple[float, float, float]:
    """The difference of two scores and its 95% interval, from the intervals of both (Newcombe,
    1998, method 10)."""
    change = after.mean - before.mean
    below, above = after.mean - after.low, after.high - after.mean
    under, over = before.mean - before.low, before.high - before.mean
    return change, change - math.hypot(below, over), change + math.hypot(above, under)


@dataclass(frozen=True)
class Improvement:
    """What came out.

    `start` is the base at its best sampler, `chosen` the best of all while choosing; `policy` is
    the run folder of `chosen`, of `start` where that is not better (the server's address, if it is
    on a server). `rows` are the final measurements by name, `problems` why a way did not race.
    """

    policy: str
    start: Leg
    chosen: Leg
    rows: Mapping[str, Score]
    problems: Mapping[str, str]
    report: Path

    @property
    def before(self) -> str:
        """What has to be better than: the base at its best sampler, or as it was given."""
        return BASE if self.chosen.way == self.start.way else self.start.way

    @property
    def gain(self) -> tuple[float, float, float]:
        """How much better the chosen policy is, with the 95% interval."""
        return gain(self.rows[self.chosen.way], self.rows[self.before])

    @property
    def found(self) -> bool:
        """Whether it is better, as far as chance can be told from it."""
        return self.chosen.way != BASE and self.gain[1] > 0

    def __str__(self) -> str:
        """The result in a sentence."""
        before, after = self.rows[self.before], self.rows[self.chosen.way]
        if not self.found:
            tried = "" if self.chosen.way == BASE else f", {after} with {self.chosen.way}"
            return f"no improvement found: {before} before{tried}"
        unit, scale = ("points", 100.0) if after.is_rate else ("return", 1.0)
        change, low, high = (scale * value for value in self.gain)
        there = "" if self.before == BASE else f" at its {self.before}"
        return (
            f"{self.chosen.way}: {after} instead of {before}{there}: "
            f"{change:+.3g} {unit} [{low:+.3g}, {high:+.3g}]"
        )
