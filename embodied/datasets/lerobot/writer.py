"""EpisodeWriter: episodes to disk, each one safe from the moment `add` returns.

A finished episode waits in `pending/`, complete, until the file in `meta/episodes` that lists it
gets its name: that single rename moves it into LeRobot's large files. Whatever a killed process
leaves behind is either not listed (and cleared away next time) or listed twice (and then the listed
one counts): the folder reads back completely at every moment in between.
"""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

import fcntl
import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from embodied.core.atomic_write import sync, write_durably, write_json
from embodied.core.files import inside
from embodied.core.spec import Leaf, Spec, require_same
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot import schema
from embodied.datasets.lerobot.schema import Column, DatasetError, Pending, file_number, read_index
from embodied.datasets.lerobot.video import encode_film, encode_png, join_films


def consolidate(path: Path) -> None:
    """Move every pending episode of `path` into the large files. The caller holds the lock.
    FileError where a link in its place leads out of the dataset."""
    for name in ("meta", "data", "videos", "pending"):
        inside(path, name)
    info, index = schema.read_info(path), read_index(path)
    waiting = schema.list_pending(path, 0 if index is None else index.num_rows)
    if waiting:
        _clear_unlisted(path, info, index)
        _move(path, info, index, waiting)
        index = read_index(path)
    if index is not None and info["total_episodes"] != index.num_rows:
        summarise(path, info, index)
    if (path / "pending").is_dir():
        for file in (path / "pending").iterdir():
            file.unlink()
        (path / "pending").rmdir()


def _move(path: Path, info: dict[str, Any], index: pa.Table | None, all_: list[Pending]) -> None:
    lines = [episode.read()[1] for episode in all_]
    texts = _add_texts(path, [text for line in lines for text in line["tasks"][0].as_py()])
    extra = _write_data(path, info, index, all_, texts)
    for column in schema.columns_of_info(info):
        if column.stored == "video":
            films = _write_films(path, info, index, all_, column, extra)
            extra = [one | film for one, film in zip(extra, films, strict=True)]
    number = _next_number(index, "meta/episodes", info)
    place = schema.place_in_file("meta/episodes", number, info)
    rows = []
    for line, one in zip(lines, extra, strict=True):
        for name, value in (one | place).items():
            line = line.append_column(name, pa.array([value]))
        rows.append(line)
    table = pa.concat_tables(rows)
    target = file_number(path, schema.INDEX, number, info)
    schema.write_parquet(table, target)  # from here on they are listed


