"""Writing chosen episodes of one or several datasets as a new dataset.

Steps, statistics and everything else that an episode has are copied as they are, only the numbers
of episodes, steps, tasks and files are new. Films whose episodes are all chosen are copied whole;
from others the chosen episodes are cut out without encoding them again.
"""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embodied.core.atomic_write import write_durably
from embodied.core.files import inside, require_file
from embodied.datasets.lerobot import schema
from embodied.datasets.lerobot.pictures import bytes_of, film_pixels
from embodied.datasets.lerobot.schema import DATA, Column, DatasetError, damaged, file_in, read_info
from embodied.datasets.lerobot.video import FILMS, decode_numbers, open_film, open_sink
from embodied.datasets.lerobot.writer import consolidate, summarise, write_row_groups
from embodied.datasets.parquet import read_parquet


@dataclass
class Source:
    """`path`: the folder that was named; `folder`: where it is read, with no pending episodes.
    `newest`: the data file that was read last, and its rows."""

    path: Path
    folder: Path
    newest: tuple[Path, pa.Table] | None = None

    @cached_property
    def info(self) -> dict[str, Any]:
        return read_info(self.folder)

    @cached_property
    def index(self) -> pa.Table:
        """One line an episode, in order; DatasetError where there is none."""
        index = schema.read_index(self.folder)
        if index is None or not index.num_rows:
            raise DatasetError(f"{self.path} holds no finished episode")
        return index

    @property
    def cameras(self) -> list[str]:
        return [n for n, feature in self.info["features"].items() if feature["dtype"] == "video"]

    def __len__(self) -> int:
        return self.index.num_rows

    def column(self, name: str) -> np.ndarray:
        """A column of the index, [E]; DatasetError where it is missing."""
        if name not in self.index.column_names:
            raise damaged(self.folder / "meta" / "episodes", f"it has no column {name}")
        return self.index[name].to_numpy()

    def place(self, what: str, episode: int) -> tuple[int, int]:
        """The chunk and file of `what` ("data", "videos/NAME") that hold an episode."""
        chunk, file = (int(self.column(f"{what}/{k}_index")[episode]) for k in schema.KINDS)
        return chunk, file

    def data_file(self, episode: int) -> Path:
        return file_in(self.folder, DATA, *self.place("data", episode))

    def film(self, camera: str, episode: int) -> Path:
        return file_in(self.folder, schema.VIDEO, *self.place(f"videos/{camera}", episode), camera)

    def span(self, camera: str, episode: int) -> tuple[float, float]:
        """Where in its film an episode begins and ends (s)."""
        at = f"videos/{camera}"
        begin = float(self.column(f"{at}/from_timestamp")[episode])
        return begin, begin + int(self.column("length")[episode]) / self.info["fps"]

    def texts(self) -> list[list[str]]:
        return [list(texts or [""]) for texts in self.index["tasks"].to_pylist()]

    def rows(self, episode: int) -> pa.Table:
        """The steps of one episode, in order."""
        file = self.data_file(episode)
        if self.newest is None or self.newest[0] != file:
            try:
                self.newest = file, read_parquet(file)
            except schema.DAMAGE as error:
                raise damaged(file, error) from error
        number = int(self.column("episode_index")[episode])
        same = pc.equal(self.newest[1]["episode_index"], number)  # pyright: ignore
        rows = self.newest[1].filter(same)
        length = int(self.column("length")[episode])
        if rows.num_rows != length:
            raise damaged(file, f"it has {rows.num_rows} steps of episode {number}, not {length}")
        return rows

    def by_file(self, file_of: Callable[[int], Path]) -> dict[Path, list[int]]:
        """The files that `file_of` an episode names, and the episodes in each."""
        files: dict[Path, list[int]] = {}
        for episode in range(len(self)):
            files.setdefault(file_of(episode), []).append(episode)
        return files

    def pictures(self, camera: Column, episode: int, rows: pa.Table) -> Iterator[np.ndarray]:
        """The pictures of an episode's `rows` as the files hold them (`fitted`). DAMAGE,
        RuntimeError."""
        if camera.stored != "video":
            for cell in rows[camera.name]:
                yield decode_numbers(bytes_of(cell.as_py(), self.folder))
            return
        file, fps = self.film(camera.name, episode), float(self.info["fps"])
        if not file.exists():
            raise DatasetError(f"{file.parent.name}/{file.name} is missing")
        begin = self.span(camera.name, episode)[0]
        reader, pixels = FILMS.take(file, fps), film_pixels(camera)
        for time in rows["timestamp"].to_pylist():
            yield reader.picture(begin + time, pixels)
        FILMS.give(reader)


def open_source(path: Path | str, scratch: Path) -> Source:
    """The dataset at `path`. One with pending episodes of a killed recording is copied to
    `scratch` and finished there: what is at `path` is not touched."""
    path = Path(path)
    info = read_info(path)
    index = schema.read_index(path)
    if not schema.list_pending(path, 0 if index is None else index.num_rows):
        return Source(path, path)
    copy = scratch / f"finished-{len(list(scratch.glob('finished-*')))}"
    for link in (file for file in path.rglob("*") if file.is_symlink()):
        inside(path, link.relative_to(path))
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


