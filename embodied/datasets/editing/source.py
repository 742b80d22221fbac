"""Source: a LeRobot v3 dataset as its files have it, for copying episodes without changing them."""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embodied.datasets.lerobot.consolidate import consolidate
from embodied.datasets.lerobot.schema import (
    DAMAGE,
    DATA,
    VIDEO,
    DatasetError,
    damaged,
    list_pending,
    read_index,
    read_info,
)

KINDS = ("chunk", "file")


@dataclass
class Source:
    """`path`: the folder that was named; `folder`: where it is read, with no pending episodes."""

    path: Path
    folder: Path

    @cached_property
    def info(self) -> dict[str, Any]:
        return read_info(self.folder)

    @cached_property
    def index(self) -> pa.Table:
        """One line an episode, in order; DatasetError where there is none."""
        index = read_index(self.folder)
        if index is None or not index.num_rows:
            raise DatasetError(f"{self.path} holds no finished episode")
        return index

    @property
    def cameras(self) -> list[str]:
        """The features that are kept as films."""
        return [n for n, feature in self.info["features"].items() if feature["dtype"] == "video"]

    def __len__(self) -> int:
        return self.index.num_rows

    def column(self, name: str) -> np.ndarray:
        """A column of the index, [E]; DatasetError where it is missing."""
        if name not in self.index.column_names:
            raise damaged(self.folder / "meta" / "episodes", f"it has no column {name}")
        return self.index[name].to_numpy()

    def place(self, what: str, episode: int) -> dict[str, int]:
        """The chunk and file of `what` ("data", "videos/NAME") that hold an episode."""
        return {f"{k}_index": int(self.column(f"{what}/{k}_index")[episode]) for k in KINDS}

    def data_file(self, episode: int) -> Path:
        return self.folder / DATA.format(**self.place("data", episode))

    def film(self, camera: str, episode: int) -> Path:
        place = self.place(f"videos/{camera}", episode)
        return self.folder / VIDEO.format(video_key=camera, **place)

    def span(self, camera: str, episode: int) -> tuple[float, float]:
        """Where in its film an episode begins and ends (s)."""
        at = f"videos/{camera}"
        begin = float(self.column(f"{at}/from_timestamp")[episode])
        return begin, begin + int(self.column("length")[episode]) / self.info["fps"]

    def texts(self) -> list[list[str]]:
        """The tasks of every episode in words."""
        return [list(texts or [""]) for texts in self.index["tasks"].to_pylist()]

    def number_to_text(self) -> dict[int, str]:
        """meta/tasks.parquet: the sentence of every task_index."""
        file = self.folder / "meta" / "tasks.parquet"
        try:
            table = pq.read_table(file)
            names = [n for n in table.column_names if n != "task_index"]
            words = table[names[0]].to_pylist()
            return dict(zip(table["task_index"].to_pylist(), words, strict=True))
        except (*DAMAGE, IndexError) as error:
            raise damaged(file, error) from error

    def table(self, file: Path) -> pa.Table:
        """All rows of a data file, all its columns."""
        try:
            return pq.ParquetFile(file).read()
        except DAMAGE as error:
            raise damaged(file, error) from error

    def rows(self, episode: int, table: pa.Table | None = None) -> pa.Table:
        """The steps of one episode, in order (`table`: its data file, if that is read already)."""
        file = self.data_file(episode)
        every = self.table(file) if table is None else table
        number = int(self.column("episode_index")[episode])
        same = pc.equal(every["episode_index"], number)  # pyright: ignore
        rows = every.filter(same)
        length = int(self.column("length")[episode])
        if rows.num_rows != length:
            reason = f"it has {rows.num_rows} steps of episode {number}, not {length}"
            raise damaged(file, reason)
        return rows


def open_source(path: Path | str, scratch: Path) -> Source:
    """The dataset at `path`. One with pending episodes of a killed recording is copied to
    `scratch` and finished there: what is at `path` is not touched."""
    path = Path(path)
    info = read_info(path)
    index = read_index(path)
    if not list_pending(path, 0 if index is None else index.num_rows):
        return Source(path, path)
    copy = scratch / f"finished-{len(list(scratch.glob('finished-*')))}"
    shutil.copytree(path, copy)
    consolidate(copy)
    assert info["fps"] == read_info(copy)["fps"]
    return Source(path, copy)


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """What keeps two datasets (their info.json) from being one, in words."""
    found = [f"fps {here['fps']} | {there['fps']}"] if here["fps"] != there["fps"] else []
    ours, theirs = here["features"], there["features"]
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            found.append(f"{name} is in one of them only")
            continue
        for what in ("dtype", "shape", "names"):
            one, other = ours[name].get(what), theirs[name].get(what)
            if one != other:
                found.append(f"{name} {what} {one} | {other}")
    return found