def _write_data(
    path: Path,
    info: dict[str, Any],
    index: pa.Table | None,
    waiting: Sequence[Pending],
    texts: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Write the steps into as few files as their size allows; returns where each episode went."""
    episode = 0 if index is None else index.num_rows
    frame = 0 if index is None else int(np.max(index["dataset_to_index"].to_numpy()))
    number = _next_number(index, "data", info)
    stored = [name for name, feature in info["features"].items() if feature["dtype"] != "video"]
    places: list[dict[str, Any]] = []
    for group in _grouped(waiting, lambda e: e.file.stat().st_size, info["data_files_size_in_mb"]):
        tables = []
        for one in group:
            steps, line = one.read()
            end = frame + len(steps)
            place = {"episode_index": episode, **schema.place_in_file("data", number, info)}
            places.append(place | {"dataset_from_index": frame, "dataset_to_index": end})
            own = np.array([texts[text] for text in line["tasks"][0].as_py()])
            counters = {
                "episode_index": np.full(len(steps), episode),
                "index": np.arange(frame, end),
                "task_index": own[steps["task_index"].to_numpy()],
            }
            steps = steps.drop_columns(["task_index"])
            for name, values in counters.items():
                steps = steps.append_column(name, pa.array(values, pa.int64()))
            tables.append(steps.select(stored))
            episode, frame = episode + 1, end
        write_row_groups(file_number(path, schema.DATA, number, info), tables)
        number += 1
    return places


def _write_films(
    path: Path,
    info: dict[str, Any],
    index: pa.Table | None,
    waiting: Sequence[Pending],
    column: Column,
    extra: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Join one camera's films; returns where in them each episode is (s)."""
    camera, fps = column.name, info["fps"]
    steps = {
        e.number: x["dataset_to_index"] - x["dataset_from_index"]
        for e, x in zip(waiting, extra, strict=True)
    }
    number = _next_number(index, f"videos/{camera}", info)
    places: list[dict[str, Any]] = []
    limit = info["video_files_size_in_mb"]
    for group in _grouped(waiting, lambda e: e.film(column).stat().st_size, limit):
        begin = 0
        for one in group:
            end = begin + steps[one.number]
            places.append(schema.place_in_film(camera, number, info, begin / fps, end / fps))
            begin = end
        joined = join_films([one.film(column).read_bytes() for one in group])
        film = file_number(path, schema.VIDEO, number, info, camera)
        write_durably(film, lambda sink, joined=joined: sink.write(joined))
        number += 1
    return places


def _grouped(
    waiting: Sequence[Pending], size: Callable[[Pending], int], limit_mb: float
) -> Iterator[list[Pending]]:
    """Consecutive episodes whose files are together at most `limit_mb`, at least one each."""
    group: list[Pending] = []
    total = 0
    for episode in waiting:
        bytes_ = size(episode)
        if group and total + bytes_ > limit_mb * 1e6:
            yield group
            group, total = [], 0
        group.append(episode)
        total += bytes_
    if group:
        yield group


def write_row_groups(file: Path, tables: Sequence[pa.Table]) -> None:
    """One row group an episode, so that a reader can fetch one without the others."""
    kind = tables[0].schema

    def write(sink: Any) -> None:
        with pq.ParquetWriter(sink, kind, write_page_checksum=True) as writer:
            for table in tables:
                writer.write_table(table.select(kind.names).cast(kind))

    write_durably(file, write)


def _next_number(index: pa.Table | None, what: str, info: Mapping[str, Any]) -> int:
    """The number of the file after the last listed one of `what`."""
    if index is None:
        return 0
    chunks, files = (index[f"{what}/{kind}_index"].to_numpy() for kind in schema.KINDS)
    return int(np.max(chunks * info["chunks_size"] + files)) + 1


def _add_texts(path: Path, texts: Sequence[str]) -> dict[str, int]:
    """Number every sentence, old ones first, and write tasks.parquet where there are new ones."""
    file = path / "meta" / "tasks.parquet"
    known = list(schema.read_tasks(path).values()) if file.exists() else []
    every = list(dict.fromkeys([*known, *texts]))
    if every != known:
        schema.write_parquet(schema.tasks_table(every), file)
    return {text: number for number, text in enumerate(every)}


def _clear_unlisted(path: Path, info: Mapping[str, Any], index: pa.Table | None) -> None:
    """Remove large files that a killed process wrote but did not get to list."""
    listed = set()
    for line in [] if index is None else index.to_pylist():
        listed.add(_file_of(path, line, "data", schema.DATA))
        for name in info["features"]:
            if f"videos/{name}/file_index" in line:
                listed.add(_file_of(path, line, f"videos/{name}", schema.VIDEO, name))
    for pattern in ("data/*/*.parquet", "videos/*/*/*.mp4", "*/**/.*.partial"):
        for file in path.glob(pattern):
            if file not in listed:
                inside(path, file.relative_to(path)).unlink()


def _file_of(path: Path, line: Mapping[str, Any], what: str, template: str, name: str = "") -> Path:
    chunk, file = (line[f"{what}/{kind}_index"] for kind in schema.KINDS)
    return schema.file_in(path, template, chunk, file, name)


def summarise(path: Path, info: dict[str, Any], index: pa.Table) -> None:
    """Write stats.json and the totals of info.json from what is listed."""
    stats: dict[str, dict[str, Any]] = {}
    for name in [n for n in index.column_names if n.startswith("stats/")]:
        column, _, kind = name.removeprefix("stats/").rpartition("/")
        stats.setdefault(column, {})[kind] = _numbers(index[name])
    pooled = {c: {k: v.tolist() for k, v in pool(s).items()} for c, s in stats.items()}
    write_json(path / "meta" / "stats.json", pooled)
    texts = {text for texts in index["tasks"].to_pylist() for text in texts}
    info["total_episodes"] = index.num_rows
    info["total_frames"] = int(np.sum(index["length"].to_numpy()))
    info["total_tasks"] = len(texts)
    info["splits"] = {"train": f"0:{index.num_rows}"}
    write_json(path / "meta" / "info.json", info)
    sync(path / "meta")


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """A list column as one array [E, ...]; every row has the shape of the first."""
    shape = np.shape(column[0].as_py())
    array: Any = pa.concat_arrays(column.chunks)
    while pa.types.is_list(array.type):
        array = array.flatten()
    return array.to_numpy().reshape(len(column), *shape)


QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)


