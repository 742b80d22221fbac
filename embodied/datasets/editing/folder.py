"""A new folder that appears complete or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embodied.core.atomic_write import sync_folder
from embodied.datasets.lerobot.schema import DatasetError


@contextmanager
def new_folder(out: Path | str) -> Iterator[Path]:
    """Yields a partial folder beside `out`, which is renamed to `out` at the end of the block.

    After an error nothing is left. A killed process leaves `.NAME.partial`, which the next attempt
    clears away. DatasetError where `out` exists, or where another process is writing it.
    """
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
        yield partial
        partial.rename(out)
        sync_folder(out.parent)
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
