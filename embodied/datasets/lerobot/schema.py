"""The LeRobotDataset v3.0 layout: columns, features, statistics and the paths of its files.

    meta/info.json  stats.json  tasks.parquet  episodes/chunk-000/file-000.parquet
    data/chunk-000/file-000.parquet
    videos/observation.images.wrist/chunk-000/file-000.mp4

Many episodes share a file; `meta/episodes` says where each of them lies. What LeRobot has no name
for (our Spec, true shapes, final observations) is in extra keys and columns that it ignores.
"""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from embodied.core import formats
from embodied.core.atomic_write import write_durably
from embodied.core.files import FileError, inside, read_json, reading, require_names
from embodied.core.spec import DEPTH, POINTS, Leaf, Spec, hidden, known
from embodied.core.tensors import Tensors
from embodied.datasets.parquet import read_parquet

VERSION = "v3.0"
OURS = "embodied"  # our key in info.json
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
INDEX = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
KINDS = ("chunk", "file")  # the two numbers of a file
FILES_PER_CHUNK = 1000
DATA_MB, VIDEO_MB = 100, 200
CLOCK = ("timestamp", "frame_index", "episode_index", "index", "task_index")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FLAGS = ("terminated", "truncated", "done")
NAMED = {
    "reward": "next.reward",
    "success": "next.success",
    "task": "task_vector",
    "intervened": "intervention",
}
HIL_SERL = {"complementary_info.is_intervention": "intervened"}  # LeRobot's name of the same
HIDDEN = ("privileged.", "critic.")  # columns of observations that policies do not see
# How pictures are stored that are no input of a policy: PNG files in base64. LeRobot's policies
# take every picture and every film as an input, whatever it is called, but no text.
TEXT = "string"
# As which type the numbers of a feature are computed with.
DTYPES = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32"}
DTYPES |= {n: n for n in ("float32", "float16", "int8", "int16", "int32", "int64", "uint8", "bool")}
CHANNELS = (1, 3, 4)  # of a picture


class DatasetError(RuntimeError):
    """A dataset cannot be read or written, in one line that says what to do."""


@dataclass(frozen=True)
class Depth:
    """How the numbers of a depth picture become metres.

    Pictures hold distances in `unit` ("m", "mm"; "": integers are mm, floats m). Films hold codes
    c from 0 to 4095, from `low` to `high` (m) in even steps, or (`logarithmic`) in even steps of
    log(distance + `shift`), as LeRobot 0.6 writes them.
    """

    unit: str = "mm"
    low: float = 0.01
    high: float = 10.0
    shift: float = 3.5
    logarithmic: bool = True

    CODES: ClassVar[int] = 4095

    def of_picture(self, values: np.ndarray) -> np.ndarray:
        """Metres, float32, of the numbers of a picture; 0 for those that are not finite."""
        metres = self.unit == "m" or (not self.unit and values.dtype.kind == "f")
        known = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        return (known * (1.0 if metres else 1e-3)).astype(np.float32)

    def of_film(self, codes: np.ndarray) -> np.ndarray:
        """Metres, float32, of the codes of a film."""
        low, high = self.low, self.high
        if not self.logarithmic:
            return (low + codes * ((high - low) / self.CODES)).astype(np.float32)
        first, last = np.log(low + self.shift), np.log(high + self.shift)
        metres = np.exp(first + codes * ((last - first) / self.CODES)) - self.shift
        return metres.astype(np.float32)

    @classmethod
    def of_feature(cls, feature: Mapping[str, Any]) -> Depth | None:
        """What a feature of info.json says of itself; None where it is no depth picture."""
        info = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
        if not (info.get("is_depth_map") or info.get("video.is_depth_map")):
            return None
        names = {"low": "depth_min", "high": "depth_max", "shift": "shift"}
        given = {key: info.get(f"video.{name}") for key, name in names.items()}
        numbers = {key: float(value) for key, value in given.items() if value is not None}
        by_log = info.get("video.use_log")
        logarithmic = True if by_log is None else bool(by_log)
        return cls(str(info.get("depth_unit") or ""), logarithmic=logarithmic, **numbers)


