"""Merge, drop and split: which episodes of which datasets go to which new folder."""

# pyright: basic
# (pyarrow has no types)
from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from embodied.core.atomic_write import sync
from embodied.core.files import MALFORMED, reading
from embodied.datasets.editing import write
from embodied.datasets.editing.check import CheckConfig, Finding, check
from embodied.datasets.editing.write import Chosen, Copied, Source, open_source, write_dataset
from embodied.datasets.lerobot.schema import (
    OURS,
    DatasetError,
    columns_of_info,
    spec_of_info,
)

DAMAGED = (*MALFORMED, pa.ArrowException)  # what wrong files of a dataset lead to


@contextmanager
def new_folder(out: Path | str) -> Iterator[Path]:
    """Yields a partial folder beside `out`, which is renamed to `out` at the end of the block.
    After an error nothing is left. A killed process leaves `.NAME.partial`, which the next attempt
    clears away. DatasetError where `out` exists, or where another process is writing it."""
    out = Path(out)
    if out.exists():
        raise DatasetError(f"{out} exists; edits go to a new folder: out=ANOTHER")
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise DatasetError(f"{out} is being written by another process; wait for it") from error
    try:
        for one in partial.iterdir():
            if one.is_dir():
                shutil.rmtree(one)
            else:
                one.unlink()
        with reading("the dataset", *DAMAGED):
            yield partial
        partial.rename(out)
        sync(out.parent)
    except OSError as error:
        reason = error.strerror or error
        raise DatasetError(f"could not write {out}: {reason}; nothing was changed") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(handle)


@contextmanager
def scratch_of(partial: Path) -> Iterator[Path]:
    """A folder for copies that are needed while `partial` is made."""
    scratch = partial / ".scratch"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


Choose = Callable[[Source], list[int]]


def merge(paths: Sequence[Path | str], out: Path | str) -> Copied:
    """All episodes of `paths`, in order. DatasetError where their features or rates differ."""
    with new_folder(out) as partial, scratch_of(partial) as scratch:
        sources = [open_source(path, scratch) for path in paths]
        here = sources[0]
        for there in sources[1:]:
            found = write.differences(here.info, there.info)
            if (OURS in here.info) != (OURS in there.info):
                found.append("one was recorded by LeRobot, the other by embodied")
            elif OURS in here.info and _layout(here.info) != _layout(there.info):
                found.append("their Specs differ (bounds, names or period)")
            if found:
                line = f"{here.path} and {there.path} cannot be merged"
                raise DatasetError(f"{line}: {'; '.join(found)}")
        return write_dataset(partial, [Chosen(s, list(range(len(s)))) for s in sources])


def drop(path: Path | str, out: Path | str, choose: Choose) -> Copied:
    """The episodes of `path` but those that `choose` names."""
    with new_folder(out) as partial, scratch_of(partial) as scratch:
        source = open_source(path, scratch)
        gone = set(choose(source))
        kept = [episode for episode in range(len(source)) if episode not in gone]
        if not kept:
            raise DatasetError(f"all {len(source)} episodes would be dropped; nothing is left")
        return write_dataset(partial, [Chosen(source, kept)])


def _layout(info: Mapping[str, Any]) -> Any:
    """What two datasets of ours must agree in."""
    return spec_of_info(info), columns_of_info(info), info[OURS]["spec"].get("text")


@dataclass(frozen=True)
class Split:
    """How many episodes the first part gets: `share` of them, or `episodes`. `seed`: which ones
    (None: the first ones)."""

    share: float | None = None
    episodes: int | None = None
    seed: int | None = 0

    def first(self, count: int) -> list[int]:
        """The episodes of the first part, in order."""
        if (self.share is None) == (self.episodes is None):
            raise DatasetError("a split needs either share=0.9 or episodes=50")
        wanted = self.episodes if self.share is None else round(self.share * count)
        if wanted is None or not 0 < wanted < count:
            raise DatasetError(f"{wanted} of {count} episodes leave one of the two parts empty")
        if self.seed is None:
            return list(range(wanted))
        return sorted(np.random.default_rng(self.seed).permutation(count)[:wanted].tolist())


def split(path: Path | str, out: Path | str, rest: Path | str, how: Split) -> tuple[Copied, Copied]:
    """Two new datasets with different episodes of `path`; neither appears before both are whole."""
    if Path(out) == Path(rest):
        raise DatasetError(f"out={out} and rest={rest} are the same folder")
    with new_folder(rest) as second, new_folder(out) as first, scratch_of(first) as scratch:
        source = open_source(path, scratch)
        chosen = how.first(len(source))
        other = [e for e in range(len(source)) if e not in set(chosen)]
        made = write_dataset(first, [Chosen(source, chosen)])
        return made, write_dataset(second, [Chosen(source, other)])


def checked(path: Path | str, config: CheckConfig) -> tuple[list[Finding], int]:
    """What is wrong with the dataset at `path`, and how many episodes it has."""
    with TemporaryDirectory() as scratch, reading(path, *DAMAGED):
        source = open_source(path, Path(scratch))
        return list(check(source, config)), len(source)


def numbered(words: str) -> Choose:
    """Episodes by number: "3,7-9"; DatasetError for what is no number or no episode."""
    numbers: set[int] = set()
    for word in str(words).replace(" ", "").strip("[]").split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if found is None:
            raise DatasetError(f"episodes={words} should be numbers and ranges such as 3,7-9")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise DatasetError(f"episodes={word}: the range ends before it begins")
        numbers |= set(range(first, last + 1))

    def choose(source: Source) -> list[int]:
        if max(numbers) >= len(source):
            raise DatasetError(
                f"there is no episode {max(numbers)}: {source.path} has {len(source)}, from 0"
            )
        return sorted(numbers)

    return choose


def failed(source: Source) -> list[int]:
    """The episodes in which no step is marked as a success."""
    name = "next.success"
    if name not in source.info["features"]:
        raise DatasetError(f"{source.path} does not record success (it has no {name})")
    return [e for e in range(len(source)) if not np.any(source.rows(e)[name].to_pylist())]
