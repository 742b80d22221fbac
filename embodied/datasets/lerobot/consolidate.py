"""From one small file per finished episode to LeRobot's large ones; the folder reads back
completely at every moment in between.

A finished episode waits in `pending/`, complete, until the file in `meta/episodes` that lists it
gets its name: that single rename moves it. Whatever a killed process leaves behind is either not
listed (and cleared away next time) or listed twice (and then the listed one counts).
"""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from embodied.core.atomic_write import sync, write_durably, write_json
from embodied.datasets.lerobot.schema import (
    DATA,
    INDEX,
    VIDEO,
    Column,
    Pending,
    columns_of_info,
    file_number,
    list_pending,
    place_in_file,
    place_in_film,
    read_index,
    read_info,
    tasks_table,
)
from embodied.datasets.lerobot.video import join_films


def consolidate(path: Path) -> None:
    """Move every pending episode of `path` into the large files. The caller holds the lock."""
    info, index = read_info(path), read_index(path)
    listed = 0 if index is None else index.num_rows
    waiting = list_pending(path, listed)
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
    texts = _add_texts(path, [line["tasks"][0].as_py()[0] for line in lines])
    extra = _write_data(path, info, index, all_, texts)
    for column in columns_of_info(info):
        if column.stored == "video":
            films = _write_films(path, info, index, all_, column, extra)
            extra = [one | film for one, film in zip(extra, films, strict=True)]
    number = _next_number(index, "meta/episodes", info)
    place = place_in_file("meta/episodes", number, info)
    rows = []
    for line, one in zip(lines, extra, strict=True):
        for name, value in (one | place).items():
            line = line.append_column(name, pa.array([value]))
        rows.append(line)
    table = pa.concat_tables(rows)
    target = path / file_number(INDEX, number, info)
    write_durably(target, lambda sink: pq.write_table(table, sink))  # from here on they are listed


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
            place = {"episode_index": episode, **place_in_file("data", number, info)}
            places.append(place | {"dataset_from_index": frame, "dataset_to_index": end})
            text = texts[line["tasks"][0].as_py()[0]]
            counters = {
                "episode_index": np.full(len(steps), episode),
                "index": np.arange(frame, end),
                "task_index": np.full(len(steps), text),
            }
            for name, values in counters.items():
                steps = steps.append_column(name, pa.array(values, pa.int64()))
            tables.append(steps.select(stored))
            episode, frame = episode + 1, end
        write_row_groups(path / file_number(DATA, number, info), tables)
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
            places.append(place_in_film(camera, number, info, begin / fps, end / fps))
            begin = end
        joined = join_films([one.film(column).read_bytes() for one in group])
        name = file_number(VIDEO, number, info, camera)
        write_durably(path / name, lambda sink, joined=joined: sink.write(joined))
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
    schema = tables[0].schema

    def write(sink: Any) -> None:
        with pq.ParquetWriter(sink, schema) as writer:
            for table in tables:
                writer.write_table(table.select(schema.names).cast(schema))

    write_durably(file, write)


def _next_number(index: pa.Table | None, what: str, info: Mapping[str, Any]) -> int:
    """The number of the file after the last listed one of `what`."""
    if index is None:
        return 0
    chunks, files = (index[f"{what}/{kind}_index"].to_numpy() for kind in ("chunk", "file"))
    return int(np.max(chunks * info["chunks_size"] + files)) + 1


def _add_texts(path: Path, texts: Sequence[str]) -> dict[str, int]:
    """Number every sentence, old ones first, and write tasks.parquet where there are new ones."""
    file = path / "meta" / "tasks.parquet"
    known: list[str] = pq.read_table(file)["task"].to_pylist() if file.exists() else []
    every = list(dict.fromkeys([*known, *texts]))
    if every != known:
        write_durably(file, lambda sink: pq.write_table(tasks_table(every), sink))
    return {text: number for number, text in enumerate(every)}


def _clear_unlisted(path: Path, info: Mapping[str, Any], index: pa.Table | None) -> None:
    """Remove large files that a killed process wrote but did not get to list."""
    listed = set()
    for line in [] if index is None else index.to_pylist():
        listed.add(_file_of(path, line, "data", DATA))
        for name in info["features"]:
            if f"videos/{name}/file_index" in line:
                listed.add(_file_of(path, line, f"videos/{name}", VIDEO, name))
    for pattern in ("data/*/*.parquet", "videos/*/*/*.mp4", "*/**/.*.partial"):
        for file in path.glob(pattern):
            if file not in listed:
                file.unlink()


def _file_of(path: Path, line: Mapping[str, Any], what: str, template: str, name: str = "") -> Path:
    chunk, file = line[f"{what}/chunk_index"], line[f"{what}/file_index"]
    return path / template.format(video_key=name, chunk_index=chunk, file_index=file)


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

    Pictures: per channel in [0, 1], shape [C, 1, 1], from at most 50 steps and 4,096 pixels each.
    """
    count = np.array([len(values)])
    if column.stored:
        some = values[:: max(1, len(values) // 50)].cpu().numpy() / 255.0
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

    Exact but for the quantiles, which are averaged by length, as LeRobot does.
    """
    count = each["count"].reshape(-1, *[1] * (each["mean"].ndim - 1))
    share = count / count.sum()
    mean = (each["mean"] * share).sum(0)
    variance = ((each["std"] ** 2 + (each["mean"] - mean) ** 2) * share).sum(0)
    pooled = {name: (value * share).sum(0) for name, value in each.items() if name[0] == "q"}
    pooled |= {"min": each["min"].min(0), "max": each["max"].max(0), "mean": mean}
    return pooled | {"std": np.sqrt(variance), "count": each["count"].sum(0)}