@dataclass(frozen=True)
class Column:
    """One column of the data files: `name` there, `key` in Tensors, `shape` and `dtype` (torch's
    name) of one step, how pictures are `stored` ("video", "image", TEXT; "" for numbers), `names`,
    for pictures of distances (float32, m) what the file holds, `depth`, and the leaf's `unit` where
    it is POINTS."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    stored: str = ""
    names: tuple[str, ...] = ()
    depth: Depth | None = None
    unit: str = ""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def summarised(self) -> bool:
        """Whether its statistics are kept: not of texts, and not of clouds, whose elements have no
        meaning of their own."""
        return self.stored != TEXT and self.unit != POINTS

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def feature(self) -> dict[str, Any]:
        if self.stored == TEXT:
            about: dict[str, Any] = {f"{OURS}.png": list(self.shape)}
            if self.depth is not None:
                about[f"{OURS}.depth_unit"] = self.depth.unit
            return {"dtype": TEXT, "shape": [1], "names": None, "info": about}
        if self.stored:
            names = ["height", "width", "channels"]
            feature = {"dtype": self.stored, "shape": list(self.shape), "names": names}
            if self.depth is not None:
                feature["info"] = {"is_depth_map": True, "depth_unit": self.depth.unit}
            return feature
        if self.size == 1:
            return {"dtype": self.dtype, "shape": [1], "names": None}
        if self.unit == POINTS:
            about = {f"{OURS}.points": list(self.shape)}
            return {"dtype": self.dtype, "shape": [self.size], "names": None, "info": about}
        short = self.name.rpartition(".")[2]
        names = list(self.names) or [f"{short}_{i}" for i in range(self.size)]
        return {"dtype": self.dtype, "shape": [self.size], "names": names}

    def element(self, number: int) -> str:
        """What one element is called in a message: `action[x.pos]`."""
        if self.size == 1:
            return self.name
        named = self.names[number] if len(self.names) == self.size else str(number)
        return f"{self.name}[{named}]"

    def numbers(self, column: pa.ChunkedArray | pa.Array) -> np.ndarray:
        """`to_tensor` as [T, size] in double precision."""
        values = self.to_tensor(column).double()
        return values.reshape(len(values), -1).numpy()

    def to_arrow(self, values: Tensor) -> pa.Array:
        """Values [T, *shape] as an Arrow array of length T."""
        flat = values.detach().cpu().reshape(len(values), -1).contiguous().numpy()
        if self.size == 1:
            return pa.array(flat[:, 0])
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), self.size)

    def to_tensor(self, column: pa.ChunkedArray | pa.Array) -> Tensor:
        """The inverse of `to_arrow`; ValueError where the file does not hold this shape."""
        rows = len(column)
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
            array = array.flatten()
        numbers = np.array(array.to_numpy(zero_copy_only=False))
        if numbers.size != rows * self.size or numbers.dtype == object:
            raise ValueError(f"column {self.name} does not hold {rows} x {self.size} numbers")
        return torch.from_numpy(numbers.astype(self.dtype)).reshape(rows, *self.shape)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Column:
        shape, dtype = known(data["shape"], data["dtype"])
        names, depth = tuple(data["names"]), data.get("depth")
        coded = None if depth is None else Depth(**depth)
        rest = data["stored"], names, coded, data.get("unit", "")
        return cls(data["name"], data["key"], shape, dtype, *rest)


def observation(name: str, leaf: Leaf, images: str) -> Column:
    """The column of the observation `name`; `images` is "video" or "image". Depth pictures are
    always single pictures (PNG, mm). What policies do not see lies outside of `observation.`,
    pictures as TEXT, so that LeRobot's policies do not see it either."""
    key, plain = f"obs/{name}", name.replace("/", ".")
    within = plain if hidden(name) else f"observation.{plain}"
    if leaf.is_picture and leaf.shape[2] in CHANNELS:
        place = within if hidden(name) else f"observation.images.{plain}"
        depth = Depth() if leaf.is_depth else None
        images = "image" if leaf.is_depth else images
        stored = TEXT if hidden(name) else images
        return Column(place, key, leaf.shape, leaf.dtype, stored, depth=depth)
    unit = POINTS if leaf.is_points else ""
    return Column(within, key, leaf.shape, leaf.dtype, "", leaf.names, unit=unit)


