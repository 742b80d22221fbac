"""Replay buffers in zarr, as Diffusion Policy and UMI keep them (Chi et al. 2023, 2024): a folder
or zip file with `data/NAME` [N, ...] and `meta/episode_ends` [E] (zarr's format 2).

`data/action` is the action, the rest are observations. Where there is no action (UMI), it is the
next pose: place, rotation vector and width of each gripper. Actions keep their units, unless
`--low` and `--high` are given. The last row of an episode is its final observation. `--dt` is
needed: a buffer does not say its period.
"""

from __future__ import annotations

import bz2
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from embodied import importers
from embodied.core.build import ConfigError, needed
from embodied.core.files import allowed, inside, read_bytes, require_file, require_room
from embodied.core.native import NativeLeaf, native_leaf, picture_axes
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.schema import DatasetError
from embodied.importers import Bounds, Recorded, in_own_units, leaf_tensor, naming, require_elements

ENDS = "meta/episode_ends"
ACTION = "action"
POSE = ("eef_pos", "eef_rot_axis_angle", "gripper_width")  # of robot0, robot1, ... in UMI
AFTERWARDS = "_demo_end_pose"  # nobody knows it during the episode
MOST_CHUNKS = 10**6  # of one array
COMPRESSORS = ("blosc", "bz2", "gzip", "lz4", "zlib", "zstd")
FILTERS = ("astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle")
FILTERS += ("adler32", "crc32", "fletcher32")


def read(path: Path, dt: float | None, bounds: Bounds) -> tuple[Spec, Iterator[Recorded]]:
    """The Spec of a replay buffer, and its episodes in order."""
    if dt is None:
        raise DatasetError(f"{path} does not say its control period: --dt SECONDS")
    store = Store(path)
    arrays = {name: Array.of(store, f"data/{name}") for name in store.names("data")}
    ends = Array.of(store, ENDS)
    stops = [int(end) for end in ends.rows(0, ends.shape[0])]
    starts = [0, *stops[:-1]]
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if not stops or any(a >= b for a, b in zip(starts, stops, strict=True)):
        raise DatasetError(f"{path}: {ENDS} should be ascending, of one episode at least")
    if short := [name for name, length in lengths.items() if length < stops[-1]]:
        raise DatasetError(f"{path}: data/{short[0]} has fewer rows than {ENDS} says")
    acted = [ACTION] if ACTION in arrays else _poses(arrays)
    if not acted:
        raise DatasetError(f"{path} has neither data/{ACTION} nor data/robot0_{POSE[0]}")
    require_elements(sum(arrays[name].size for name in acted), path)
    seen = [name for name in arrays if name != ACTION]
    first = {name: arrays[name].rows(0, stops[0]) for name in seen}
    entries = {name: _leaf(name, values) for name, values in first.items()}
    names = tuple(
        name if arrays[name].size == 1 else f"{name}_{element}"
        for name in acted
        for element in range(arrays[name].size)
    )
    act, convert = in_own_units(names, bounds, str(path))

    def recorded() -> Iterator[Recorded]:
        for number, (begin, end) in enumerate(zip(starts, stops, strict=True)):
            with naming(path, f"episode {number}"):
                observed = {
                    entry.name: leaf_tensor(entry, arrays[name].rows(begin, end))
                    for name, entry in entries.items()
                }
                moves = [arrays[name].rows(begin, end).reshape(end - begin, -1) for name in acted]
                values = np.concatenate(moves, 1).astype(np.float32)
                values = values[:-1] if ACTION in arrays else values[1:]
                rows, notes = Tensors(), {"episode": number}
                if len(values):
                    unit, clipped = convert(values)
                    rows, notes = importers.with_final(observed, unit), notes | clipped
            yield Recorded(f"episode {number}", rows, "", notes)

    leaves = {entry.name: entry.leaf for entry in entries.values()}
    return Spec(leaves, act, dt), recorded()


def _poses(arrays: Mapping[str, Array]) -> list[str]:
    """UMI's columns of the grippers' poses."""
    robots = sorted({name.partition("_")[0] for name in arrays if name.startswith("robot")})
    every = [f"{robot}_{part}" for robot in robots for part in POSE]
    return [name for name in every if name in arrays]


