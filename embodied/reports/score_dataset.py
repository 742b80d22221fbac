"""Scores recorded episodes with a reward: does it rise within an episode, does it tell success?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.core.build import ConfigError, Node
from embodied.core.reward import Reward
from embodied.datasets.lerobot.reader import Episodes
from embodied.nn.statistics import auc, spearman
from embodied.reports.label_dataset import labels
from embodied.rewards.analysis import distances

Numbers = NDArray[np.float64]
Row = dict[str, Any]


def score(
    episodes: Episodes, reward: Reward, gamma: float, progress: Callable[[int, int], None]
) -> list[Row]:
    """One row per episode: `values` [T], the reward of each step, with their statistics, and
    `success` (None: not recorded). ConfigError if the reward is not finite.

    `rise` is Spearman's correlation of the reward with the step number (None: it is constant).
    `progress(done, all)` is called after each episode.
    """
    rows: list[Row] = []
    for number in range(len(episodes)):
        episode = episodes.episode(number)
        values = labels(reward, episode, gamma).double().numpy()
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ConfigError(f"the reward of step {at} of episode {number} is {values[at]}")
        success = bool(episode["success"][-1]) if "success" in episode else None
        rows.append({"episode": number, **_row(values), "success": success})
        progress(number + 1, len(episodes))
    return rows


def _row(values: Numbers) -> Row:
    rise = spearman(values, np.arange(len(values)))
    return {
        "steps": len(values),
        "first": float(values[0]),
        "last": float(values[-1]),
        "lowest": float(values.min()),
        "highest": float(values.max()),
        "mean": float(values.mean()),
        "sum": float(values.sum()),
        "rise": rise if np.isfinite(rise) else None,
        "values": values.tolist(),
    }


def summary(rows: Sequence[Row], threshold: float | None) -> dict[str, Any]:
    """Means over all episodes. Where success is recorded: how well the reward tells it (areas
    under the ROC curve), how well the episode's length does so alone, and with a `threshold` of the
    last step's reward, the counts of right and wrong predictions."""
    rises = [row["rise"] for row in rows if row["rise"] is not None]
    facts: dict[str, Any] = {
        "episodes": len(rows),
        "steps": sum(row["steps"] for row in rows),
        "rise": float(np.mean(rises)) if rises else None,
        "constant": len(rows) - len(rises),
    }
    known = [row for row in rows if row["success"] is not None]
    if not known:
        return facts
    won = np.array([row["success"] for row in known])
    facts |= {"successes": int(won.sum()), "failures": int((~won).sum())}
    for name in ("last", "mean", "sum"):
        facts[f"auc_{name}"] = _with_interval(np.array([row[name] for row in known]), won)
    facts["auc_length"] = _with_interval(np.array([-row["steps"] for row in known]), won)
    if threshold is not None:
        said = np.array([row["last"] >= threshold for row in known])
        facts["threshold"] = threshold
        facts["confusion"] = {
            "true positives": int((said & won).sum()),
            "false positives": int((said & ~won).sum()),
            "false negatives": int((~said & won).sum()),
            "true negatives": int((~said & ~won).sum()),
        }
        number = np.array([row["episode"] for row in known])
        facts["mistaken"] = {
            "failures taken for successes": number[said & ~won].tolist(),
            "successes taken for failures": number[~said & won].tolist(),
        }
    return facts


def cameras(node: Node, names: Sequence[str] | None) -> dict[str, Node]:
    """The reward's `node` for each camera: an image observation by its `picture` or its only one of
    `views`; {"": node} without names."""
    if not names:
        return {"": node}
    if "views" in node:
        return {name: {**node, "views": [name]} for name in names}
    return {name: {**node, "picture": name} for name in names}


def between_cameras(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """A line for each pair of cameras: the rank correlation of their rewards over all steps."""
    values = {name: np.concatenate([row["values"] for row in rows]) for name, rows in found.items()}
    return [
        f"rank correlation of {one} and {other}: {spearman(values[one], values[other]):.3f}"
        for one, other in combinations(values, 2)
    ]


def _with_interval(scores: Numbers, won: NDArray[np.bool_]) -> dict[str, float] | None:
    """The area with its bootstrap interval; None without both successes and failures."""
    if won.all() or not won.any():
        return None
    low, high = distances.interval(lambda i: auc(scores[i], won[i]), len(won), samples=500)
    return {"value": auc(scores, won), "low": low, "high": high}


def draw(rows: Sequence[Row], name: str, file: Path) -> None:
    """The reward of every episode over its steps, coloured by success."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    look = {True: ("tab:green", "succeeded"), False: ("tab:red", "failed"), None: ("0.5", "")}
    for row in rows:
        colour, label = look[row["success"]]
        axes.plot(row["values"], color=colour, alpha=0.5, label=label or None)
    unique = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if unique:
        axes.legend(unique.values(), unique.keys())
    axes.set(xlabel="step", ylabel=f"reward ({name})")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