def columns_of(spec: Spec, episode: Tensors, images: str) -> tuple[Column, ...]:
    """All columns of a dataset whose first episode is `episode`: state, other observations, action,
    reward, then whatever else it has (pictures among it as TEXT). The flags of the end are
    `next.done`, `next.truncated`."""
    leaves = sorted(spec.obs.items(), key=lambda item: (item[1].is_picture, item[0] != "state"))
    columns = [observation(name, leaf, images) for name, leaf in leaves]
    columns.append(Column("action", "action", spec.act.shape, spec.act.dtype, "", spec.act.names))
    for key, value in episode.items():
        if key.startswith(("obs/", "next_obs/")) or key in ("action", *FLAGS):
            continue
        name = NAMED.get(key, key.replace("/", "."))
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape[1:])
        picture = dtype == "uint8" and len(shape) == 3 and shape[2] in CHANNELS
        columns.append(Column(name, key, shape, dtype, TEXT if picture else ""))
    columns.append(Column("next.done", "done", (), "bool"))
    columns.append(Column("next.truncated", "truncated", (), "bool"))
    return tuple(columns)


def columns_of_info(info: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of a dataset, also of one that LeRobot wrote, without those that `skipped` names.
    DatasetError for a picture whose shape is none."""
    if OURS in info:
        return tuple(Column.from_json(column) for column in info[OURS]["columns"])
    keys = {name: key for key, name in NAMED.items()}
    keys |= {"next.done": "done", "next.truncated": "truncated"}
    keys |= {name: key for name, key in HIL_SERL.items() if NAMED[key] not in info["features"]}
    columns = []
    for name, feature in info["features"].items():
        if name in CLOCK or _skips(name, feature):
            continue
        shape: tuple[int, ...] = tuple(feature["shape"])
        # The names of a feature's elements: LeRobot writes a list, or {"motors": list}.
        given = feature.get("names")
        if isinstance(given, Mapping):
            given = [word for words in given.values() if isinstance(words, list) for word in words]
        names = [str(word) for word in given] if isinstance(given, list) else []
        key = str(keys.get(name, name))
        if name.startswith("observation."):
            key = f"obs/{name.split('.', 1)[1]}"
        elif name.startswith(HIDDEN):
            key = f"obs/{name.replace('.', '/', 1)}"
        about = feature.get("info") or {}
        if feature["dtype"] == TEXT:
            unit = about.get(f"{OURS}.depth_unit")
            depth = None if unit is None else Depth(unit)
            dtype = "uint8" if depth is None else "float32"
            columns.append(Column(name, key, tuple(about[f"{OURS}.png"]), dtype, TEXT, (), depth))
        elif feature["dtype"] in ("video", "image"):
            key = key.replace("obs/images.", "obs/")
            depth = Depth.of_feature(feature)
            dtype = "uint8" if depth is None else "float32"
            shape = _picture_shape(name, shape, names)
            columns.append(Column(name, key, shape, dtype, feature["dtype"], (), depth))
        elif (of_points := about.get(f"{OURS}.points")) is not None:
            columns.append(Column(name, key, tuple(of_points), feature["dtype"], unit=POINTS))
        else:
            shape = () if name in keys and shape == (1,) else shape
            # Policies compute in float32; an action of integers (counts of a servo) is a number,
            # unless it is a class (`is_class`).
            dtype = "float32" if name == "action" else DTYPES[feature["dtype"]]
            names = names if len(names) == int(np.prod(shape, dtype=int)) else []
            columns.append(Column(name, key, shape, dtype, "", tuple(names)))
    return tuple(columns)


def images_of(columns: Sequence[Column]) -> Literal["mp4", "png"]:
    """How `EpisodeWriter` keeps the pictures of such columns; those of distances are always PNG."""
    alone = any(c.stored == "image" and c.depth is None for c in columns)
    return "png" if alone else "mp4"


def skipped(info: Mapping[str, Any]) -> list[str]:
    """`NAME (dtype)` of every feature that is no number and no picture, and is not read."""
    if OURS in info:
        return []
    features = info["features"].items()
    return [f"{name} ({feature['dtype']})" for name, feature in features if _skips(name, feature)]


def _skips(name: str, feature: Mapping[str, Any]) -> bool:
    known = feature["dtype"] in DTYPES or feature["dtype"] in ("video", "image")
    known = known or f"{OURS}.png" in (feature.get("info") or {})
    return not known or name.startswith("observation.language")


def _picture_shape(name: str, shape: tuple[int, ...], names: list[str]) -> tuple[int, ...]:
    """Height, width and channels, by the names of the axes, or by their sizes."""
    if len(shape) == 2:
        return (*shape, 1)
    axes = [word.lower()[:1] for word in names]
    if len(shape) == 3 and len(axes) == 3 and axes.count("h") == axes.count("w") == 1:
        rows, columns = axes.index("h"), axes.index("w")
        return (shape[rows], shape[columns], shape[3 - rows - columns])
    if len(shape) == 3 and shape[2] in CHANNELS:
        return shape
    if len(shape) == 3 and shape[0] in CHANNELS:
        return (shape[1], shape[2], shape[0])
    raise DatasetError(
        f"{name} is a picture of shape {list(shape)} in meta/info.json, which is not height, width "
        "and 1, 3 or 4 channels"
    )


MOST_CLASSES = 256


def is_class(info: Mapping[str, Any], action: Tensor) -> bool:
    """Whether the `action` [N, 1] of a dataset of LeRobot's is one of some classes: an integer of
    one element, from 0 to at most 255."""
    kind = str(info["features"]["action"]["dtype"])
    whole = OURS not in info and "int" in kind and action[0].numel() == 1
    return whole and float(action.min()) >= 0 and float(action.max()) < MOST_CLASSES


def spec_of_info(info: Mapping[str, Any]) -> Spec:
    """The Spec that was written, or what LeRobot's features say of one (bounds unknown)."""
    if OURS in info:
        return Spec.from_json(info[OURS]["spec"])
    columns = {column.key: column for column in columns_of_info(info)}
    if "action" not in columns:
        raise DatasetError("the dataset has no action column; nothing can be learnt from it")
    leaves = {key: leaf_of(column) for key, column in columns.items()}
    obs = {key[4:]: leaf for key, leaf in leaves.items() if key.startswith("obs/")}
    return Spec(obs=obs, act=leaves["action"], dt=1.0 / info["fps"])


def leaf_of(column: Column) -> Leaf:
    """What a column says of its leaf (bounds unknown)."""
    if column.depth is not None:
        return Leaf(column.shape, column.dtype, low=0.0, unit=DEPTH)
    return Leaf(column.shape, column.dtype, unit=column.unit, names=column.names)


def new_info(
    spec: Spec, columns: tuple[Column, ...], robot: str, images: str, fps: float
) -> dict[str, Any]:
    features = {column.name: column.feature for column in columns}
    whole = int(fps) if float(fps).is_integer() else fps
    for column in columns:
        if column.stored == "video":
            height, width, channels = column.shape
            features[column.name]["info"] = {
                "video.height": height,
                "video.width": width,
                "video.codec": "h264",
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": whole,
                "video.channels": channels,
                "has_audio": False,
            }
    for name in CLOCK:
        dtype = "float32" if name == "timestamp" else "int64"
        features[name] = {"dtype": dtype, "shape": [1], "names": None}
    written = [column.to_json() for column in columns]
    return {
        "codebase_version": VERSION,
        "robot_type": robot,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": DATA_MB,
        "video_files_size_in_mb": VIDEO_MB,
        "fps": whole,
        "splits": {},
        "data_path": DATA,
        "video_path": VIDEO if images == "video" else None,
        "features": features,
        OURS: {"format": formats.DATASET, "spec": spec.to_json(), "columns": written},
    }


def file_in(folder: Path, template: str, chunk: int, file: int, camera: str = "") -> Path:
    """A file of DATA, VIDEO or INDEX in the dataset at `folder`; FileError if the name of its
    `camera` leads out of it."""
    if not isinstance(chunk, int) or not isinstance(file, int):
        raise FileError(
            f"{folder}: its index says {chunk!s:.40}, {file!s:.40} for numbers of files"
        )
    return inside(folder, template.format(video_key=camera, chunk_index=chunk, file_index=file))


def file_number(
    folder: Path, template: str, number: int, info: Mapping[str, Any], camera: str = ""
) -> Path:
    """The file `number` of DATA, VIDEO or INDEX in the dataset at `folder`."""
    return file_in(folder, template, *divmod(number, info["chunks_size"]), camera)


def place_in_file(what: str, number: int, info: Mapping[str, Any]) -> dict[str, Any]:
    """How the index says that an episode's `what` ("data", "videos/NAME") is in file `number`."""
    chunk, file = divmod(number, info["chunks_size"])
    return {f"{what}/chunk_index": chunk, f"{what}/file_index": file}


def place_in_film(
    camera: str, number: int, info: Mapping[str, Any], begin: float, end: float
) -> dict[str, Any]:
    """The same of an episode's film, which is `begin` to `end` s of that file."""
    at = f"videos/{camera}"
    times = {f"{at}/from_timestamp": begin, f"{at}/to_timestamp": end}
    return place_in_file(at, number, info) | times


def tasks_table(texts: list[str]) -> pa.Table:
    """tasks.parquet: the sentences, as the index that pandas restores, and their numbers."""
    table = pa.table({"task_index": pa.array(range(len(texts)), pa.int64()), "task": texts})
    number = {"name": "task_index", "field_name": "task_index", "metadata": None}
    word = {"name": "task", "field_name": "task", "metadata": None}
    number |= {"pandas_type": "int64", "numpy_type": "int64"}
    word |= {"pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [number, word],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def write_parquet(table: pa.Table, file: Path) -> None:
    """Write a table durably, with a checksum of each page: a reader notices a flipped bit."""
    write_durably(file, lambda sink: pq.write_table(table, sink, write_page_checksum=True))


def read_tasks(path: Path) -> dict[int, str]:
    file = path / "meta" / "tasks.parquet"
    try:
        table = read_parquet(file)
        names = [n for n in table.column_names if n != "task_index"]
        words = table[names[0]].to_pylist()
        if not all(isinstance(word, str | None) for word in words):
            raise ValueError("a task is no text")
        return dict(zip(table["task_index"].to_pylist(), words, strict=True))
    except (*DAMAGE, IndexError, TypeError) as error:
        raise damaged(file, error) from error


ROW = b"embodied.row"  # where a pending file keeps its line of meta/episodes
DAMAGE = (OSError, ValueError, KeyError, EOFError, pa.ArrowException)


@dataclass(frozen=True)
class Pending:
    """A finished episode that is not in the large files yet."""

    number: int
    file: Path

    def film(self, column: Column) -> Path:
        return self.file.with_name(f"{self.file.stem}.{column.name}.mp4")

    def read(self) -> tuple[pa.Table, pa.Table]:
        """Its steps, and its one-row line of meta/episodes."""
        try:
            steps = read_parquet(self.file)
            line = pa.ipc.open_stream(steps.schema.metadata[ROW]).read_all()
        except (*DAMAGE, TypeError) as error:
            raise damaged(self.file, error) from error
        return steps.replace_schema_metadata(None), line


def pending_file(path: Path, number: int) -> Pending:
    return Pending(number, path / "pending" / f"episode-{number:06d}.parquet")


def list_pending(path: Path, listed: int) -> list[Pending]:
    """Finished episodes that the large files do not have yet, where they have `listed`."""
    files = sorted((path / "pending").glob("episode-*.parquet"))
    found = [Pending(int(re.findall(r"\d+", file.stem)[0]), file) for file in files]
    return [episode for episode in found if episode.number >= listed]


def damaged(file: Path, error: object) -> DatasetError:
    """The one line for a file that cannot be read."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if file.name == "info.json" and "promises" not in reason:
        return DatasetError(f"{file} is damaged ({reason}); copy it again from its source")
    folder = next((p for p in file.parents if (p / "meta").is_dir()), file.parent)
    return DatasetError(
        f"{file} is damaged ({reason}); copy it again, or keep the readable episodes with "
        f"embodied.datasets.lerobot.reader.salvage({str(folder)!r}, NEW_FOLDER)"
    )


def read_any_info(path: Path) -> dict[str, Any]:
    """meta/info.json of any version; DatasetError where there is none."""
    file = path / "meta" / "info.json"
    if not file.exists():
        raise DatasetError(f"{path} holds no dataset (there is no {file})")
    try:
        info = read_json(file)
        info["codebase_version"] = str(info["codebase_version"])
        _ = info["total_episodes"] + 0, info["total_frames"] + 0
        require_names(info["features"], file)
        for feature in info["features"].values():
            _ = feature["dtype"], tuple(feature["shape"])
        sizes = (info.get(f"{kind}_files_size_in_mb", 1) for kind in ("data", "video"))
        if not 0 < info["fps"] < np.inf or min(info.get("chunks_size", 1), *sizes) <= 0:
            raise ValueError("fps, chunks_size and the sizes of files should be above 0")
        return info
    except (*DAMAGE, TypeError, AttributeError) as error:
        raise damaged(file, error) from error


def read_info(path: Path) -> dict[str, Any]:
    """meta/info.json; DatasetError where there is none, or not of version 3."""
    info, file = read_any_info(path), path / "meta" / "info.json"
    if not (version := info["codebase_version"]).startswith("v3."):
        raise DatasetError(
            f"{path} is a LeRobot dataset of version {version}, {VERSION} is needed; "
            f"convert it: embodied demos convert lerobot {path} NEW_FOLDER"
        )
    if OURS in info:
        ours: dict[str, Any] = info[OURS]
        if not isinstance(ours, dict):
            raise damaged(file, TypeError(f"{OURS} should hold a dictionary"))
        info[OURS] = formats.upgrade("dataset", ours, ours.get("format", 1))
        with reading(file, KeyError, TypeError, ValueError, AttributeError):
            require_names((column.name for column in columns_of_info(info)), file)
            spec_of_info(info)
    return info


def read_index(path: Path, whole: bool = True) -> pa.Table | None:
    """meta/episodes in order of episode_index, or None where nothing is listed yet. With `whole` a
    damaged file is an error, without it what the file listed is left out."""
    tables = []
    for file in sorted((path / "meta" / "episodes").glob("*/*.parquet")):
        try:
            tables.append(read_parquet(file))
        except DAMAGE as error:
            if whole:
                raise damaged(file, error) from error
    if not tables:
        return None
    plain = [table.replace_schema_metadata(None) for table in tables]
    index = pa.concat_tables(plain, promote_options="default").sort_by("episode_index")
    if "tasks" not in index.column_names:
        index = index.append_column("tasks", _tasks_by_steps(path, index))
    return index


def _tasks_by_steps(path: Path, index: pa.Table) -> pa.Array:
    """The sentences of every episode as its steps have them: what LeRobot 0.6 has converted from
    pictures to films does not list them."""
    words, found = read_tasks(path), dict[int, dict[str, None]]()
    for file in sorted((path / "data").glob("*/*.parquet")):
        try:
            table = read_parquet(file, ["episode_index", "task_index"])
        except DAMAGE as error:
            raise damaged(file, error) from error
        numbers = (table[name].to_pylist() for name in ("episode_index", "task_index"))
        for episode, task in zip(*numbers, strict=True):
            found.setdefault(episode, {}).setdefault(words.get(task, ""))
    texts = [list(found.get(number, ())) for number in index["episode_index"].to_pylist()]
    return pa.array(texts, pa.list_(pa.string()))