def _leaf(name: str, values: np.ndarray) -> NativeLeaf:
    """The observation of the first episode's `values` [T, ...]; pictures may be floats from 0 to 1
    or to 255."""
    called = f"privileged/{name}" if name.endswith(AFTERWARDS) else name
    dtype, low, high = values.dtype, -np.inf, np.inf
    colour = values.ndim == 4 and 3 in (values.shape[1], values.shape[3])
    if dtype.kind == "f" and colour and picture_axes(values.shape[1:], dtype, True):
        most = float(values.max())
        if values.min() >= 0 and most <= 1:
            low, high = 0.0, 1.0
        elif values.min() >= 0 and most <= 255:
            dtype = np.dtype(np.uint8)
    return native_leaf(called, (name,), values.shape[1:], str(dtype), low, high)


class Store:
    """The files of a folder or zip by their names in the group. DatasetError for another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.zip: zipfile.ZipFile | None = None
        self.root = ""
        if path.is_file():
            try:
                self.zip = zipfile.ZipFile(path)
            except (OSError, zipfile.BadZipFile) as error:
                raise DatasetError(f"{path} is no complete zip file; copy it again") from error
            ends = [n for n in self.zip.namelist() if n.endswith(f"{ENDS}/.zarray")]
            self.root = ends[0].removesuffix(f"{ENDS}/.zarray") if ends else ""
        if self.get(f"{ENDS}/.zarray") is None:
            newer = self.get("zarr.json") is not None
            raise DatasetError(
                f"{path} is of zarr's format 3; only format 2 can be read"
                if newer
                else f"{path} is no replay buffer: it has no {ENDS}"
            )

    def get(self, name: str) -> bytes | None:
        """The bytes of a file; None where it is not there."""
        if self.zip is None:
            file = inside(self.path, name)
            return read_bytes(file, file.stat().st_size) if file.exists() else None
        try:
            about = self.zip.getinfo(self.root + name)
        except KeyError:
            return None
        require_room(about.file_size, self.size, f"{self.path}: {name}")
        return self.zip.read(about)

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        if self.zip is not None:
            return require_file(self.path)
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def names(self, group: str) -> list[str]:
        """The arrays of a group, sorted."""
        if self.zip is None:
            return sorted(file.parent.name for file in (self.path / group).glob("*/.zarray"))
        begin, end = f"{self.root}{group}/", "/.zarray"
        found = [n for n in self.zip.namelist() if n.startswith(begin) and n.endswith(end)]
        return sorted(name.removeprefix(begin).removesuffix(end) for name in found)


@dataclass(frozen=True)
class Array:
    """An array of zarr's format 2: its chunks are files `NAME/0.0.0`."""

    store: Store
    name: str
    shape: tuple[int, ...]
    about: Mapping[str, Any]

    @classmethod
    def of(cls, store: Store, name: str) -> Array:
        """The array `name`; DatasetError where its description is damaged."""
        try:
            about = json.loads(store.get(f"{name}/.zarray") or b"")
            _ = np.dtype(about["dtype"]), about["compressor"]
            shape, chunks = tuple(about["shape"]), about["chunks"]
            if len(shape) != len(chunks) or min((*shape, *(n - 1 for n in chunks)), default=-1) < 0:
                raise ValueError(f"its shape is {list(shape)!s:.60}, in chunks {chunks!s:.60}")
            if about.get("dimension_separator", ".") not in (".", "/"):
                raise ValueError("its files are named otherwise")
            return cls(store, name, shape, about)
        except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as error:
            raise DatasetError(f"{store.path}: {name}/.zarray is damaged ({error})") from error

    def require_room(self, shape: Sequence[int]) -> int:
        """The bytes of that many numbers; FileError where they are too many."""
        size = math.prod(shape) * np.dtype(self.about["dtype"]).itemsize
        require_room(size, self.store.size, f"{self.store.path}: {self.name}")
        return size

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape[1:])

    def rows(self, begin: int, end: int) -> np.ndarray:
        """[end - begin, ...]."""
        about = self.about
        chunks = about["chunks"]
        fill = about.get("fill_value") or 0
        self.require_room((end - begin, *self.shape[1:]))
        spans = [range(begin // chunks[0], -(-end // chunks[0]))]
        spans += [range(-(-n // c)) for n, c in zip(self.shape[1:], chunks[1:], strict=True)]
        if math.prod(map(len, spans)) > MOST_CHUNKS:
            raise DatasetError(f"{self.store.path}: {self.name} has more than {MOST_CHUNKS} chunks")
        made = np.full((end - begin, *self.shape[1:]), fill, np.dtype(about["dtype"]))
        for index in itertools.product(*spans):
            key = about.get("dimension_separator", ".").join(map(str, index))
            data = self.store.get(f"{self.name}/{key}")
            if data is None:
                continue  # a chunk that was never written has the fill value
            chunk = self._decoded(data, key)
            low = [i * c for i, c in zip(index, chunks, strict=True)]
            first = max(begin - low[0], 0)
            there = [slice(first, min(end - low[0], chunks[0]))]
            here = [slice(low[0] + first - begin, min(low[0] + chunks[0], end) - begin)]
            for start, c, n in zip(low[1:], chunks[1:], self.shape[1:], strict=True):
                here.append(slice(start, min(start + c, n)))
                there.append(slice(0, min(c, n - start)))
            made[tuple(here)] = chunk[tuple(there)]
        return made

    def _decoded(self, data: bytes, key: str) -> np.ndarray:
        about = self.about
        values: Any = data
        most = min(8 * self.require_room(about["chunks"]), allowed(self.store.size))
        try:
            if about["compressor"] is not None:
                values = decompressed(data, about["compressor"], most)
            for settings in reversed(about.get("filters") or []):
                values = codec(settings, FILTERS).decode(values)
            array = np.asarray(values) if isinstance(values, np.ndarray) else None
            if array is None or array.dtype != np.dtype(about["dtype"]):
                array = np.frombuffer(values, np.dtype(about["dtype"]))
            return array.reshape(about["chunks"], order=about.get("order", "C"))
        except (ValueError, RuntimeError, OSError, EOFError, zlib.error, ArithmeticError) as error:
            raise DatasetError(
                f"{self.store.path}: {self.name}/{key} is damaged ({error}); copy it again"
            ) from error


def decompressed(data: bytes, settings: Mapping[str, Any], most: int) -> Any:
    """What is in compressed `data`; ValueError where it is more than `most` bytes, ConfigError for
    an unknown compression."""
    name = str(settings["id"])
    promised = 0
    if name in ("zlib", "gzip", "bz2"):
        stream: Any = bz2.BZ2Decompressor() if name == "bz2" else zlib.decompressobj(32 + 15)
        found = stream.decompress(data, most + 1)
        promised = len(found)
    elif name in ("blosc", "lz4"):
        promised = int.from_bytes(data[4:8] if name == "blosc" else data[:4], "little")
    elif name == "zstd":
        promised = zstd_size(data)
    if promised > most:
        raise ValueError(f"it would be more than {most:,} bytes when it is decompressed")
    if name in ("zlib", "gzip", "bz2"):
        return found
    return codec(settings, COMPRESSORS).decode(data)


def zstd_size(data: bytes) -> int:
    """The size that a frame of zstd says of its content (RFC 8878). ValueError where it says
    none."""
    flags = data[4] if len(data) > 4 else 0
    single = flags >> 5 & 1
    length = (single, 2, 4, 8)[flags >> 6]
    first = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    if not length:
        raise ValueError("it does not say how large its content is")
    return int.from_bytes(data[first : first + length], "little") + (256 if length == 2 else 0)


def codec(settings: Mapping[str, Any], known: Sequence[str]) -> Any:
    """The codec of numcodecs, one of `known`: some of the others run code of the file (pickle).
    Those of pictures (UMI's JPEG XL) are in imagecodecs. ConfigError."""
    registry = needed("numcodecs.registry", "zarr files need numcodecs", "data")
    name = str(settings["id"])
    if name not in known and not name.startswith("imagecodecs_"):
        raise ConfigError(
            f"zarr files with the codec {name[:40]!r} are not read: {', '.join(known)}"
        )
    if name.startswith("imagecodecs_"):
        try:
            from imagecodecs.numcodecs import register_codecs
        except ModuleNotFoundError as error:
            raise ConfigError(f"{name} pictures need: pip install imagecodecs") from error
        register_codecs(verbose=False)
    try:
        return registry.get_codec(dict(settings))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"numcodecs has no codec {name} of these settings ({error})") from error
