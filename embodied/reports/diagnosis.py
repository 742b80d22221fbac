"""What the metrics of a run mean, and what a reader should notice in them first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Rows = Sequence[Mapping[str, Any]]

APART = 0.3  # of success: training and evaluation are different things
FALLEN = 0.2  # of success, below the best evaluation
FLAT = 0.02  # of the range of the returns: nothing was learned
LEAST = 4  # evaluations or more before a curve says something


@cache
def _words() -> dict[str, str]:
    return yaml.safe_load(Path(__file__).with_name("metric_words.yaml").read_text())


def meaning(name: str) -> str:
    """A sentence about a metric; "" for one that is not known."""
    words = _words()
    prefix = next((key for key in words if key[-1] == "*" and name.startswith(key[:-1])), "")
    return words.get(name) or words.get(prefix, "")


def diagnosis(rows: Rows) -> list[str]:
    """What to notice first in a run's metrics, a sentence each."""
    return [*_success(rows), *_returns(rows), *_alarms(rows)]


def _success(rows: Rows) -> Iterator[str]:
    measured = series(rows, "eval/success")
    if not len(measured):
        return
    last, best, training = measured[-1], measured.max(), series(rows, "train/success")
    if len(training) and training[-1] - last > APART:
        yield (
            f"training {training[-1]:.0%}, evaluation {last:.0%}: the tasks of training are easier "
            "(a teacher, a narrower start) or exploration helps; the evaluation counts"
        )
    if len(training) and last - training[-1] > APART:
        yield (
            f"evaluation {last:.0%}, training {training[-1]:.0%}: exploration or a teacher makes "
            "training harder; the evaluation counts"
        )
    if best - last > FALLEN:
        yield (
            f"success was {best:.0%} and is {last:.0%} now: an earlier checkpoint is better, or "
            "the learning rate is too high"
        )
    if best == 0:
        yield (
            "no evaluation episode ever succeeded: a sparse reward that is never found needs "
            "demonstrations, shaping or a teacher"
        )


def _returns(rows: Rows) -> Iterator[str]:
    returns = series(rows, "eval/return")
    if len(returns) < LEAST or len(series(rows, "eval/success")):
        return
    spread = np.ptp(returns)
    if spread <= FLAT * abs(returns).max():
        yield "the return has not changed since the first evaluation: nothing was learned"
    elif returns[-1] == returns.max() and returns[-1] - returns[-2] > 0.1 * spread:
        yield "the return was still rising at the end: more steps may help"


def _alarms(rows: Rows) -> Iterator[str]:
    if (series(rows, "reward/alarm") > 0).any():
        yield "the learned reward rose while success fell (reward hacking): see Reward"
    if len(kl := series(rows, "train/kl")) and kl[-1] > 0.1:
        yield f"an update moves the policy far (KL {kl[-1]:.2f}): learner.stop_kl or a lower rate"


def series(rows: Rows, name: str) -> np.ndarray:
    """The finite values of a metric [n]."""
    values = np.array([row[name] for row in rows if name in row], dtype=float)
    return values[np.isfinite(values)]
