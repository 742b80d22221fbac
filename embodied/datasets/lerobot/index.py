"""Which episodes a dataset folder has: those listed in `meta/episodes`, those still pending."""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from embodied.core import formats
from embodied.datasets.lerobot.schema import OURS, VERSION, Column, DatasetError

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
            steps = pq.ParquetFile(self.file).read()
            line = pa.ipc.open_stream(steps.schema.metadata[ROW]).read_all()
        except DAMAGE as error:
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


def read_info(path: Path) -> dict[str, Any]:
    """meta/info.json; DatasetError where there is none, or not of version 3."""
    file = path / "meta" / "info.json"
    if not file.exists():
        raise DatasetError(f"{path} holds no dataset (there is no {file})")
    try:
        info = json.loads(file.read_text())
        version = str(info["codebase_version"])
        _ = info["features"], info["total_episodes"], info["total_frames"], info["fps"]
    except DAMAGE as error:
        raise damaged(file, error) from error
    if not version.startswith("v3."):
        raise DatasetError(
            f"{path} is a LeRobot dataset of version {version}, {VERSION} is needed; "
            "convert it with LeRobot's own converter"
        )
    if OURS in info:
        ours = info[OURS]
        if not isinstance(ours, dict):
            raise damaged(file, TypeError(f"{OURS} should hold a dictionary"))
        ours = cast(dict[str, Any], ours)
        info[OURS] = formats.upgrade_dataset(ours, ours.get("format", 1))
    return info


def read_index(path: Path, whole: bool = True) -> pa.Table | None:
    """meta/episodes in order of episode_index, or None where nothing is listed yet.

    With `whole` a damaged file is an error, without it what the file listed is left out.
    """
    tables = []
    for file in sorted((path / "meta" / "episodes").glob("*/*.parquet")):
        try:
            tables.append(pq.ParquetFile(file).read())
        except DAMAGE as error:
            if whole:
                raise damaged(file, error) from error
    if not tables:
        return None
    plain = [table.replace_schema_metadata(None) for table in tables]
    return pa.concat_tables(plain, promote_options="default").sort_by("episode_index")
