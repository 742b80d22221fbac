"""Check a dataset, episode by episode: what is missing, damaged, or should not be learnt from.

    files      steps or films that are missing, damaged, or shorter than the episode
    numbers    values that are not finite; actions outside their limits
    time       steps that are missing, or further apart than the period
    turns      a quaternion that changes its sign; an angle that jumps by a whole turn
    joints     a joint that stands still while its command moves, for `still` s
    pictures   dark ones; the same one for `still` s while the robot moves

Films are decoded one episode at a time, a few pictures at once: memory does not grow with them.
"""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa

from embodied.core.bounds import Bound, NonNegative, Number
from embodied.datasets.editing.write import Source
from embodied.datasets.lerobot import schema
from embodied.datasets.lerobot.pictures import fitted
from embodied.datasets.lerobot.schema import DAMAGE, Column, DatasetError, columns_of_info


@dataclass(frozen=True)
class CheckConfig:
    """What counts as a fault of a dataset."""

    dark: Annotated[float, Bound(0.0, 255.0)] = 8.0  # a picture of lower mean brightness is dark
    still: NonNegative = 1.0  # s without motion of a joint or camera, while others move: too long
    gap: NonNegative = 1.5  # periods between two steps that are a gap
    action: tuple[Number, Number] | None = None  # limits of all elements (null: the dataset's)
    pictures: bool = True  # false leaves the films unread


@dataclass(frozen=True)
class Finding:
    """`what` is wrong from step `frame` of an episode on (None: with all of it)."""

    episode: int
    frame: int | None
    what: str


Found = Iterator[tuple[int | None, str]]  # (step, what is wrong)


def check(source: Source, config: CheckConfig) -> Iterator[Finding]:
    """All findings, in order of the episodes."""
    columns, limits = columns_of_info(source.info), _limits(source, config)
    for episode in range(len(source)):
        try:
            file = source.data_file(episode)
            if not file.exists():
                raise DatasetError(f"{file} is missing")
            rows = source.rows(episode)
        except DatasetError as error:
            yield Finding(episode, None, _short(error))
            continue
        for frame, what in _check_episode(source, episode, columns, rows, limits, config):
            yield Finding(episode, frame, what)


def _check_episode(
    source: Source, episode: int, columns: Any, rows: pa.Table, limits: Any, config: CheckConfig
) -> Found:
    values = {c.key: c.numbers(rows[c.name]) for c in columns if not c.stored}
    yield from _check_numbers(columns, values, limits)
    yield from _check_time(source, rows, config.gap)
    yield from _check_turns(columns, values)
    yield from _check_joints(source, columns, values, config.still)
    if config.pictures:
        # The robot moves where the state changes, or the action if there is none.
        state = [v for key, v in values.items() if key.startswith("obs/")]
        flat = np.nan_to_num(np.concatenate(state or [values["action"]], 1))
        span = np.ptp(flat, 0)
        change = np.abs(np.diff(flat, axis=0, prepend=flat[:1]))
        moves = ((change > 1e-3 * np.maximum(span, 1e-9)) & (span > 0)).any(1)
        for camera in (c for c in columns if c.stored):
            yield from check_pictures(source, episode, camera, rows, moves, config)


def _short(error: DatasetError) -> str:
    """The reason, without the advice that follows it."""
    words = str(error)
    found = re.match(r"(\S+) is damaged \((.*?)\);", words)
    if found is not None:
        return f"{Path(found[1]).parent.name}/{Path(found[1]).name}: {found[2]}"
    return words.split(" (")[0]


def _limits(source: Source, config: CheckConfig) -> tuple[np.ndarray, np.ndarray] | None:
    """Lowest and highest action, from the settings or from the dataset's Spec."""
    if config.action is not None:
        return np.array(config.action[0]), np.array(config.action[1])
    act = schema.spec_of_info(source.info).act
    if act.low is None or act.high is None:
        return None
    return np.asarray(act.low).reshape(-1), np.asarray(act.high).reshape(-1)


def _check_numbers(columns: Any, values: dict[str, np.ndarray], limits: Any) -> Found:
    for column in (c for c in columns if not c.stored):
        rows = values[column.key]
        for element in np.flatnonzero(~np.isfinite(rows).all(0)):
            frame = int(np.flatnonzero(~np.isfinite(rows[:, element]))[0])
            yield frame, f"{column.element(int(element))} is not finite"
        if column.key == "action" and limits is not None:
            room = 1e-5 * np.maximum(np.abs(limits[0]), np.abs(limits[1])) + 1e-6
            outside = (rows < limits[0] - room) | (rows > limits[1] + room)
            for element in np.flatnonzero(outside.any(0)):
                frame = int(np.flatnonzero(outside[:, element])[0])
                value = rows[frame, element]
                yield frame, f"{column.element(int(element))} {value:g} outside limits"


