"""What a run's log says is going wrong, each in one line.

Reward hacking: a reward that stands in for the environment's own is a proxy, and a policy can learn
to maximise it alone (Goodhart's law). At every evaluation the mean reward of the newest transitions
is logged beside the success rate; `PATIENCE` evaluations in a row in which the one rose and the
other fell give a warning. The history is read from metrics.jsonl, so that a resumed run continues
it.

Rising values: values of critics that still rise have not arrived: with one-step backups they travel
from a sparse reward by a step for each time constant of the target networks. Such a run says little
about its learner. They count as rising if a line that is fitted to the last third of the log lines
(at least 6) rises by more than a tenth of the range of all, and its slope is more than 5 standard
errors above 0. An exponential approach counts as rising until it has come about nine tenths of its
way; noise around a level does so once in hundreds of runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.reward import HasComponents, Reward
from embodied.core.tensors import Tensors
from embodied.evaluation.statistics import rate, wilson
from embodied.training.logger import Log, read_metrics

PATIENCE = 3
NEWEST = 1024  # transitions whose mean reward is logged, at most
PROXY, SUCCESS, ALARM = "reward/proxy", "eval/success", "reward/alarm"


def log_evaluation(loop: object, log: Log, step: int, result: Mapping[str, float]) -> None:
    """Log an evaluation with the mean reward beside it; warn once when the two diverge."""
    rewards = getattr(loop, "mean_reward", dict[str, Tensor])()  # of a loop with its own reward
    if PROXY not in rewards or SUCCESS not in result or log.silent:
        log.write(step, {**result, **rewards})
        return
    past = evaluations(log.folder, step - 1)
    now = [*past, (float(rewards[PROXY]), result[SUCCESS], step)]
    log.write(step, {**result, **rewards, ALARM: float(diverging(now))})
    if diverging(now) and not ever_diverged(past):
        log.warn(
            f"over the last {PATIENCE} evaluations the reward rose while success fell (now "
            f"{result[SUCCESS]:.0%}): the policy may exploit the reward instead of doing the task"
        )


def describe(reward: Reward, rows: Tensors, rewards: Tensor | None = None) -> dict[str, Tensor]:
    """Means of the `rewards` of transitions `rows`, and of each component of the reward."""
    means = {} if rewards is None else {PROXY: rewards.float().mean()}
    if isinstance(reward, HasComponents):
        with torch.no_grad():
            terms = reward.components(rows)
        means |= {f"reward/{name}": value.float().mean() for name, value in terms.items()}
    return means


def evaluations(folder: Path, step: int | None = None) -> list[tuple[float, float, int]]:
    """(proxy, success, step) of every evaluation that a run's log has, up to `step`."""
    rows: list[dict[str, Any]] = [r for r in read_metrics(folder) if PROXY in r and SUCCESS in r]
    return [(r[PROXY], r[SUCCESS], r["step"]) for r in rows if step is None or r["step"] <= step]


def ever_diverged(history: Sequence[tuple[float, float, int]]) -> bool:
    return any(diverging(history[: n + 1]) for n in range(len(history)))


def diverging(history: Sequence[tuple[float, float, int]]) -> bool:
    """Whether the proxy rose and success fell at each of the last `PATIENCE` evaluations."""
    last = history[-PATIENCE - 1 :]
    diverged = [b[0] > a[0] and b[1] < a[1] for a, b in pairwise(last)]
    return len(diverged) == PATIENCE and all(diverged)


METRIC = "train/q_mean"
LEAST_LINES = 10  # log lines with values; with fewer nothing is said
TAIL, LEAST_TAIL = 3, 6  # the last 1 / TAIL of the lines, at least so many
SHARE = 0.1  # of the range of all values
STANDARD_ERRORS = 5.0


def rise(steps: Sequence[float], values: Sequence[float]) -> tuple[float, float] | None:
    """The ends of the line fitted to the last values if they are rising, else None."""
    count = len(values)
    if count < LEAST_LINES or not np.isfinite(values).all():
        return None
    tail = max(LEAST_TAIL, count // TAIL)
    x, y = np.array(steps[-tail:], float), np.array(values[-tail:], float)
    x -= x.mean()
    slope = (x * y).sum() / (x * x).sum()
    fitted = y.mean() + slope * x
    error = np.sqrt(((y - fitted) ** 2).sum() / (tail - 2) / (x * x).sum())
    far = fitted[-1] - fitted[0] > SHARE * (max(values) - min(values))
    return (fitted[0], fitted[-1]) if far and slope > STANDARD_ERRORS * error else None


def warning(rows: Sequence[Mapping[str, Any]], n_step: int, folder: object) -> str:
    """One line that says what to do after the run in `folder`, whose log lines are `rows` and whose
    returns are of `n_step` decisions; "" if its values are not rising."""
    logged = [row for row in rows if METRIC in row]
    found = rise([row["step"] for row in logged], [row[METRIC] for row in logged])
    if found is None:
        return ""
    line = (
        f"the critics' values were still rising at the end ({METRIC} from {found[0]:.3g} to "
        f"{found[1]:.3g} in its last part): train longer, embodied resume {folder} steps=N"
    )
    return line if n_step > 1 else f"{line}; or, where rewards are sparse, learner.n_step=5"


def parted(result: Mapping[str, float]) -> str:
    """A line where the 95% intervals of imagined and real success do not overlap; else empty."""
    if not {"imagined_success", "success"} <= result.keys():
        return ""
    trials = int(result["episodes"])
    imagined, real = (round(result[k] * trials) for k in ("imagined_success", "success"))
    (low, high), (other_low, other_high) = wilson(imagined, trials), wilson(real, trials)
    if low <= other_high and other_low <= high:
        return ""
    return (
        f"imagined success is {rate(imagined, trials)}, and real success {rate(real, trials)}: "
        "they have parted, so stop here, or fit the model and the reward to newer recordings"
    )
