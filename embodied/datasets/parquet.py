"""Reading foreign Parquet files, of which a few bytes may stand for many."""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embodied.core.files import ROOM, require_file, require_room

WIDTH = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
MOST_ROWS = 2**16  # of a batch


def read_parquet(
    file: Path, columns: Sequence[str] | None = None, episodes: tuple[int, int] | None = None
) -> pa.Table:
    """The table in a Parquet file: some `columns` (None: all), the rows whose `episode_index` is
    within `episodes` (None: all). FileError where it would take more memory than
    `core.files.allowed`: by its metadata, which say how much it is without compression, and counted
    batch by batch, as they do not say how often a value of a dictionary is repeated. OSError,
    pa.ArrowException for a file that is damaged."""
    size = require_file(file)
    with pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True) as opened:
        worst = _require_sizes(opened, file, size)
        schema = opened.schema_arrow
        if missing := [name for name in columns or () if name not in schema.names]:
            raise KeyError(f"it has no column {missing[0]}")
        batches: list[pa.RecordBatch] = []
        taken = 0
        rows = max(1, min(MOST_ROWS, ROOM // 8 // max(worst, 1)))
        groups = _groups(opened, episodes)
        for batch in opened.iter_batches(rows, groups, columns, use_threads=False):
            if episodes is not None:
                number = batch["episode_index"].to_numpy(zero_copy_only=False)
                within = (number >= episodes[0]) & (number <= episodes[1])
                batch = batch.filter(pa.array(within))
            taken += batch.nbytes
            require_room(taken, size, file)
            batches.append(batch)
        kept = [field for field in schema if columns is None or field.name in columns]
        return pa.Table.from_batches(batches, pa.schema(kept, schema.metadata))


def _require_sizes(opened: pq.ParquetFile, file: Path, size: int) -> int:
    """FileError where the metadata promise too much; the bytes that one row may take of values that
    a dictionary repeats."""
    about = opened.metadata
    total = worst = 0
    for group in (about.row_group(i) for i in range(about.num_row_groups)):
        repeated = 0
        for column in (group.column(i) for i in range(group.num_columns)):
            fixed = WIDTH.get(column.physical_type)
            if fixed is None:
                total += column.total_uncompressed_size
                repeated += column.total_uncompressed_size
            else:
                total += fixed * column.num_values
            require_room(total, size, file)
        worst = max(worst, repeated)
    require_room(about.num_rows, size, file)
    return worst


def _groups(opened: pq.ParquetFile, episodes: tuple[int, int] | None) -> list[int]:
    """The row groups that may hold rows of `episodes`, by their statistics."""
    about = opened.metadata
    every = range(about.num_row_groups)
    at = {about.schema.column(i).path: i for i in range(about.num_columns)}.get("episode_index")
    if episodes is None or at is None:
        return list(every)

    def may(number: int) -> bool:
        found: Any = about.row_group(number).column(at).statistics
        if found is None or not found.has_min_max:
            return True
        return found.min <= episodes[1] and found.max >= episodes[0]

    return [number for number in every if may(number)]
