"""LeRobot datasets of versions 2.0 and 2.1 become ones of version 3.

    meta/info.json  tasks.jsonl  episodes.jsonl  episodes_stats.jsonl (2.1) or stats.json (2.0)
    data/chunk-000/episode_000000.parquet
    videos/chunk-000/observation.images.top/episode_000000.mp4

Each episode keeps its file and its films, byte by byte where its numbers are right, under the names
of version 3; so LeRobot and this project read the same steps and pictures as before.
"""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embodied.core.atomic_write import write_json
from embodied.core.files import inside, read_json, read_text
from embodied.datasets.lerobot import schema
from embodied.datasets.lerobot.schema import DAMAGE, DATA, INDEX, VIDEO, DatasetError, write_parquet
from embodied.datasets.lerobot.writer import summarise
from embodied.datasets.parquet import read_parquet

# Of data_path and video_path: a format of Python could ask for anything else.
PART = r"\{(video_key|episode_(chunk|index)(:0?\d{1,2}d)?)\}"
TEMPLATE = re.compile(rf"([^{{}}]|{PART})*")
LINES = 2**28  # bytes of a list of episodes


def copy(path: Path, out: Path) -> int:
    """Write the dataset at `path` to the new folder `out`; returns how many episodes it has."""
    old = _info(path)
    texts = {int(line["task_index"]): str(line["task"]) for line in _lines(path, "tasks")}
    episodes = sorted(_lines(path, "episodes"), key=lambda line: line["episode_index"])
    if not episodes:
        raise DatasetError(f"{path} holds no episode")
    if sorted(texts) != list(range(len(texts))):
        raise DatasetError(f"{path / 'meta/tasks.jsonl'}: task_index should count from 0")
    each = (path / "meta" / "episodes_stats.jsonl").exists()  # not in version 2.0
    listed = _lines(path, "episodes_stats") if each else ()
    stats = {line["episode_index"]: line["stats"] for line in listed}
    # info.json of version 3 (totals are written at the end).
    kept = {k: v for k, v in old.items() if k not in ("total_chunks", "total_videos")}
    info = kept | {
        "codebase_version": schema.VERSION,
        "chunks_size": schema.FILES_PER_CHUNK,
        "data_files_size_in_mb": schema.DATA_MB,
        "video_files_size_in_mb": schema.VIDEO_MB,
        "data_path": DATA,
        "video_path": None if old.get("video_path") is None else VIDEO,
    }
    cameras = [name for name, f in info["features"].items() if f["dtype"] == "video"]
    rows: list[dict[str, Any]] = []
    begin = 0
    for number, episode in enumerate(episodes):
        length = int(episode["length"])
        file = schema.file_number(out, DATA, number, info)
        _copy_steps(_file(path, old, "data_path", episode), file, number, begin, length)
        row = {"episode_index": number, "tasks": list(episode["tasks"]), "length": length}
        row |= schema.place_in_file("data", number, info)
        row |= {"dataset_from_index": begin, "dataset_to_index": begin + length}
        for camera in cameras:
            film = _file(path, old, "video_path", episode, camera)
            _copied(film, schema.file_number(out, VIDEO, number, info, camera))
            row |= schema.place_in_film(camera, number, info, 0.0, length / info["fps"])
        row |= schema.place_in_file("meta/episodes", 0, info)
        for name, kinds in stats.get(episode["episode_index"], {}).items():
            row |= {f"stats/{name}/{kind}": value for kind, value in kinds.items()}
        rows.append(row)
        begin += length
    index = pa.Table.from_pylist(rows)
    write_parquet(index, schema.file_in(out, INDEX, 0, 0))
    words = [texts[number] for number in range(len(texts))]
    write_parquet(schema.tasks_table(words), out / "meta" / "tasks.parquet")
    summarise(out, info, index)
    if not stats and (path / "meta" / "stats.json").exists():
        write_json(out / "meta" / "stats.json", read_json(path / "meta" / "stats.json"))
    return len(rows)


def _info(path: Path) -> dict[str, Any]:
    info = schema.read_any_info(path)
    if not (version := info["codebase_version"]).startswith("v2."):
        hint = "; it needs no conversion" if version.startswith("v3.") else ""
        raise DatasetError(f"{path} is of version {version}, not 2.0 or 2.1{hint}")
    for template in (str(info["data_path"]), str(info.get("video_path") or "")):
        if not TEMPLATE.fullmatch(template):
            raise DatasetError(f"{path}/meta/info.json: {template[:60]!r} is no path of files")
    return info


def _lines(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """The lines of meta/NAME.jsonl."""
    file = path / "meta" / f"{name}.jsonl"
    try:
        text = read_text(file, LINES)
        yield from (json.loads(line) for line in text.splitlines() if line.strip())
    except FileNotFoundError as error:
        raise DatasetError(f"{file} is missing; copy the dataset again") from error
    except ValueError as error:
        raise DatasetError(f"{file} is damaged ({error}); copy it again") from error


def _file(
    path: Path, info: Mapping[str, Any], what: str, episode: Mapping[str, Any], camera: str = ""
) -> Path:
    number = int(episode["episode_index"])
    place = {"episode_chunk": number // info["chunks_size"], "episode_index": number}
    return inside(path, info[what].format(video_key=camera, **place))


def _copied(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(file, target)
    except FileNotFoundError as error:
        raise DatasetError(f"{file} is missing; copy the dataset again") from error


def _copy_steps(file: Path, target: Path, number: int, begin: int, length: int) -> None:
    """One episode's steps, with its new `number` and the dataset's first row `begin`."""
    if not file.exists():
        raise DatasetError(f"{file} is missing; copy the dataset again")
    try:
        table = read_parquet(file)
        if table.num_rows != length:
            raise DatasetError(
                f"{file} has {table.num_rows} steps, meta/episodes.jsonl says {length} of this "
                "episode"
            )
        counters = {
            "episode_index": np.full(length, number),
            "index": np.arange(begin, begin + length),
        }
        same = all(np.array_equal(table[k].to_numpy(), v) for k, v in counters.items())
    except DAMAGE as error:
        raise DatasetError(f"{file} is damaged ({error}); copy it again") from error
    if same:
        _copied(file, target)
        return
    for name, values in counters.items():
        at = table.column_names.index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(values, pa.int64()))
    write_parquet(table, target)