Span = tuple[float, float]


def cut_film(file: Path, spans: Sequence[Span], fps: float) -> bytes | None:
    """An MP4 file of the pictures in `spans` (begin and end in s, ascending), one span after the
    other. None where a span does not begin with a key frame, or is not all of its groups of
    pictures: such a film cannot be cut without encoding it again."""
    try:
        with open_film(file) as film:
            packets = _packets(film, spans, 0.5 / fps)
            return None if packets is None else _joined(film, packets, fps)
    except (*schema.DAMAGE, RuntimeError, IndexError) as error:
        raise damaged(file, error) from error


def _packets(film: Any, spans: Sequence[Span], half: float) -> list[list[Any]] | None:
    """The packets of each span, in the order of decoding."""
    stream = film.streams.video[0]
    found: list[list[Any]] = [[] for _ in spans]
    last = None  # the span of the packet before
    for packet in film.demux(stream):
        if packet.pts is None:
            continue
        time = float(packet.pts * stream.time_base)
        here = next((i for i, (a, b) in enumerate(spans) if a - half <= time < b - half), None)
        if here != last and here is not None and not packet.is_keyframe:
            return None
        if here is None and last is not None and not packet.is_keyframe:
            return None  # the last group of pictures reaches beyond the span
        if here is not None:
            found[here].append(packet)
        last = here
    return found


def _joined(film: Any, groups: Sequence[Sequence[Any]], fps: float) -> bytes:
    stream = film.streams.video[0]
    tick = round(Fraction(1) / (Fraction(fps).limit_denominator(1000) * stream.time_base))
    sink = io.BytesIO()
    with open_sink(sink) as made:
        # opaque: packets are copied, so no encoder of this codec is needed (AV1 often has none)
        target = made.add_stream_from_template(stream, opaque=True)
        at = 0
        for packets in groups:
            shift = at - min(packet.pts for packet in packets)
            for packet in packets:
                packet.pts += shift
                packet.dts += shift
                packet.stream = target
                made.mux(packet)
            at += tick * len(packets)
    return sink.getvalue()


PLACES = ("data/", "videos/", "meta/episodes/")  # columns of the index that are new in a copy
FRAMES = ("dataset_from_index", "dataset_to_index", "episode_index")
KNOWN = ("info.json", "stats.json", "tasks.parquet", "episodes")


@dataclass
class Chosen:
    """`episodes`: places in the index of `source`, ascending."""

    source: Source
    episodes: list[int]


@dataclass
class Copied:
    """What was written. `uncut`: films that had to keep the pictures of dropped episodes."""

    episodes: int = 0
    steps: int = 0
    uncut: list[Path] = field(default_factory=list)


def write_dataset(folder: Path, chosen: Sequence[Chosen]) -> Copied:
    """Write the episodes in order to the empty `folder`."""
    made = Copied()
    # info.json of the first; where films or robots differ, what is true of all.
    infos = [one.source.info for one in chosen]
    info = copy.deepcopy(infos[0])
    info["robot_type"] = "+".join(dict.fromkeys(str(one.get("robot_type")) for one in infos))
    for name, feature in info["features"].items():
        details = [one["features"][name].get("info") or {} for one in infos]
        if feature.get("info"):
            same = {k: v for k, v in details[0].items() if all(d.get(k) == v for d in details)}
            feature["info"] = {key: same.get(key) for key in details[0]}
    lines = _copy_data(folder, info, chosen)
    for camera in chosen[0].source.cameras:
        films = _copy_films(folder, info, chosen, camera, made)
        lines = [line | film for line, film in zip(lines, films, strict=True)]
    index = _new_index(chosen, lines)
    schema.write_parquet(index, file_in(folder, schema.INDEX, 0, 0))
    _copy_other_meta(folder, chosen)
    summarise(folder, info, index)
    made.episodes, made.steps = index.num_rows, int(info["total_frames"])
    return made


def _copy_data(
    folder: Path, info: dict[str, Any], chosen: Sequence[Chosen]
) -> list[dict[str, Any]]:
    """The data files; returns where each episode went."""
    texts: dict[str, int] = {}
    lines: list[dict[str, Any]] = []
    waiting: list[pa.Table] = []
    file = size = frame = 0

    def flush() -> None:
        nonlocal file, size
        if waiting:
            write_row_groups(schema.file_number(folder, DATA, file, info), waiting)
            waiting.clear()
            file, size = file + 1, 0

    for one in chosen:
        for rows in _episodes(one, texts):
            if size + rows.nbytes > info["data_files_size_in_mb"] * 1e6:
                flush()
            line = {"episode_index": len(lines), **schema.place_in_file("data", file, info)}
            line |= {"dataset_from_index": frame}
            rows = _replaced(rows, "episode_index", np.full(rows.num_rows, len(lines)))
            rows = _replaced(rows, "index", np.arange(frame, frame + rows.num_rows))
            frame, size = frame + rows.num_rows, size + rows.nbytes
            lines.append(line | {"dataset_to_index": frame})
            waiting.append(rows)
    flush()
    schema.write_parquet(schema.tasks_table(list(texts)), folder / "meta" / "tasks.parquet")
    return lines


