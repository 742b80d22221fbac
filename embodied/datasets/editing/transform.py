"""Rewrite one column of a dataset: rotations in another representation, actions relative to states,
depth pictures as point clouds.

Everything else stays as it is; the column's statistics and names are new.
"""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, CountOrZero, Number, Positive
from embodied.core.build import nearest
from embodied.core.files import inside
from embodied.core.pinhole import pinhole_matrix
from embodied.core.point_cloud import (
    Array,
    Corner,
    Sampling,
    in_box,
    thinned,
    unproject,
)
from embodied.core.spec import POINTS, Leaf, Spec
from embodied.datasets.editing.edit import new_folder, scratch_of
from embodied.datasets.editing.rotations import NAMES, from_matrix, to_matrix
from embodied.datasets.editing.write import Chosen, Copied, Source, open_source, write_dataset
from embodied.datasets.lerobot import schema
from embodied.datasets.lerobot.pictures import bytes_of, fitted
from embodied.datasets.lerobot.schema import OURS, Column, DatasetError, columns_of_info, leaf_of
from embodied.datasets.lerobot.video import decode_numbers
from embodied.datasets.lerobot.writer import statistics, summarise, write_row_groups

RELATIVE = "relative."  # begins the names of elements that count from the state
PIXELS = 1_000_000  # of depth pictures that become clouds at once

Values = dict[str, np.ndarray]
# From the columns of an episode, [T, size] each, to the new values of the changed one. Where that
# is an observation, all observations have the final one, if the dataset keeps it. The pictures [H,
# W, C] are those of the changed column, if it holds pictures.
Compute = Callable[[Values, Iterator[np.ndarray]], np.ndarray]


Plan = tuple[Column, Column, Compute]  # the second takes the place of the first


def require_kind(kind: str) -> None:
    """DatasetError unless `kind` is a way to write rotations."""
    if kind not in NAMES:
        raise DatasetError(f"{kind} is no way to write rotations{nearest(kind, NAMES)}")


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
        require_kind(self.source)
        require_kind(self.target)


def rotate(path: Path | str, out: Path | str, rotation: Rotation) -> Copied:
    """A copy of the dataset at `path` with another representation of a rotation. DatasetError where
    the column holds no such rotation."""

    def plan(source: Source) -> Plan:
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

        def compute(values: Values, _: Iterator[np.ndarray]) -> np.ndarray:
            here = values[column.name]
            turn = to_matrix(here[:, first:end], rotation.source)
            made = from_matrix(turn, rotation.target)
            return np.concatenate([here[:, :first], made, here[:, end:]], 1)

        return column, _changed(column, (*old[:first], *new, *old[end:])), compute

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
        if self.rotation is not None:
            require_kind(self.rotation)


def relative(path: Path | str, out: Path | str, relation: Relation, back: bool = False) -> Copied:
    """A copy of the dataset at `path` whose actions count from the state of their step; `back`:
    from such a dataset one whose actions are absolute."""

    def plan(source: Source) -> Plan:
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
        place = slice(relation.pose, relation.pose + 3)
        turn = (
            slice(place.stop, place.stop + len(NAMES[relation.rotation]))
            if relation.rotation
            else None
        )
        sign = 1.0 if back else -1.0

        def compute(values: Values, _: Iterator[np.ndarray]) -> np.ndarray:
            acted = values[action.name]
            base = values[state.name][:, joined]
            made = np.where(change, acted + sign * base, acted)
            if relation.rotation is not None and turn is not None:
                facing = to_matrix(base[:, turn], relation.rotation)
                wanted = to_matrix(acted[:, turn], relation.rotation)
                if back:
                    moved = base[:, place] + np.einsum("tij,tj->ti", facing, acted[:, place])
                    turned = facing @ wanted
                else:
                    moved = np.einsum("tji,tj->ti", facing, acted[:, place] - base[:, place])
                    turned = facing.swapaxes(1, 2) @ wanted
                made[:, place], made[:, turn] = moved, from_matrix(turned, relation.rotation)
            return made

        new = [p if back or not c else RELATIVE + p for p, c in zip(plain, change, strict=True)]
        return action, _changed(action, new), compute

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