def statistics(column: Column, values: Tensor) -> dict[str, np.ndarray]:
    """Minimum, maximum, mean, deviation, count and quantiles of `values` [T, *shape], per element.
    Pictures: per channel in [0, 1] (distances: mm), shape [C, 1, 1], from at most 50 steps and
    4,096 pixels each."""
    count = np.array([len(values)])
    if column.stored:
        # Distances in mm, as they are stored.
        unit = 255.0 if column.depth is None else 1e-3
        some = values[:: max(1, len(values) // 50)].cpu().numpy() / unit
        pixels = some.reshape(len(some), -1, some.shape[-1])
        numbers = pixels[:, :: max(1, pixels.shape[1] // 4096)].reshape(-1, some.shape[-1])
    else:
        numbers = values.cpu().reshape(len(values), -1).double().numpy()
    low, high = numbers.min(0), numbers.max(0)
    result = {"min": low, "max": high, "mean": numbers.mean(0), "std": numbers.std(0)}
    for q, value in zip(QUANTILES, np.quantile(numbers, QUANTILES, axis=0), strict=True):
        result[f"q{round(q * 100):02d}"] = value
    if column.stored:
        result = {name: value.reshape(-1, 1, 1) for name, value in result.items()}
    return result | {"count": count}


def pool(each: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One column's statistics over all episodes, from those of every episode ([E, ...] arrays).
    Exact but for the quantiles, which are averaged by length, as LeRobot does."""
    count = each["count"].reshape(-1, *[1] * (each["mean"].ndim - 1))
    share = count / count.sum()
    mean = (each["mean"] * share).sum(0)
    variance = ((each["std"] ** 2 + (each["mean"] - mean) ** 2) * share).sum(0)
    pooled = {name: (value * share).sum(0) for name, value in each.items() if name[0] == "q"}
    pooled |= {"min": each["min"].min(0), "max": each["max"].max(0), "mean": mean}
    return pooled | {"std": np.sqrt(variance), "count": each["count"].sum(0)}


class EpisodeWriter:
    """Writes a dataset in the LeRobot v3 layout, or goes on with one that is there.

    `add` makes each finished episode durable in a small file of its own; `close` (or leaving the
    `with` block) moves them into the large files. Whenever the process is killed, `read_episodes`
    finds every finished episode, and the next writer goes on from there.

    `images` says how camera pictures are kept: "mp4" (small; three channels, even sides) or "png"
    (exact). It is fixed by the first episode, as are the extra columns. SpecMismatch where the
    folder holds episodes of another Spec; DatasetError where something else writes to it.
    """

    def __init__(
        self,
        path: Path | str,
        spec: Spec,
        robot: str = "fr3",
        images: Literal["mp4", "png"] = "mp4",
    ) -> None:
        self.path, self.spec, self.robot = Path(path), spec, robot
        self.stored = {"mp4": "video", "png": "image"}[images]
        fps = 1.0 / spec.dt
        # A whole number where it is one to a part in ten thousand.
        self.fps = float(round(fps)) if abs(fps - round(fps)) < 1e-4 * fps else fps
        self.columns: tuple[Column, ...] = ()
        self.count = 0
        # The folder's own handle, locked; the lock goes with the process, however it ends.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise DatasetError(
                f"{self.path} is being written to by another process; wait for it to end"
            ) from error
        self._lock: int | None = handle
        try:
            if (self.path / "meta" / "info.json").exists():
                self._continue()
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def like(cls, source: Path | str, path: Path | str, spec: Spec) -> EpisodeWriter:
        """A writer of `path` that names the robot and keeps pictures as the dataset `source`."""
        info = schema.read_info(Path(source))
        images = schema.images_of(schema.columns_of_info(info))
        return cls(path, spec, str(info.get("robot_type")), images)

    def __len__(self) -> int:
        """Finished episodes in the folder."""
        return self.count

    def add(
        self,
        episode: Tensors,
        text: str | Sequence[str] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> int:
        """Keep one episode of T steps and return its number.

        `obs/<name>` [T, ...] (what was acted on), `next_obs/<name>` (the final observation: [...],
        [1, ...], or [T, ...] of which the last counts), `action` [T, A], `reward` [T],
        `terminated` [T], `truncated` [T]; optional `success` [T], `task` ([D] or [T, D]) and any
        other numbers [T, ...]. `text` is the task in words, one sentence or one for each step
        (the Spec's if None), `info` anything that JSON can hold. An episode that merely stops
        counts as truncated.
        """
        steps, final = self._checked(episode)
        if not self.columns:
            self._begin(steps)
        here = {column.key: column.shape for column in self.columns}
        there = {key: tuple(steps[key].shape[1:]) for key in steps if key != "terminated"}
        if here != there:
            different = sorted(k for k in {*here, *there} if here.get(k) != there.get(k))
            raise DatasetError(
                f"this episode does not fit the {self.count} in {self.path}: "
                f"{', '.join(different)} differ; write it to another folder"
            )
        text = self.spec.text if text is None else text
        words = [text] * len(steps["done"]) if isinstance(text, str) else list(text)
        if len(words) != len(steps["done"]):
            raise DatasetError(f"{len(words)} sentences for {len(steps['done'])} steps: one each")
        sentences = list(dict.fromkeys(words))
        line = self._line(steps, final, sentences, json.dumps(dict(info) if info else {}))
        numbers = [sentences.index(word) for word in words]
        try:
            self._write(steps, line, numbers)
        except OSError as error:
            raise self._unwritable(error) from error
        self.count += 1
        return self.count - 1

    def drop_newest(self) -> None:
        """Remove the episode that `add` kept last. DatasetError where there is none any more."""
        newest = schema.pending_file(self.path, self.count - 1)
        if not newest.file.exists():
            raise DatasetError(
                f"{self.path}: its newest episode was kept in an earlier session; type: "
                f"embodied demos drop {self.path} episodes={self.count - 1} out=NEW_FOLDER"
            )
        newest.file.unlink()  # first: from here on there is no such episode
        for column in self.columns:
            newest.film(column).unlink(missing_ok=True)
        self.count -= 1

    def close(self) -> None:
        """Move the episodes into the large files and let go of the folder; safe to call twice."""
        if self._lock is None:
            return
        try:
            if (self.path / "meta" / "info.json").exists():
                consolidate(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            self._unlock()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        if isinstance(error, DatasetError):
            self._unlock()  # the disk is full or gone: what is pending stays as it is
        else:
            self.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _continue(self) -> None:
        info, index = schema.read_info(self.path), read_index(self.path)
        if schema.OURS not in info:
            raise DatasetError(f"{self.path} was recorded by LeRobot; write to another folder")
        listed = 0 if index is None else index.num_rows
        self.count = listed + len(schema.list_pending(self.path, listed))
        if not self.count:
            return  # nothing was finished: the first episode decides anew
        require_same(self.spec, schema.spec_of_info(info), "these episodes", f"dataset {self.path}")
        self.columns = schema.columns_of_info(info)
        seen = (c for c in self.columns if c.stored and c.stored != schema.TEXT)
        colours = (c.stored for c in seen if c.depth is None)
        self.stored = next(colours, self.stored)

    def _begin(self, steps: Tensors) -> None:
        """The first episode decides the columns, and is preceded by the file that says so."""
        columns = schema.columns_of(self.spec, steps, self.stored)
        for column in columns:
            if column.stored != "video":
                continue
            height, width, channels = column.shape
            if height % 2 or width % 2 or channels != 3:
                raise DatasetError(
                    f"{column.key} {list(column.shape)} cannot be filmed (three channels and even "
                    'sides are needed); use images="png"'
                )
        info = schema.new_info(self.spec, columns, self.robot, self.stored, self.fps)
        try:
            write_json(self.path / "meta" / "info.json", info)
        except OSError as error:
            raise self._unwritable(error) from error
        self.columns = columns

    def _write(self, steps: Tensors, line: pa.Table, sentences: Sequence[int]) -> None:
        target = schema.pending_file(self.path, self.count)
        arrays: dict[str, pa.Array] = {}
        for column in self.columns:
            values = steps[column.key]
            if column.stored == "video":
                film = encode_film(values, self.fps)
                write_durably(target.film(column), lambda sink, film=film: sink.write(film))
            elif column.stored == schema.TEXT:
                pictures = [b64encode(encode_png(value)).decode() for value in values]
                arrays[column.name] = pa.array(pictures, pa.string())
            elif column.stored:
                pictures = [{"bytes": encode_png(value), "path": None} for value in values]
                arrays[column.name] = pa.array(pictures, schema.IMAGE)
            else:
                arrays[column.name] = column.to_arrow(values)
        frame = torch.arange(len(steps["done"]))
        arrays["timestamp"] = pa.array((frame.double() / self.fps).float().numpy())
        arrays["frame_index"] = pa.array(frame.numpy())
        arrays["task_index"] = pa.array(sentences, pa.int64())  # among those of the episode
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, line.schema) as stream:
            stream.write_table(line)
        table = pa.table(arrays).replace_schema_metadata({schema.ROW: sink.getvalue().to_pybytes()})
        schema.write_parquet(table, target.file)

    def _line(
        self, steps: Tensors, final: Tensors, sentences: Sequence[str], info: str
    ) -> pa.Table:
        """The episode's line of meta/episodes, as far as it is known before its place is."""
        length = len(steps["done"])
        line: dict[str, Any] = {"tasks": [sentences], "length": [length], "info": [info]}
        for column in self.columns:
            if column.key in final:
                value, name = final[column.key], f"final/{column.key.removeprefix('obs/')}"
                if column.stored:
                    line[name] = pa.array([encode_png(value)], pa.binary())
                else:
                    line[name] = column.to_arrow(value[None])
            if column.summarised:
                for kind, numbers in statistics(column, steps[column.key]).items():
                    line[f"stats/{column.name}/{kind}"] = [numbers.tolist()]
        return pa.table(line)

    def _checked(self, episode: Tensors) -> tuple[Tensors, Tensors]:
        """(steps, final observation), of the Spec's shapes and types; DatasetError says what is
        wrong with the episode."""
        if "action" not in episode or not len(episode["action"]):
            raise DatasetError("an episode needs at least one step with an action")
        length = len(episode["action"])
        steps: Tensors = {}
        final: Tensors = {}
        for name, leaf in self.spec.obs.items():
            seen = _fitting(_required(episode, f"obs/{name}"), f"obs/{name}", leaf, length)
            steps[f"obs/{name}"] = seen
            if leaf.is_depth and (seen.min() < 0 or seen.max() > 65.535):
                raise DatasetError(f"obs/{name} should be distances from 0 to 65.535 m")
            last = _required(episode, f"next_obs/{name}")
            last = last if last.ndim == len(leaf.shape) else last[-1]
            final[f"obs/{name}"] = _fitting(last[None], f"next_obs/{name}", leaf)[0]
        flags = ("terminated", "truncated", *(["success"] if "success" in episode else []))
        own = {"action": self.spec.act, "reward": Leaf(())} | dict.fromkeys(flags, Leaf((), "bool"))
        for key, leaf in own.items():
            steps[key] = _fitting(_required(episode, key), key, leaf, length)
        if (steps["terminated"] | steps["truncated"])[:-1].any():
            raise DatasetError(
                "an episode ends at its last step: the flags before it must be false"
            )
        if (steps["terminated"] & steps["truncated"]).any():
            raise DatasetError("a step is either terminated or truncated, not both")
        steps["truncated"] = steps["truncated"].clone()
        steps["truncated"][-1] = ~steps["terminated"][-1]
        steps["done"] = steps["terminated"] | steps["truncated"]
        for key, value in episode.items():
            if key not in steps and not key.startswith(("obs/", "next_obs/")):
                constant = key == "task" and value.ndim == 1
                value = value.expand(length, *value.shape) if constant else value
                steps[key] = _fitting(value, key, Leaf(tuple(value.shape[1:]), ""), length)
        return steps, final

    def _unwritable(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"could not write to {self.path}: {error.strerror or error}; its {self.count} finished "
            "episodes are safe; make room and run the same command again to go on"
        )


def _required(rows: Tensors, key: str) -> Tensor:
    if key not in rows:
        raise DatasetError(f"the episode has no {key}")
    return rows[key]


def _fitting(values: Tensor, key: str, leaf: Leaf, length: int = 1) -> Tensor:
    """`values` of `key`, which should be [length, *leaf.shape] and finite, in the leaf's type."""
    value = values.detach().cpu()
    if tuple(value.shape) != (length, *leaf.shape):
        raise DatasetError(
            f"{key} is {list(value.shape)}, expected {[length, *leaf.shape]} (steps first)"
        )
    given = value
    value = value.to(getattr(torch, leaf.dtype)) if leaf.dtype else value
    lossy = value.dtype != given.dtype and not value.is_floating_point()
    if lossy and not torch.equal(value.to(given.dtype), given):
        raise DatasetError(f"{key} has numbers that {leaf.dtype} cannot hold (pictures: 0 to 255)")
    if value.is_floating_point() and not torch.isfinite(value).all():
        raise DatasetError(f"{key} is not finite; the episode was not kept")
    return value
