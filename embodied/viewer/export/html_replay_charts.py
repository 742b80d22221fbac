"""The charts of an HTML replay, as data for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.viewer.panels.plots import groups_of
from embodied.viewer.scene.types import Array
from embodied.viewer.session.episode import TERM, Episode, Moment

FRAMES = 1500
"""Most steps stored per episode, evenly spaced; the page interpolates between them."""
CURVES = 6


@dataclass(frozen=True)
class Lane:
    """An episode and its `name`; `plans` are paths [K, H, 3] (m) at some of its steps, the chosen
    one first, `trail` [T, 3] is the tool's path."""

    name: str
    episode: Episode
    plans: Sequence[tuple[int, Sequence[Array]]] = ()
    trail: Array | None = None


def charts(lanes: Sequence[Lane], names: Sequence[str]) -> list[dict[str, Any]]:
    """Reward (components), other numbers of each step, and the actions of the first lane."""
    made: list[dict[str, Any]] = []
    every = {name for lane in lanes for name in lane.episode.number_names}
    terms = sorted(name for name in every if name.startswith(TERM))
    if terms and len(lanes) == 1:
        curves = [curve(lanes[0], name.removeprefix(TERM), name) for name in terms]
        made.append({"title": "reward terms", "curves": curves, "stacked": True})
    else:
        made.append({"title": "reward", "curves": each_lane(lanes, "reward")})
    made += known_of(lanes, sorted(every - set(terms)))
    action = actions_of(lanes[0], names)
    if action:
        made.append({"title": "action", "curves": action})
    return made


def known_of(lanes: Sequence[Lane], names: Sequence[str]) -> list[dict[str, Any]]:
    """Charts of the other numbers; numbers of one group share a chart if there is one lane."""
    if len(lanes) > 1:
        return [{"title": name, "curves": each_lane(lanes, name)} for name in names]
    made: list[dict[str, Any]] = []
    for title, (members, stacked) in groups_of(names).items():
        if members == [title]:
            made.append({"title": title, "curves": each_lane(lanes, title)})
            continue
        curves = [curve(lanes[0], name.partition("/")[2], name) for name in members]
        made.append({"title": title, "curves": curves, "stacked": stacked})
    return made


def actions_of(lane: Lane, names: Sequence[str]) -> list[dict[str, Any]]:
    """A curve for each of the first elements of the action."""
    taken, _ = thinned(lane.episode.actions_taken, FRAMES)
    actions = np.array([moment.action for moment in taken], np.float64)
    if not len(actions):
        return []
    known = [*names, *(f"action {i}" for i in range(len(names), actions.shape[1]))]
    return [
        {"name": known[i], "steps": steps_of(taken), "values": numbers(actions[:, i])}
        for i in range(min(actions.shape[1], CURVES))
    ]


def each_lane(lanes: Sequence[Lane], name: str) -> list[dict[str, Any]]:
    return [
        curve(lane, lane.name, name) | {"colour": i, "dashed": i > 0}
        for i, lane in enumerate(lanes)
    ]


def curve(lane: Lane, label: str, name: str) -> dict[str, Any]:
    """One number per step: the reward, or one of the step's `numbers`."""
    taken, _ = thinned(lane.episode.actions_taken, FRAMES)
    found = (m.reward if name == "reward" else m.numbers.get(name, np.nan) for m in taken)
    return {"name": label, "steps": steps_of(taken), "values": numbers(found)}


def steps_of(moments: Sequence[Moment]) -> list[int]:
    return [moment.step for moment in moments]


def numbers(values: Any) -> list[float | None]:
    """Numbers for JSON, which has no NaN."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def thinned(moments: Sequence[Moment], most: int) -> tuple[Sequence[Moment], int]:
    """Every `stride`-th step, at most about `most` of them, and `stride`."""
    stride = max(1, -(-len(moments) // most))
    return moments[::stride], stride