@dataclass(frozen=True)
class Projection(Sampling):
    """How depth pictures become clouds: what the camera sees, where it is, which points are kept.

    `fx`, `fy`, `cx`, `cy` are those of a calibration (OpenCV, ROS, librealsense) for pictures of
    the dataset's own size. `pose` is the camera (x right, y down, z ahead): x, y, z in m, then a
    rotation as `rotation` says; without it clouds are in the camera's frame. With `frame` it counts
    from a frame that moves (the tool, for a camera in the hand): from element `first` on, this
    feature is the pose of that frame in the base, written the same way.
    """

    low: Corner = (-10.0, -10.0, -10.0)  # corner of the box of points, m
    high: Corner = (10.0, 10.0, 10.0)  # opposite corner, m
    near: Positive = 0.05  # m; what is nearer does not count
    far: Positive = 5.0  # m; what is farther does not count
    fewest: Count = 16  # points in the box that a picture must have
    fx: Positive | None = None  # focal length from left to right, pixels
    fy: Positive | None = None  # focal length from top to bottom, pixels
    cx: Number | None = None  # column of the optical axis (0: the middle of the first pixel)
    cy: Number | None = None  # row of the optical axis
    fov: Annotated[float, Bound(above=0.0, below=180.0)] | None = None  # degrees from top to bottom
    pose: tuple[Number, ...] = ()  # the camera in the base, or in `frame` (empty: the camera's own)
    rotation: str = "quaternion"  # how rotations of poses are written (quaternion, vector, ...)
    frame: str | None = None  # feature with the pose of the frame that the camera is fixed to
    first: CountOrZero = 0  # element of it with which the pose begins

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kind(self.rotation)
        given = [number is not None for number in (self.fx, self.fy, self.cx, self.cy)]
        if any(given) == (self.fov is not None) or any(given) != all(given):
            raise DatasetError(
                "say what the camera sees: fx=, fy=, cx= and cy= (pixels), or fov= (degrees from "
                "top to bottom)"
            )
        if self.pose and len(self.pose) != self.pose_size:
            raise DatasetError(f"pose= has {len(self.pose)} numbers, not {self.pose_size}")
        try:
            self._camera()
        except ValueError as error:
            raise DatasetError(f"pose={list(self.pose)}: {error}") from error

    @property
    def pose_size(self) -> int:
        return 3 + len(NAMES[self.rotation])

    def matrix(self, height: int, width: int) -> Array:
        """K [3, 3] for pictures of that size; DatasetError where it is for another size."""
        if self.fov is not None:
            return pinhole_matrix(self.fov, width, height)
        assert self.fx and self.fy and self.cx is not None and self.cy is not None
        if not (0 <= self.cx < width and 0 <= self.cy < height):
            raise DatasetError(
                f"cx={self.cx:g} cy={self.cy:g} is not in a picture of {width} x {height}: "
                "intrinsics are for the size of the recorded pictures"
            )
        # Calibrations count from the middle of the first pixel, matrices here from its corner.
        return np.array([[self.fx, 0, self.cx + 0.5], [0, self.fy, self.cy + 0.5], [0, 0, 1.0]])

    def clouds(self, depth: Iterable[np.ndarray], frames: np.ndarray | None = None) -> np.ndarray:
        """Clouds [T, points, 3] of T depth pictures [H, W] (m along the viewing axis; 0: nothing
        was measured), float32. `frames` [T, `pose_size`]: the poses of `frame`. ValueError names
        the first picture with too few points."""
        camera = self._camera()
        pictures = iter(depth)
        made = list[np.ndarray]()
        begin = 0
        for first in pictures:
            metres = np.stack([first, *islice(pictures, PIXELS // first.size)])
            end = begin + len(metres)
            poses = camera
            if frames is not None:
                poses = self._poses(frames[begin:end]) @ camera
            seen = self._unprojected(metres, poses)
            number = in_box(seen, self).sum(1)
            for step in (number < self.fewest).nonzero()[:1, 0].tolist():
                raise ValueError(
                    f"step {begin + step}: {int(number[step])} points are measured within near, "
                    f"far, low and high; fewest={self.fewest} are needed"
                )
            made.append(thinned(seen, None, self).numpy())
            begin = end
        return np.concatenate(made)

    def _unprojected(self, depth: np.ndarray, poses: np.ndarray) -> Tensor:
        """Points [B, H * W, 3] of pictures [B, H, W] from `poses` [B or 1, 4, 4]; NaN where nothing
        that counts was measured."""
        metres = torch.from_numpy(depth).double()
        counts = (metres >= self.near) & (metres <= self.far)
        matrix = torch.from_numpy(self.matrix(*depth.shape[1:]))
        return unproject(metres.where(counts, torch.nan), matrix[None], torch.from_numpy(poses))

    def _camera(self) -> Array:
        """The camera's pose [1, 4, 4]."""
        return self._poses(np.array([self.pose])) if self.pose else np.eye(4)[None]

    def _poses(self, values: np.ndarray) -> Array:
        """Matrices [T, 4, 4] of poses [T, `pose_size`]."""
        made = np.tile(np.eye(4), (len(values), 1, 1))
        made[:, :3, :3] = to_matrix(values[:, 3:], self.rotation)
        made[:, :3, 3] = values[:, :3]
        return made


def points(
    path: Path | str,
    out: Path | str,
    projection: Projection,
    camera: str | None = None,
    name: str = "points",
) -> Copied:
    """A copy of the dataset at `path` with the observation `name`, clouds [points, 3] (m), in place
    of the depth picture `camera` (None: the only one)."""

    def plan(source: Source) -> Plan:
        old = _depth_column(source, camera)
        new = schema.observation(name, Leaf((projection.points, 3), unit=POINTS), "image")
        if any(column.key == new.key for column in columns_of_info(source.info)):
            raise DatasetError(f"{source.path} has an observation {name} already: to=ANOTHER")
        projection.matrix(old.shape[0], old.shape[1])
        frame = None if projection.frame is None else _column(source, projection.frame)
        span = slice(projection.first, projection.first + projection.pose_size)
        if frame is not None and span.stop > frame.size:
            raise DatasetError(f"{frame.name} has no elements {span.start} to {span.stop - 1}")

        def compute(values: Values, pictures: Iterator[np.ndarray]) -> np.ndarray:
            frames = None if frame is None else values[frame.name][:, span]
            clouds = projection.clouds((_measured(one, old) for one in pictures), frames)
            return clouds.reshape(len(clouds), -1)

        return old, new, compute

    return _transformed(path, out, plan)


def _measured(picture: np.ndarray, column: Column) -> np.ndarray:
    """Distances [H, W]; of a film also 0 where nothing was measured, which has no code of its own:
    it is at an end of the range."""
    metres = picture[..., 0]
    if column.stored != "video" or column.depth is None:
        return metres
    low, high = column.depth.low + 1e-5, column.depth.high - 1e-5
    return np.where((metres > low) & (metres < high), metres, 0)


def _depth_column(source: Source, name: str | None) -> Column:
    found = {c.key.removeprefix("obs/"): c for c in columns_of_info(source.info) if c.depth}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    chosen = next((c for key, c in found.items() if name in (key, c.name)), None)
    if chosen is None:
        asked = f"no depth picture {name}" if name else f"{len(found) or 'no'} depth pictures"
        hint = f": from={' or '.join(found)}" if found else ""
        raise DatasetError(f"{source.path} has {asked}{hint}")
    return chosen


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


def _transformed(path: Path | str, out: Path | str, plan: Callable[[Source], Plan]) -> Copied:
    """A copy of the dataset with the column that `plan` names and computes."""
    with new_folder(out) as partial, scratch_of(partial) as scratch:
        source = open_source(path, scratch)
        planned = plan(source)
        made = write_dataset(partial, [Chosen(source, list(range(len(source))))])
        _rewrite(Source(Path(path), partial), planned)
        return made


def _rewrite(source: Source, plan: Plan) -> None:
    """Change the column in the dataset in `source.folder`."""
    old, new, compute = plan
    keeps_final = new.key.startswith("obs/") and _final(old) in source.index.column_names
    finals: list[np.ndarray] = []
    stats: list[dict[str, np.ndarray]] = []
    for file, episodes in source.by_file(source.data_file).items():
        tables = list[pa.Table]()
        for episode in episodes:
            rows = source.rows(episode)
            try:
                values = _values(source, episode, rows, keeps_final)
                pictures = _pictures(source, old, episode, rows, keeps_final)
                made = compute(values, pictures).astype(np.float32)
            except (ValueError, OSError, EOFError, RuntimeError) as error:
                raise DatasetError(
                    f"{source.path}: {old.name} of episode {episode}: {error}"
                ) from error
            if keeps_final:
                finals.append(made[-1:])
                made = made[:-1]
            tensor = torch.from_numpy(made)
            stats.append(statistics(new, tensor) if new.summarised else {})
            there = old.name in rows.column_names
            at = rows.column_names.index(old.name) if there else rows.num_columns
            put = rows.set_column if there else rows.add_column
            tables.append(put(at, new.name, new.to_arrow(tensor)))
        write_row_groups(file, [t.replace_schema_metadata(None) for t in tables])
    index = _new_index(source.index, plan, stats, finals)
    (file,) = (source.folder / "meta" / "episodes").rglob("*.parquet")
    schema.write_parquet(index, file)
    if old.stored == "video":
        shutil.rmtree(inside(source.folder / "videos", old.name))
    summarise(source.folder, _new_info(source.info, plan), index)


def _final(column: Column) -> str:
    """The column of the index with the final observations."""
    return f"final/{column.key.removeprefix('obs/')}"


def _values(source: Source, episode: int, rows: pa.Table, keeps_final: bool) -> Values:
    """All that is numbers of an episode; with final observations if they are kept."""
    line = source.index.slice(episode, 1)
    values: Values = {}
    for column in (c for c in columns_of_info(source.info) if not c.stored):
        numbers = column.numbers(rows[column.name])
        if keeps_final and column.key.startswith("obs/"):
            numbers = np.concatenate([numbers, column.numbers(line[_final(column)])])
        values[column.name] = numbers
    return values


def _pictures(
    source: Source, column: Column, episode: int, rows: pa.Table, keeps_final: bool
) -> Iterator[np.ndarray]:
    """The pictures of an episode [H, W, C]; none of a column of numbers."""
    if not column.stored:
        return
    for picture in source.pictures(column, episode, rows):
        yield fitted(picture, column)
    if keeps_final:
        cell = source.index[_final(column)][episode].as_py()
        # A file of its own, also where the others are a film.
        yield fitted(decode_numbers(bytes_of(cell, source.folder)), replace(column, stored="image"))


def _new_index(
    index: pa.Table, plan: Plan, stats: Sequence[dict[str, np.ndarray]], finals: list[np.ndarray]
) -> pa.Table:
    """The index with the statistics and final observations of the new column."""
    old, new, _ = plan
    kinds = [kind for kind in stats[0] if f"stats/{old.name}/{kind}" in index.column_names]
    columns = {
        f"stats/{new.name}/{kind}": pa.array([each[kind].tolist() for each in stats])
        for kind in kinds
    }
    if finals:
        columns[_final(new)] = new.to_arrow(torch.from_numpy(np.concatenate(finals)))
    gone = (f"stats/{old.name}/", f"videos/{old.name}/")
    names = [n for n in index.column_names if n.startswith(gone) or n == _final(old)]
    index = index.drop_columns(names)
    for name, column in columns.items():
        index = index.append_column(name, column)
    return index


def _new_info(info: dict[str, Any], plan: Plan) -> dict[str, Any]:
    old, new, _ = plan
    kept = info["features"][old.name] if new.name == old.name else {}
    changed = {old.name: (new.name, {**kept, **new.feature})}
    info["features"] = dict(changed.get(n, (n, f)) for n, f in info["features"].items())
    if not any(feature["dtype"] == "video" for feature in info["features"].values()):
        info["video_path"] = None
    if OURS in info:
        ours = info[OURS]
        ours["columns"] = [new.to_json() if c["name"] == old.name else c for c in ours["columns"]]
        spec, leaf = Spec.from_json(ours["spec"]), leaf_of(new)
        if new.key == "action":
            spec = replace(spec, act=leaf, native=None)
        elif new.key.startswith("obs/"):
            there = {old.key[4:]: (new.key[4:], leaf)}
            obs = dict(there.get(name, (name, each)) for name, each in spec.obs.items())
            spec = replace(spec, obs=obs, native=None)
        ours["spec"] = spec.to_json()
    return info
