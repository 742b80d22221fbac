"""Rewrite one column of a dataset: rotations in another representation, actions relative to states.

Everything else stays as it is; the column's statistics and names are new.
"""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from embodied.core.atomic_write import write_durably
from embodied.core.build import nearest
from embodied.core.spec import Leaf, Spec
from embodied.datasets.editing.edit import new_folder, scratch_of
from embodied.datasets.editing.rotations import NAMES, from_matrix, to_matrix
from embodied.datasets.editing.write import Chosen, Copied, Source, open_source, write_dataset
from embodied.datasets.lerobot.schema import OURS, Column, DatasetError, columns_of_info
from embodied.datasets.lerobot.writer import statistics, summarise, write_row_groups

RELATIVE = "relative."  # begins the names of elements that count from the state

Values = dict[str, np.ndarray]
Compute = Callable[[Values], np.ndarray]
"""From the columns of an episode, [T, size] each (the changed one with the final observation, if
the dataset keeps it), to the new values of the changed one."""


@dataclass(frozen=True)
class Rotation:
    """In the feature `column`, the elements from `first` on are a rotation written as `source`
    (a name in `rotations.NAMES`), and become `target`; `first` may be None where there is nothing
    else in it."""

    column: str
    source: str
    target: str
    first: int | None = None

    def __post_init__(self) -> None:
        for kind in (self.source, self.target):
            if kind not in NAMES:
                raise DatasetError(f"{kind} is no way to write rotations{nearest(kind, NAMES)}")


def rotate(path: Path | str, out: Path | str, rotation: Rotation) -> Copied:
    """A copy of the dataset at `path` with another representation of a rotation. DatasetError where
    the column holds no such rotation."""

    def plan(source: Source) -> tuple[Column, Compute]:
        column = _column(source, rotation.column)
        count = len(NAMES[rotation.source])
        first = rotation.first
        if first is None and column.size != count:
            raise DatasetError(
                f"{column.name} has {column.size} elements: first=N, where the {count} of the "
                "rotation begin (from 0)"
            )
        first = first or 0
        end = first + count
        if end > column.size:
            raise DatasetError(f"{column.name} has no elements {first} to {end - 1}")
        old = _names(column)
        # "left.qx" becomes "left.r11"
        shared = {n[: 1 + max(n.rfind(mark) for mark in "./_")] for n in old[first:end]}
        prefix = shared.pop() if len(shared) == 1 else ""
        new = tuple(f"{prefix}{name}" for name in NAMES[rotation.target])

        def compute(values: Values) -> np.ndarray:
            here = values[column.name]
            turn = to_matrix(here[:, first:end], rotation.source)
            made = from_matrix(turn, rotation.target)
            return np.concatenate([here[:, :first], made, here[:, end:]], 1)

        return _changed(column, (*old[:first], *new, *old[end:])), compute

    return _transformed(path, out, plan)


@dataclass(frozen=True)
class Relation:
    """`state`: the observation feature that actions count from. Elements are joined by their names,
    without names by their place; those in `keep` stay as they are. With `rotation` (a name in
    `rotations.NAMES`) the elements from `pose` on are a place and a rotation, and become the pose
    in the frame of the state's pose; all others are differences."""

    state: str = "observation.state"
    keep: tuple[str, ...] = ()
    pose: int = 0
    rotation: str | None = None

    def __post_init__(self) -> None:
        if self.rotation is not None and self.rotation not in NAMES:
            hint = nearest(self.rotation, NAMES)
            raise DatasetError(f"{self.rotation} is no way to write rotations{hint}")


def relative(path: Path | str, out: Path | str, relation: Relation) -> Copied:
    """A copy of the dataset at `path` whose actions count from the state of their step."""
    return _related(path, out, relation, back=False)


def absolute(path: Path | str, out: Path | str, relation: Relation) -> Copied:
    """The inverse of `relative`."""
    return _related(path, out, relation, back=True)