def _check_time(source: Source, rows: pa.Table, gap: float) -> Found:
    frames = rows["frame_index"].to_numpy()
    missing = np.flatnonzero(np.diff(frames) != 1)
    if len(missing) or frames[0] != 0:
        yield int(missing[0]) + 1 if len(missing) else 0, "steps are missing"
    clocks = [n for n in rows.column_names if n == "timestamp" or n == "stamp.measured"]
    for name in clocks:
        between = np.diff(rows[name].to_numpy().astype(np.float64)) * source.info["fps"]
        for frame in np.flatnonzero((between > gap) | (between <= 0))[:1]:
            seconds = between[frame] / source.info["fps"]
            yield int(frame) + 1, f"{name}: {seconds:.3f} s after the step before"


def _check_turns(columns: Any, values: dict[str, np.ndarray]) -> Found:
    """Numbers that jump where the rotation they stand for does not."""
    for column in (c for c in columns if c.key in values and c.key.startswith(("obs/", "action"))):
        rows = values[column.key]
        for first in range(rows.shape[1] - 3):
            part = rows[:, first : first + 4]
            if np.abs(np.linalg.norm(part, axis=1) - 1).max() < 1e-3:
                for frame in np.flatnonzero((part[1:] * part[:-1]).sum(1) < 0)[:1]:
                    name = column.element(first)
                    what = f"{name} and the next 3: the quaternion changes its sign"
                    yield int(frame) + 1, what
        for turn, unit in ((360.0, "degrees"), (2 * np.pi, "rad")):
            low, high = rows.min(0), rows.max(0)
            room = 1e-3 * turn
            angle = (high - low <= turn + room) & ((high <= turn / 2 + room) | (low >= -room))
            jumps = np.abs(np.diff(rows, axis=0)) > 0.9 * turn
            for element in np.flatnonzero(angle & jumps.any(0)):
                frame = int(np.flatnonzero(jumps[:, element])[0]) + 1
                what = f"{column.element(int(element))} jumps by a turn ({turn:.4g} {unit})"
                yield frame, what


def _check_joints(
    source: Source, columns: Any, values: dict[str, np.ndarray], still: float
) -> Found:
    """A joint whose position and command have the same place in `observation.state` and `action`:
    commanded through more than a tenth of its range while its position does not change."""
    state = next((c for c in columns if c.key == "obs/state"), None)
    act = next(c for c in columns if c.key == "action")
    if state is None or state.names != act.names or not act.names:
        return
    position, command = values["obs/state"], values["action"]
    width = max(2, round(still * source.info["fps"]))
    if len(position) < width:
        return
    span = np.ptp(command, 0)
    for element in range(position.shape[1]):
        held = _spread(position[:, element], width) <= 1e-6 * max(1.0, span[element])
        asked = _spread(command[:, element], width) > 0.1 * max(span[element], 1e-6)
        for frame in np.flatnonzero(held & asked)[:1]:
            yield int(frame), f"{state.element(element)} is stuck"


def _spread(values: np.ndarray, width: int) -> np.ndarray:
    """Maximum less minimum of each window of `width` values."""
    return np.ptp(np.lib.stride_tricks.sliding_window_view(values, width), 1)


SAME_MEAN, SAME_MOST = 0.3, 12  # of 255: what encoding makes of two equal pictures


def check_pictures(
    source: Source,
    episode: int,
    camera: Column,
    rows: pa.Table,
    moves: np.ndarray,
    limits: CheckConfig,
) -> Found:
    """One finding of each kind at most. `moves` [T]: the robot moves."""
    length, fps = len(moves), float(source.info["fps"])
    dark = frozen = None
    before: np.ndarray | None = None
    same = 0  # steps since the picture changed
    moved = False  # whether the robot moved meanwhile
    try:
        for step, picture in enumerate(source.pictures(camera, episode, rows)):
            try:
                picture = fitted(picture, camera)
            except ValueError as error:
                yield step, str(error)
                return
            coded = camera.depth is None  # distances are never dark, and kept without loss
            if coded and dark is None and picture[::4, ::4].mean() < limits.dark:
                dark = step
            alike = before is not None and np.array_equal(before, picture)
            if before is not None and coded:
                change = np.abs(before[::2, ::2].astype(np.int16) - picture[::2, ::2])
                alike = bool(change.max() <= SAME_MOST and change.mean() <= SAME_MEAN)
            same, moved = (same + 1, moved or bool(moves[step])) if alike else (0, False)
            if frozen is None and moved and same >= limits.still * fps:
                frozen = step - same
            before = picture
    except (DatasetError, *DAMAGE, RuntimeError) as error:
        words = str(error)
        damage = words.partition(" is damaged (")[2].partition(");")[0]
        yield None, f"{camera.name}: {damage or words}"
    if dark is not None:
        yield dark, f"{camera.name} is dark"
    if frozen is not None and length:
        yield frozen, f"{camera.name} is frozen while the robot moves"
