"""Where the pictures of a dataset are, and reading any of them: films, encoded images, memory.

`read` decodes the rows that are asked for, each once, on all cores, and remembers the newest in a
`FrameCache` of a bounded size.
"""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from embodied.core.files import inside, read_bytes
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.schema import DAMAGE, Column, DatasetError
from embodied.datasets.lerobot.video import SAY_DEPTH, decode_jobs, decode_numbers, run_jobs

Jobs = list[Callable[[], None]]
Put = Callable[[int, np.ndarray], None]


class FrameCache:
    """The newest decoded pictures, at most `limit` bytes of them; `hits` counts."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.hits = 0
        self.lock = threading.Lock()
        self.kept: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def get(self, key: tuple[int, int]) -> np.ndarray | None:
        with self.lock:
            found = self.kept.get(key)
            if found is not None:
                self.hits += 1
                self.kept.move_to_end(key)
            return found

    def put(self, key: tuple[int, int], picture: np.ndarray) -> None:
        with self.lock:
            if key in self.kept or picture.nbytes > self.limit:
                return
            self.kept[key] = picture
            self.size += picture.nbytes
            while self.size > self.limit:
                self.size -= self.kept.popitem(last=False)[1].nbytes


class Pictures(Protocol):
    """N pictures of one shape [H, W, C], uint8 or distances (float32, m). `parts` says which store
    holds which of `rows`."""

    @property
    def column(self) -> Column: ...

    def __len__(self) -> int: ...

    def parts(self, rows: np.ndarray) -> list[tuple[Stored, np.ndarray, np.ndarray]]:
        """(store, its rows, the places of these in `rows`)."""
        ...


@dataclass(frozen=True)
class EpisodeFiles:
    """The rows of E episodes, one after the other: `length[e]` of them, which `files[e]` holds.
    `folder` is that of the dataset."""

    folder: Path
    files: Sequence[Path]
    length: np.ndarray

    @cached_property
    def start(self) -> np.ndarray:
        return np.cumsum(self.length) - self.length

    def episode(self, rows: Any) -> Any:
        return np.searchsorted(self.start, rows, side="right") - 1

    def where(self, row: int) -> str:
        """File, episode and step of a row, to begin an error with."""
        episode = int(self.episode(row))
        return f"{self.files[episode]}: episode {episode}, step {row - int(self.start[episode])}"


def film_pixels(column: Column) -> str:
    """The pixels that a film of `column` is decoded to."""
    if column.depth is not None:
        return "gray12le"
    return "gray" if column.shape[2] == 1 else "rgb24"


def bytes_of(cell: Any, folder: Path) -> bytes:
    """The file in a cell of a picture column: bytes, text in base64, or {bytes, path} as LeRobot's
    are, where a path without bytes is one below `folder`. OSError, ValueError."""
    if isinstance(cell, Mapping):
        if cell["bytes"] is None and cell["path"]:
            return read_bytes(inside(folder, cell["path"]))
        cell = cell["bytes"]
    if isinstance(cell, str):
        return b64decode(cell, validate=True)
    if cell is None:
        raise ValueError("the cell holds no picture")
    return cell


def fitted(picture: np.ndarray, column: Column) -> np.ndarray:
    """A decoded picture as `column` says: without alpha, distances in m. ValueError where it has
    another shape or type."""
    if picture.shape[2:] == (4,) and column.shape[2] == 3:
        picture = picture[..., :3]
    if picture.shape != column.shape:
        raise ValueError(f"{column.name} is {list(picture.shape)}, not {list(column.shape)}")
    if column.depth is not None:
        coded = column.stored == "video"
        return column.depth.of_film(picture) if coded else column.depth.of_picture(picture)
    if picture.dtype != np.uint8:
        raise ValueError(
            f"{column.name} has numbers of the type {picture.dtype}, and meta/info.json does not "
            f"say what they are: {SAY_DEPTH}"
        )
    return picture


def fitted_in(episodes: EpisodeFiles, row: int, picture: np.ndarray, column: Column) -> np.ndarray:
    """`fitted`; DatasetError names file, episode and step."""
    try:
        return fitted(picture, column)
    except ValueError as error:
        raise DatasetError(f"{episodes.where(row)}: {error}") from error


@dataclass(eq=False)
class Stored:
    """Pictures of `column` that one store can decode."""

    column: Column
    cache: FrameCache

    def parts(self, rows: np.ndarray) -> list[tuple[Stored, np.ndarray, np.ndarray]]:
        return [(self, rows, np.arange(len(rows)))]

    def jobs(self, rows: np.ndarray, put: Put) -> Jobs:
        """Work that calls `put(i, picture of rows[i])` for all ascending `rows`."""
        raise NotImplementedError


@dataclass(eq=False)
class Filmed(Stored):
    """The rows of E `episodes` in films: episode e from `begin[e]` s on, row r at `clock[r]` s of
    its episode, about `fps` a second."""

    episodes: EpisodeFiles
    begin: np.ndarray
    clock: np.ndarray
    fps: float
    film: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        files = self.episodes.files
        number = {file: i for i, file in enumerate(dict.fromkeys(files))}
        self.film = np.array([number[file] for file in files], np.int64)

    def __len__(self) -> int:
        return len(self.clock)

    def jobs(self, rows: np.ndarray, put: Put) -> Jobs:
        def fitted(row: int, place: int, picture: np.ndarray) -> None:
            put(place, fitted_in(self.episodes, row, picture, self.column))

        episode = self.episodes.episode(rows)
        pixels = film_pixels(self.column)
        times = self.begin[episode] + self.clock[rows]
        jobs: Jobs = []
        for film in np.unique(self.film[episode]):
            here = np.flatnonzero(self.film[episode] == film)
            here = here[times[here].argsort(kind="stable")]
            file = self.episodes.files[int(episode[here[0]])]
            jobs += decode_jobs(
                file,
                self.fps,
                times[here],
                lambda i, p, here=here: fitted(int(rows[here[i]]), int(here[i]), p),
                pixels,
            )
        return jobs


@dataclass(eq=False)
class Encoded(Stored):
    """PNG, JPEG or TIFF files of `episodes` in memory: in cells, as `bytes_of` reads them."""

    data: pa.ChunkedArray | pa.Array
    episodes: EpisodeFiles

    def __len__(self) -> int:
        return len(self.data)

    def jobs(self, rows: np.ndarray, put: Put) -> Jobs:
        def job(i: int, row: int) -> None:
            try:
                picture = decode_numbers(bytes_of(self.data[row].as_py(), self.episodes.folder))
            except DAMAGE as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                where = f"{self.episodes.where(row)}: {self.column.name}"
                raise DatasetError(f"{where}: {reason}") from error
            put(i, fitted_in(self.episodes, row, picture, self.column))

        return [lambda i=i, row=int(row): job(i, row) for i, row in enumerate(rows)]


@dataclass(eq=False)
class Held(Stored):
    """Pictures [N, H, W, C] that are in memory already."""

    pictures: np.ndarray

    def __len__(self) -> int:
        return len(self.pictures)

    def jobs(self, rows: np.ndarray, put: Put) -> Jobs:
        for i, row in enumerate(rows):
            put(i, self.pictures[row])
        return []


class Joined:
    """Rows of several `Pictures`, one after the other."""

    def __init__(self, all_: Sequence[tuple[Pictures, np.ndarray]]) -> None:
        self.all, self.column = list(all_), all_[0][0].column
        self.end = np.cumsum([len(rows) for _, rows in all_])

    def __len__(self) -> int:
        return int(self.end[-1])

    def parts(self, rows: np.ndarray) -> list[tuple[Stored, np.ndarray, np.ndarray]]:
        which = np.searchsorted(self.end, rows, side="right")
        found: list[tuple[Stored, np.ndarray, np.ndarray]] = []
        for number in np.unique(which).tolist():
            here = np.flatnonzero(which == number)
            pictures, chosen = self.all[number]
            parts = pictures.parts(chosen[rows[here] - self.end[number] + len(chosen)])
            found += [(store, own, here[at]) for store, own, at in parts]
        return found


def read(wanted: Sequence[tuple[Pictures, np.ndarray]]) -> list[Tensor]:
    """The pictures [n, H, W, C] of all (pictures, rows [n] of them)."""
    results = [
        np.empty((len(rows), *pictures.column.shape), pictures.column.dtype)
        for pictures, rows in wanted
    ]
    by_store: dict[int, tuple[Stored, list[tuple[int, np.ndarray, np.ndarray]]]] = {}
    for number, (pictures, rows) in enumerate(wanted):
        for store, own, at in pictures.parts(rows):
            by_store.setdefault(id(store), (store, []))[1].append((number, own, at))
    jobs: Jobs = []
    for store, uses in by_store.values():
        jobs += _fill(store, uses, results)
    run_jobs(jobs)
    return [torch.from_numpy(result) for result in results]


def _fill(
    store: Stored, uses: Sequence[tuple[int, np.ndarray, np.ndarray]], results: list[np.ndarray]
) -> Jobs:
    """Copy what the cache has; the work that decodes the rest, each row once."""
    places: dict[int, list[tuple[int, int]]] = {}
    for number, rows, at in uses:
        for row, place in zip(rows.tolist(), at.tolist(), strict=True):
            places.setdefault(row, []).append((number, place))

    def copy(row: int, picture: np.ndarray) -> None:
        for number, place in places[row]:
            results[number][place] = picture

    missing: list[int] = []
    for row in sorted(places):
        kept = store.cache.get((id(store), row))
        if kept is None:
            missing.append(row)
        else:
            copy(row, kept)
    wanted = np.array(missing, np.int64)

    def put(i: int, picture: np.ndarray) -> None:
        copy(missing[i], picture)
        if not isinstance(store, Held):
            store.cache.put((id(store), missing[i]), picture)

    return store.jobs(wanted, put) if missing else []


aten = torch.ops.aten


class LazyPictures(Tensor):
    """Rows `rows` [N] of `pictures`, decoded when they are used, and then on `device`. Choosing
    rows (`index_select`, a slice, an index) and concatenation give another LazyPictures, which
    costs eight bytes a row. Every other operation decodes the rows, at most `limit` bytes of them
    (else DatasetError), and works on an ordinary tensor; `load` does so for a whole batch at once,
    which is the fastest way."""

    pictures: Pictures
    rows: np.ndarray
    limit: int

    @staticmethod
    def __new__(
        cls: type[LazyPictures],
        pictures: Pictures,
        rows: np.ndarray,
        limit: int,
        device: torch.device | str = "cpu",
    ) -> LazyPictures:
        make = torch.Tensor._make_wrapper_subclass  # pyright: ignore
        size = (len(rows), *pictures.column.shape)
        dtype: torch.dtype = getattr(torch, pictures.column.dtype)
        self: LazyPictures = make(cls, size, dtype=dtype, device=torch.device(device))
        self.pictures, self.rows, self.limit = pictures, rows, limit
        return self

    @classmethod
    def of(cls, pictures: Pictures, limit: int) -> LazyPictures:
        return cls(pictures, np.arange(len(pictures)), limit)

    def at(self, rows: np.ndarray, device: torch.device | str | None = None) -> LazyPictures:
        """The same pictures at other `rows` or for another device."""
        return LazyPictures(self.pictures, rows, self.limit, device or self.device)

    def load(self) -> Tensor:
        return read([(self.pictures, self.rows)])[0].to(self.device)

    def require_room(self) -> None:
        """DatasetError if these are more pictures than `limit`."""
        size = len(self.rows) * self.pictures.column.nbytes
        if size > self.limit:
            raise DatasetError(
                f"{len(self.rows):,} pictures are {size / 1e6:,.0f} MB when decoded, which this "
                f"use of a dataset needs at once (at most {self.limit / 1e6:,.0f} MB); read fewer "
                "episodes (demo_episodes=N), or embodied demos split"
            )

    def numpy(self, *, force: bool = False) -> np.ndarray:
        self.require_room()
        return self.load().numpy(force=force)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyPictures({list(self.shape)}, device={self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = _LAZY.get(func)
        if lazy is not None:
            result = lazy(*args, **kwargs)
            if result is not None:
                return result
        found = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, LazyPictures)]
        for one in found:
            one.require_room()
        loaded = dict(zip(map(id, found), load_all(found), strict=True))
        args, kwargs = tree_map_only(LazyPictures, lambda one: loaded[id(one)], (args, kwargs))
        return func(*args, **(kwargs or {}))


def load_all(all_: Sequence[LazyPictures]) -> list[Tensor]:
    """Decode several at once: a picture that two of them need is decoded once."""
    loaded = read([(one.pictures, one.rows) for one in all_])
    return [value.to(one.device) for value, one in zip(loaded, all_, strict=True)]


def load(rows: Tensors) -> Tensors:
    """`rows` with ordinary tensors only."""
    lazy = {key: value for key, value in rows.items() if isinstance(value, LazyPictures)}
    return {**rows, **dict(zip(lazy, load_all(list(lazy.values())), strict=True))} if lazy else rows


def _to_copy(one: LazyPictures, **kwargs: Any) -> LazyPictures | None:
    if kwargs.get("dtype") not in (None, one.dtype):
        return None
    return one.at(one.rows, kwargs.get("device"))


def _rows(one: LazyPictures, dim: int, which: Any) -> LazyPictures | None:
    return one.at(one.rows[which]) if dim == 0 else None


def _slice(
    one: LazyPictures, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyPictures | None:
    return _rows(one, dim, slice(start, end, step))


def _select(one: LazyPictures, dim: int, index: int) -> Tensor | None:
    row = _rows(one, dim, slice(index, index + 1 or None))
    return None if row is None else row.load()[0]


def _index(one: Tensor, index: Sequence[Tensor | None]) -> LazyPictures | None:
    first = index[0]
    if not isinstance(one, LazyPictures) or len(index) != 1 or first is None or first.ndim != 1:
        return None
    return one.at(one.rows[first.cpu().numpy()])


def _cat(all_: Sequence[Tensor], dim: int = 0) -> LazyPictures | None:
    lazy = next((one for one in all_ if isinstance(one, LazyPictures)), None)
    alike = all((one.dtype, one.shape[1:]) == (all_[0].dtype, all_[0].shape[1:]) for one in all_)
    if lazy is None or dim != 0 or not alike:
        return None
    parts: list[tuple[Pictures, np.ndarray]] = []
    for one in all_:
        if isinstance(one, LazyPictures):
            parts.append((one.pictures, one.rows))
        else:
            held = Held(lazy.pictures.column, FrameCache(0), one.cpu().numpy())
            parts.append((held, np.arange(len(one))))
    joined = Joined(parts)
    return LazyPictures(joined, np.arange(len(joined)), lazy.limit, lazy.device)


_LAZY: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.clone.default),
        lambda one, *_, **__: one.at(one.rows),
    ),
    aten._to_copy.default: _to_copy,
    aten.index_select.default: lambda one, dim, index: _rows(one, dim, index.cpu().numpy()),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.cat.default: _cat,
}
