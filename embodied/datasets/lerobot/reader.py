"""Episodes: demonstrations and recordings on disk, in the LeRobotDataset v3 layout."""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.files import MALFORMED, reading
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot import schema
from embodied.datasets.lerobot.pictures import (
    Encoded,
    EpisodeFiles,
    Filmed,
    FrameCache,
    LazyPictures,
    Pictures,
)
from embodied.datasets.lerobot.schema import DAMAGE, DATA, Column, DatasetError, Pending, damaged
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.datasets.parquet import read_parquet

MEMORY_MB = 1500.0  # of decoded pictures

__all__ = ["DatasetError", "EpisodeWriter", "Episodes", "read_episodes", "salvage"]


@dataclass(frozen=True)
class Episodes:
    """E episodes, their steps one after the other.

    `steps` [N, ...]: `obs/*` (what was acted on), `action`, `reward`, `terminated`, `truncated` and
    whatever else was recorded (`success`, `task`, ...). Episode e is the rows from `start[e]`,
    `length[e]` of them; `final` [E, ...] holds the observation after its last action (`<name>`, no
    prefix). `texts` says in words what the task of an episode was at first, `step_texts` that of
    every step (empty: no episode has two), `info` what the recorder noted.
    """

    spec: Spec
    steps: Tensors
    start: Tensor
    length: Tensor
    final: Tensors
    texts: tuple[str, ...] = ()
    info: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    step_texts: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.length)

    def words(self) -> tuple[str, ...]:
        """The task of every step, N sentences; empty where there are no words at all."""
        each = zip(self.texts, self.length.tolist(), strict=False)
        return self.step_texts or tuple(text for text, count in each for _ in range(count))

    def text(self, number: int) -> str | tuple[str, ...] | None:
        """The task of an episode as `EpisodeWriter.add` takes it: one sentence, or one a step."""
        if not self.step_texts:
            return self.texts[number] if self.texts else None
        begin = int(self.start[number])
        words = self.step_texts[begin : begin + int(self.length[number])]
        return words[0] if len(set(words)) == 1 else words

    def episode(self, number: int) -> Tensors:
        """One episode as `EpisodeWriter.add` takes it."""
        begin = int(self.start[number])
        rows = tt.each(self.steps, lambda v: v[begin : begin + int(self.length[number])])
        return rows | {f"next_obs/{name}": value[number] for name, value in self.final.items()}


def read_episodes(
    path: Path | str, limit: int | None = None, memory_mb: float = MEMORY_MB
) -> Episodes:
    """The first `limit` episodes of a dataset (None: all), those of a killed writer included.

    Pictures are decoded at once if they take at most `memory_mb` (10^6 bytes); otherwise they are
    `LazyPictures`: decoded when they are used, the newest `memory_mb` of them remembered.

    Reads what LeRobot recorded, too: reward 0 and no success where it has none, an end that is not
    marked as done is a truncation, and the last observation stands in for the final one, which
    LeRobot does not keep. DatasetError names the file that is missing or damaged.
    """
    path = Path(path)
    with reading(path, pa.ArrowException, *MALFORMED):
        # In this order nothing is missed while a writer moves episodes from pending to listed.
        info, waiting = schema.read_info(path), schema.list_pending(path, 0)
        index = schema.read_index(path)
        listed = 0 if index is None else index.num_rows
        waiting = [one for one in waiting if one.number >= listed]
        if info["total_episodes"] > listed:
            line = f"{listed} episodes are listed, meta/info.json promises {info['total_episodes']}"
            raise damaged(path / "meta" / "episodes", line)
        if index is not None and info["total_episodes"] == listed:
            frames = int(np.sum(index["length"].to_numpy()))
            if frames != info["total_frames"]:
                line = f"it promises {info['total_frames']} steps, meta/episodes lists {frames}"
                raise damaged(path / "meta" / "info.json", line)
        wanted = range(listed if limit is None else min(limit, listed))
        waiting = waiting if limit is None else waiting[: max(0, limit - listed)]
        if not len(wanted) and not waiting:
            raise DatasetError(f"{path} holds no finished episode yet")
        index = None if index is None else index.slice(0, len(wanted))
        return _assemble(path, info, index, waiting, memory_mb)