def _episodes(chosen: Chosen, texts: dict[str, int]) -> Any:
    """The steps of every chosen episode with the new numbers of their tasks, which `texts` gets."""
    source, words = chosen.source, schema.read_tasks(chosen.source.folder)
    for episode in chosen.episodes:
        rows = source.rows(episode)
        old = rows["task_index"].to_pylist()
        new = [texts.setdefault(words.get(number, ""), len(texts)) for number in old]
        yield _replaced(rows, "task_index", np.array(new))


def _replaced(rows: pa.Table, name: str, values: np.ndarray) -> pa.Table:
    at = rows.column_names.index(name)
    column = pa.field(name, rows.schema.field(name).type)
    return rows.set_column(at, column, pa.array(values, column.type))


def _copy_films(
    folder: Path, info: dict[str, Any], chosen: Sequence[Chosen], camera: str, made: Copied
) -> list[dict[str, Any]]:
    """One camera's films; returns where in them each episode is."""
    places: list[dict[str, Any]] = []
    number = 0
    for one in chosen:
        source, wanted = one.source, set(one.episodes)
        found: dict[int, dict[str, Any]] = {}
        for file, here in source.by_file(partial(source.film, camera)).items():
            kept = [episode for episode in here if episode in wanted]
            if not kept:
                continue
            target = schema.file_number(folder, schema.VIDEO, number, info, camera)
            begins = _copy_film(source, camera, file, kept, len(kept) == len(here), target)
            if begins is None:
                made.uncut.append(file)
                begins = [source.span(camera, episode)[0] for episode in kept]
                shutil.copyfile(file, target)
            for episode, begin in zip(kept, begins, strict=True):
                end = begin + int(source.column("length")[episode]) / info["fps"]
                found[episode] = schema.place_in_film(camera, number, info, begin, end)
            number += 1
        places += [found[episode] for episode in one.episodes]
    return places


def _copy_film(
    source: Source, camera: str, file: Path, kept: Sequence[int], whole: bool, target: Path
) -> list[float] | None:
    """Copy the film, or cut it; when each kept episode begins in it (s), None if it has no cuts."""
    if not file.exists():
        raise DatasetError(f"{file} is missing; embodied demos check {source.path} says of what")
    target.parent.mkdir(parents=True, exist_ok=True)
    spans = [source.span(camera, episode) for episode in kept]
    if whole:
        shutil.copyfile(file, target)
        return [begin for begin, _ in spans]
    order = sorted(range(len(kept)), key=lambda i: spans[i])
    fps = float(source.info["fps"])
    film = cut_film(file, [spans[i] for i in order], fps)
    if film is None:
        return None
    write_durably(target, lambda sink: sink.write(film))
    begins = [0.0] * len(kept)
    frames = 0
    for i in order:
        begins[i] = frames / fps
        frames += round((spans[i][1] - spans[i][0]) * fps)
    return begins


def _new_index(chosen: Sequence[Chosen], lines: Sequence[dict[str, Any]]) -> pa.Table:
    tables = []
    for one in chosen:
        table = one.source.index.take(pa.array(one.episodes, pa.int64()))
        old = [n for n in table.column_names if n.startswith(PLACES) or n in FRAMES]
        tables.append(table.drop_columns(old))
    index = pa.concat_tables(tables, promote_options="permissive")
    partly = [n for n in index.column_names if n.startswith("stats/") and index[n].null_count]
    index = index.drop_columns(partly)
    places = {name: pa.array([line[name] for line in lines]) for name in lines[0]}
    for name, values in places.items():
        index = index.append_column(name, values)
    for kind in schema.KINDS:
        index = index.append_column(f"meta/episodes/{kind}_index", pa.array([0] * len(lines)))
    return index


def _copy_other_meta(folder: Path, chosen: Sequence[Chosen]) -> None:
    """Other files of meta/ (a table of subtasks, ...); DatasetError where they differ."""
    for one in chosen:
        for file in sorted((one.source.folder / "meta").iterdir()):
            if file.name in KNOWN or file.is_dir() or file.name.startswith("."):
                continue
            target = folder / "meta" / file.name
            require_file(inside(file.parent, file.name))
            if target.exists() and target.read_bytes() != file.read_bytes():
                raise DatasetError(
                    f"meta/{file.name} differs between the datasets and cannot be merged; leave "
                    f"{one.source.path} out, or remove that file from a copy of it"
                )
            shutil.copyfile(file, target)