def _related(path: Path | str, out: Path | str, relation: Relation, back: bool) -> Copied:
    def plan(source: Source) -> tuple[Column, Compute]:
        action, state = _column(source, "action"), _column(source, relation.state)
        names = _names(action)
        plain = [name.removeprefix(RELATIVE) for name in names]
        marked = [name.startswith(RELATIVE) for name in names]
        if any(marked) != back:
            raise DatasetError(
                f"{source.path}: the actions are {'absolute' if back else 'relative'} already"
            )
        for name in relation.keep:
            if name not in plain:
                raise DatasetError(f"the action has no element {name}{nearest(name, plain)}")
        change = marked if back else [name not in relation.keep for name in plain]
        joined = _joined(plain, action, state, change, relation)
        compute = _differences(action.name, state.name, change, joined, relation, back)
        new = [p if back or not c else RELATIVE + p for p, c in zip(plain, change, strict=True)]
        return _changed(action, new), compute

    return _transformed(path, out, plan)


def _joined(
    names: Sequence[str], action: Column, state: Column, change: Sequence[bool], how: Relation
) -> list[int]:
    """The element of the state that each changed element of the action counts from."""
    if how.rotation is not None:
        span = range(how.pose, how.pose + 3 + len(NAMES[how.rotation]))
        if span.stop > action.size or not all(change[i] for i in span):
            raise DatasetError(
                f"the action has no pose in elements {span.start} to {span.stop - 1}"
            )
    theirs = list(state.names)
    if not theirs or list(names) == _names(replace(action, names=())):
        if action.size != state.size:
            raise DatasetError(
                f"action has {action.size} elements and {state.name} {state.size}, and they have "
                "no names to join them by"
            )
        return list(range(action.size))
    missing = [n for n, c in zip(names, change, strict=True) if c and n not in theirs]
    if missing:
        raise DatasetError(
            f"{state.name} has no {missing[0]}, which the action counts from: keep={missing[0]}, "
            "or state=FEATURE"
        )
    return [theirs.index(n) if c else 0 for n, c in zip(names, change, strict=True)]


def _differences(
    action: str, state: str, change: Sequence[bool], joined: list[int], how: Relation, back: bool
) -> Compute:
    place = slice(how.pose, how.pose + 3)
    turn = slice(place.stop, place.stop + len(NAMES[how.rotation])) if how.rotation else None
    sign = 1.0 if back else -1.0

    def compute(values: Values) -> np.ndarray:
        acted = values[action]
        base = values[state][:, joined]
        made = np.where(change, acted + sign * base, acted)
        if how.rotation is not None and turn is not None:
            facing = to_matrix(base[:, turn], how.rotation)
            wanted = to_matrix(acted[:, turn], how.rotation)
            if back:
                moved = base[:, place] + np.einsum("tij,tj->ti", facing, acted[:, place])
                turned = facing @ wanted
            else:
                moved = np.einsum("tji,tj->ti", facing, acted[:, place] - base[:, place])
                turned = facing.swapaxes(1, 2) @ wanted
            made[:, place], made[:, turn] = moved, from_matrix(turned, how.rotation)
        return made

    return compute


def _column(source: Source, name: str) -> Column:
    """The column of numbers `name`. DatasetError where it is none, or has no physical units."""
    found = {column.name: column for column in columns_of_info(source.info)}
    if name not in found or found[name].stored or len(found[name].shape) > 1:
        vectors = [n for n, c in found.items() if len(c.shape) == 1]
        raise DatasetError(f"{source.path} has no vector {name}{nearest(name, vectors)}")
    ours = source.info.get(OURS)
    if name == "action" and ours and Spec.from_json(ours["spec"]).act.is_unit:
        raise DatasetError(
            f"{source.path}: actions are in [-1, 1], not in physical units; only recordings in "
            "physical units (LeRobot, zarr, RLDS) can be changed so"
        )
    return found[name]


