"""Atomic, fsynced writes: a file is either complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_durably(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a temporary file with `write`, fsync it, then rename it to `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as sink:
            write(sink)
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file, or a folder so that new and renamed files in it survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON to `path`, atomically and fsynced."""
    write_durably(path, lambda sink: sink.write(json.dumps(data, indent=1).encode()))
