"""Whether a run ended while the values of its critics were still rising, from its logged metrics.

Values that still rise have not arrived: with one-step backups they travel from a sparse reward by a
step for each time constant of the target networks. Such a run says little about its learner.

Values v of the log lines count as rising if a line that is fitted to the last third of them (at
least 6) rises by more than a tenth of the range of all v, and its slope is more than 5 standard
errors above 0. An exponential approach counts as rising until it has come about nine tenths of its
way; noise around a level does so once in hundreds of runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