def _names(column: Column) -> list[str]:
    short = column.name.rpartition(".")[2]
    return list(column.names) or [f"{short}_{i}" for i in range(column.size)]


def _changed(column: Column, names: Sequence[str]) -> Column:
    return replace(column, shape=(len(names),), dtype="float32", names=tuple(names))


def _transformed(
    path: Path | str, out: Path | str, plan: Callable[[Source], tuple[Column, Compute]]
) -> Copied:
    """A copy of the dataset with the column that `plan` names and computes."""
    with new_folder(out) as partial:
        with scratch_of(partial) as scratch:
            source = open_source(path, scratch)
            column, compute = plan(source)
            made = write_dataset(partial, [Chosen(source, list(range(len(source))))])
        _rewrite(Source(Path(path), partial), column, compute)
        return made


def _rewrite(source: Source, new: Column, compute: Compute) -> None:
    """Change the column in the dataset in `source.folder`."""
    old = {column.name: column for column in columns_of_info(source.info) if not column.stored}
    finals: list[np.ndarray] = []
    stats: list[dict[str, np.ndarray]] = []
    final = f"final/{new.key.removeprefix('obs/')}"
    keeps_final = final in source.index.column_names and new.key.startswith("obs/")
    for file, episodes in _by_file(source):
        table, tables = source.table(file), list[pa.Table]()
        for episode in episodes:
            rows = source.rows(episode, table)
            values = {name: _numbers(column, rows[name]) for name, column in old.items()}
            if keeps_final:
                last = _numbers(old[new.name], source.index[final].slice(episode, 1))
                values[new.name] = np.concatenate([values[new.name], last])
            try:
                made = compute(values).astype(np.float32)
            except ValueError as error:
                raise DatasetError(
                    f"{source.path}: {new.name} of episode {episode}: {error}"
                ) from error
            if keeps_final:
                finals.append(made[-1:])
                made = made[:-1]
            tensor = torch.from_numpy(made)
            stats.append(statistics(new, tensor))
            at = rows.column_names.index(new.name)
            tables.append(rows.set_column(at, new.name, new.to_arrow(tensor)))
        write_row_groups(file, [t.replace_schema_metadata(None) for t in tables])
    index = source.index
    for kind in stats[0]:
        if (name := f"stats/{new.name}/{kind}") in index.column_names:
            at = index.column_names.index(name)
            index = index.set_column(at, name, pa.array([each[kind].tolist() for each in stats]))
    if keeps_final:
        column = new.to_arrow(torch.from_numpy(np.concatenate(finals)))
        index = index.set_column(index.column_names.index(final), final, column)
    (file,) = (source.folder / "meta" / "episodes").rglob("*.parquet")
    write_durably(file, lambda sink: pq.write_table(index, sink))
    summarise(source.folder, _new_info(source.info, new), index)


def _by_file(source: Source) -> Iterator[tuple[Path, list[int]]]:
    """The data files, and the episodes in each."""
    files: dict[Path, list[int]] = {}
    for episode in range(len(source)):
        files.setdefault(source.data_file(episode), []).append(episode)
    yield from files.items()


def _numbers(column: Column, values: Any) -> np.ndarray:
    """[T, size] in double precision."""
    numbers = column.to_tensor(values).double()
    return numbers.reshape(len(numbers), -1).numpy()


def _new_info(info: dict[str, Any], new: Column) -> dict[str, Any]:
    info["features"][new.name] = {**info["features"][new.name], **new.feature}
    if OURS in info:
        ours = info[OURS]
        ours["columns"] = [new.to_json() if c["name"] == new.name else c for c in ours["columns"]]
        spec, leaf = Spec.from_json(ours["spec"]), Leaf(new.shape, names=new.names)
        if new.key == "action":
            spec = replace(spec, act=leaf, native=None)
        elif new.key.startswith("obs/"):
            spec = replace(spec, obs={**spec.obs, new.key[4:]: leaf}, native=None)
        ours["spec"] = spec.to_json()
    return info