def salvage(path: Path | str, out: Path | str) -> int:
    """Copy every episode of `path` that can still be read to a new dataset; returns how many."""
    path = Path(path)
    info, index = schema.read_info(path), schema.read_index(path, whole=False)
    spec = schema.spec_of_info(info)
    numbers = [] if index is None else index["episode_index"].to_pylist()
    with EpisodeWriter.like(path, out, spec) as writer:
        parts: list[tuple[pa.Table | None, list[Pending]]] = []
        if index is not None:
            parts += [(index.slice(place, 1), []) for place in range(len(numbers))]
        parts += [(None, [one]) for one in schema.list_pending(path, max(numbers, default=-1) + 1)]
        for listed, waiting in parts:
            try:
                episodes = _assemble(path, info, listed, waiting)
            except DatasetError:
                continue  # that it is damaged is why we are here
            writer.add(episodes.episode(0), episodes.text(0), episodes.info[0])
        return len(writer)


def _assemble(
    path: Path,
    info: Mapping[str, Any],
    index: pa.Table | None,
    waiting: Sequence[Pending],
    memory_mb: float = MEMORY_MB,
) -> Episodes:
    """Read the episodes listed in `index`, then those in `waiting`."""
    columns = schema.columns_of_info(info)
    lines = [] if index is None or not index.num_rows else [index]
    tables = [] if not lines else _read_data(path, lines[0])
    for one in waiting:
        steps, line = one.read()
        tables.append(steps)
        lines.append(line)
    line = pa.concat_tables(lines, promote_options="default")
    length = torch.from_numpy(np.array(line["length"].to_numpy()))
    start = length.cumsum(0) - length
    names = [column.name for column in columns if column.stored != "video"]
    memory = _Memory(columns, int(length.sum()) + len(length), memory_mb)
    clock = _clock(tables, length, info["fps"])
    files = [one.file for one in waiting]
    files = (_files(path, index, "data", DATA) if index is not None else []) + files
    episodes = EpisodeFiles(path, files, length.numpy())
    try:
        table = pa.concat_tables([table.select(names) for table in tables])
        steps = {c.key: c.to_tensor(table[c.name]) for c in columns if not c.stored}
    except DAMAGE as error:
        raise damaged(path / "data", error) from error
    _require_finite(columns, steps, episodes)
    for column in columns:
        if column.stored == "video":
            films = _filmed(path, column, info["fps"], index, episodes, clock, waiting)
            steps[column.key] = memory.read(Filmed(column, memory.cache, *films))
        elif column.stored:
            pictures = Encoded(column, memory.cache, table[column.name], episodes)
            steps[column.key] = memory.read(pictures)
    spec = schema.spec_of_info(info)
    if schema.is_class(info, steps["action"]):
        steps["action"] = steps["action"].reshape(-1).long()
        spec = spec.with_act(Leaf((), "int64", 0, int(steps["action"].max())))
    final = {
        name: _final(line, steps, start + length - 1, by_key, memory, path)
        for name, by_key in ((c.key[4:], c) for c in columns if c.key.startswith("obs/"))
    }
    # Flags and rewards as our own rows have them.
    rows, last = len(steps["action"]), start + length - 1
    done = steps.pop("done", torch.zeros(rows, dtype=torch.bool))
    truncated = steps.pop("truncated", torch.zeros(rows, dtype=torch.bool))
    truncated[last] |= ~done[last]
    steps["terminated"] = done & ~truncated
    steps["truncated"] = truncated
    steps.setdefault("reward", torch.zeros(rows))
    texts, step_texts = _texts(path, line, tables, start, len(waiting))
    notes = line["info"].to_pylist() if schema.OURS in info else [None] * len(length)
    parsed = tuple(json.loads(note) if note else {} for note in notes)
    return Episodes(spec, steps, start, length, final, texts, parsed, step_texts)


class _Memory:
    """Decodes pictures at once where all `rows` of them take at most `memory_mb`, else lazily."""

    def __init__(self, columns: Sequence[Column], rows: int, memory_mb: float) -> None:
        self.limit = int(memory_mb * 1e6)
        self.lazy = sum(column.nbytes for column in columns if column.stored) * rows > self.limit
        self.cache = FrameCache(self.limit if self.lazy else 0)

    def read(self, pictures: Pictures) -> Tensor:
        lazy = LazyPictures.of(pictures, self.limit)
        return lazy if self.lazy else lazy.load()


