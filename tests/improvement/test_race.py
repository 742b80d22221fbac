"""The race: who goes on, what is in the journal, and the interval of a gain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from embodied.improvement.advice import Score
from embodied.improvement.race import ENOUGH, AtOnce, Journal, Leg, best, gain, race, shares


def score(successes: int, episodes: int = 100) -> Score:
    return Score.of((torch.arange(episodes) < successes).float(), True)


def rungs(ways: Sequence[str], budget: float) -> list[tuple[int, float]]:
    return [(count, share * budget) for count, share in shares(len(ways))]


def test_every_rung_has_the_same_share_of_the_budget() -> None:
    for contenders in range(1, 9):
        found = shares(contenders)
        assert [count for count, _ in found][-1] == 1
        assert all(count * share == pytest.approx(1 / len(found)) for count, share in found)


def test_minutes_are_spent_by_several_at_once() -> None:
    assert shares(1) == [(1, pytest.approx(1 / 3))] * 3
    assert shares(4, at_once=2) == [(4, pytest.approx(1 / 6)), (2, 1 / 3), (1, 1 / 3)]


def test_the_better_half_goes_on_and_the_last_one_has_most(tmp_path: Path) -> None:
    reached = {"a": 20, "b": 60, "c": 40, "d": 70}

    def run(way: str, rung: int, budget: float) -> Leg:
        return Leg(way, rung, budget, score=score(reached[way] + rung))

    legs = race(
        [*reached], rungs([*reached], 120.0), run, Journal(tmp_path / "race.jsonl"), AtOnce()
    )
    by_rung = {k: [leg.way for leg in g] for k, g in itertools.groupby(legs, lambda leg: leg.rung)}
    assert by_rung == {0: ["a", "b", "c", "d"], 1: ["d", "b"], 2: ["d"]}
    spent = {way: sum(leg.budget for leg in legs if leg.way == way) for way in reached}
    assert sum(spent.values()) == pytest.approx(120) and spent["d"] == pytest.approx(70)
    chosen = best(legs)
    assert chosen is not None and (chosen.way, chosen.rung) == ("d", 2)


def test_who_cannot_be_measured_is_out_and_the_race_goes_on(tmp_path: Path) -> None:
    def run(way: str, rung: int, budget: float) -> Leg:
        if way == "broken":
            return Leg(way, rung, budget, problem="it has no noise")
        return Leg(way, rung, budget, score=score(50))

    ways = ["broken", "a", "b"]
    legs = race(
        ways, rungs(ways, 1.0), run, Journal(tmp_path / "race.jsonl"), ThreadPoolExecutor(2)
    )
    assert [leg.way for leg in legs if leg.rung == 1] == ["a", "b"]


def test_it_ends_where_nothing_is_left_to_win(tmp_path: Path) -> None:
    def run(way: str, rung: int, budget: float) -> Leg:
        return Leg(way, rung, budget, score=score(100 if way == "a" else 50))

    assert score(100).low >= ENOUGH
    legs = race(["a", "b"], rungs("ab", 1.0), run, Journal(tmp_path / "race.jsonl"), AtOnce())
    assert [leg.way for leg in legs] == ["a", "b"]


def test_an_interrupted_race_runs_nothing_twice(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def run(way: str, rung: int, budget: float) -> Leg:
        if len(ran) == 3:
            ran.append(("interrupted", 0))
            raise KeyboardInterrupt
        ran.append((way, rung))
        return Leg(way, rung, budget, score=score(len(way) * 10), sampler=("execute=1",))

    ways, file = ["a", "bb", "ccc"], tmp_path / "race.jsonl"
    with pytest.raises(KeyboardInterrupt):
        race(ways, rungs(ways, 9.0), run, Journal(file), AtOnce())
    legs = race(ways, rungs(ways, 9.0), run, Journal(file), AtOnce())
    done = [each for each in ran if each[0] != "interrupted"]
    assert len(done) == len(set(done)) == len(legs)
    assert Journal(file).legs == legs


def test_equal_scores_go_to_the_cheaper_one() -> None:
    dear, cheap = Leg("a", 0, minutes=9, score=score(60)), Leg("b", 0, minutes=1, score=score(60))
    assert best([dear, cheap]) is cheap
    assert best([Leg("c", 0)]) is None


def test_a_gain_has_the_interval_of_a_difference_of_rates() -> None:
    """56 of 70 against 48 of 80: 0.2 with [0.0524, 0.3339] (Newcombe, 1998, example a)."""
    change, low, high = gain(score(56, 70), score(48, 80))
    assert (change, low, high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_returns_where_the_environment_reports_no_success() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = Score.of(returns, False)
    error = returns.std().item() / 2
    assert (found.mean, found.low, found.is_rate) == (2.5, pytest.approx(2.5 - 1.96 * error), False)