def _read_data(path: Path, index: pa.Table) -> list[pa.Table]:
    """The steps of the listed episodes, in order, checked against the index."""
    number = index["episode_index"].to_numpy()
    length = index["length"].to_numpy()
    chunk, file = (index[f"data/{kind}_index"].to_numpy() for kind in schema.KINDS)
    tables = []
    for place in dict.fromkeys(zip(chunk.tolist(), file.tolist(), strict=True)):
        here = (chunk == place[0]) & (file == place[1])
        name = schema.file_in(path, DATA, *place)
        try:
            low, high = int(number[here].min()), int(number[here].max())
            table = read_parquet(name, episodes=(low, high)).replace_schema_metadata(None)
            table = table.filter(pa.array(np.isin(table["episode_index"].to_numpy(), number[here])))
        except DAMAGE as error:
            raise damaged(name, error) from error
        counts = np.bincount(table["episode_index"].to_numpy() - low, minlength=high - low + 1)
        if (counts[number[here] - low] != length[here]).any():
            raise damaged(name, "it holds fewer or more steps than meta/episodes lists")
        tables.append(table)
    owner = np.concatenate([table["episode_index"].to_numpy() for table in tables])
    if (np.diff(owner) < 0).any():  # episodes whose files take turns
        whole = pa.concat_tables(tables, promote_options="default")
        tables = [whole.take(np.argsort(owner, kind="stable"))]
    return tables


def _files(path: Path, index: pa.Table, what: str, template: str, camera: str = "") -> list[Path]:
    """The file that holds each listed episode's `what` ("data", "videos/NAME")."""
    columns = (index[f"{what}/{kind}_index"].to_pylist() for kind in schema.KINDS)
    places = list(zip(*columns, strict=True))
    files = {(a, b): schema.file_in(path, template, a, b, camera) for a, b in set(places)}
    return [files[place] for place in places]


def _filmed(
    path: Path,
    column: Column,
    fps: float,
    index: pa.Table | None,
    episodes: EpisodeFiles,
    clock: np.ndarray,
    waiting: Sequence[Pending],
) -> tuple[EpisodeFiles, np.ndarray, np.ndarray, float]:
    """Where the pictures of a film column are, as `Filmed` takes it: listed films first, then
    those of `waiting`."""
    files: list[Path] = []
    begin: list[float] = []
    if index is not None:
        at = f"videos/{column.name}"
        files = _files(path, index, at, schema.VIDEO, column.name)
        begin = index[f"{at}/from_timestamp"].to_pylist()
    files += [one.film(column) for one in waiting]
    begin += [0.0] * len(waiting)
    return EpisodeFiles(path, files, episodes.length), np.array(begin), clock, fps


def _require_finite(columns: Sequence[Column], steps: Tensors, episodes: EpisodeFiles) -> None:
    """DatasetError names the first observation, action or reward that is no finite number."""
    for column in columns:
        values = steps.get(column.key)
        learnt = column.key.startswith("obs/") or column.key in ("action", "reward")
        if values is None or not learnt or not values.is_floating_point():
            continue
        wrong = (~values.isfinite()).reshape(len(values), -1)
        if wrong.any():
            row, element = wrong.nonzero()[0].tolist()
            raise DatasetError(
                f"{episodes.where(row)}: {column.element(element)} is not finite; embodied demos "
                f"check {episodes.folder} fix=NEW_FOLDER copies the episodes without such numbers"
            )


def _texts(
    path: Path, line: pa.Table, tables: Sequence[pa.Table], start: Tensor, pending: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first sentence of each episode, and those of all steps where an episode has several. The
    last `pending` tables are an episode each, which numbers its own sentences."""
    listed = line["tasks"].to_pylist()
    if all(len(texts or []) <= 1 for texts in listed):
        return tuple((texts or [""])[0] for texts in listed), ()
    words: list[str] = []
    known = schema.read_tasks(path) if len(tables) > pending else {}
    own = [known] * (len(tables) - pending) + [
        dict(enumerate(texts)) for texts in listed[len(listed) - pending :]
    ]
    for table, sentences in zip(tables, own, strict=True):
        words += [sentences.get(number, "") for number in table["task_index"].to_pylist()]
    return tuple(words[begin] for begin in start.tolist()), tuple(words)


def _clock(tables: Sequence[pa.Table], length: Tensor, fps: float) -> np.ndarray:
    """When each row was recorded, in s of its episode: its `timestamp`, else its number."""
    if all("timestamp" in table.column_names for table in tables):
        return np.concatenate([np.asarray(t["timestamp"], np.float64) for t in tables])
    return np.concatenate([np.arange(count) / fps for count in length.tolist()])


def _final(
    line: pa.Table, steps: Tensors, last: Tensor, column: Column, memory: _Memory, path: Path
) -> Tensor:
    name = f"final/{column.key[4:]}"
    if name not in line.column_names:
        return steps[column.key][last]
    if column.stored:
        index = [path / "meta" / "episodes"] * len(last)
        files = EpisodeFiles(path, index, np.ones(len(last), np.int64))
        return memory.read(Encoded(column, memory.cache, line[name], files))
    return column.to_tensor(line[name])
