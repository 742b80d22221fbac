"""AppendLog: a JSONL file that several processes append to and read.

Lines are written whole and synced to disk. A partial last line, left by a killed process, is moved
to `FILE.broken` with a warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied.core.atomic_write import sync
from embodied.llm.chat import ChatError

logger = logging.getLogger(__name__)


class AppendLog:
    """The first `append` creates the file. Not thread-safe: the owner locks."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.read_to = 0

    def append(self, record: dict[str, Any]) -> None:
        """Append a record and sync it to disk. ChatError if it cannot be written."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            with self._open() as file:
                _set_aside(self.path, file)
                os.write(file, line)
                os.fsync(file)
        except OSError as error:
            raise ChatError(f"cannot write {self.path}: {error.strerror}") from error

    def read(self) -> list[Any]:
        """The values of the lines that were appended since the last call, also by this object."""
        if not self.path.exists() or self.path.stat().st_size == self.read_to:
            return []
        with self._open() as file:
            _set_aside(self.path, file)
            os.lseek(file, min(self.read_to, os.fstat(file).st_size), os.SEEK_SET)
            with os.fdopen(os.dup(file), "rb") as source:
                data = source.read()
                self.read_to = os.fstat(file).st_size
        values: list[Any] = []
        lines = data.splitlines()
        for line in lines:
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
        if unreadable := len(lines) - len(values):
            logger.warning("%s: %d lines cannot be parsed and are ignored", self.path, unreadable)
        return values

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file, created if needed, locked for this process."""
        fresh = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if fresh:
                sync(self.path.parent)
            yield file
        finally:
            os.close(file)


def _set_aside(path: Path, file: int) -> None:
    """Move a partial last line of a locked file to `FILE.broken`."""
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return
    whole = os.pread(file, size, 0).rfind(b"\n") + 1
    aside = path.with_name(path.name + ".broken")
    with aside.open("ab") as sink:
        sink.write(os.pread(file, size - whole, whole) + b"\n")
        sink.flush()
        os.fsync(sink.fileno())
    os.ftruncate(file, whole)
    os.fsync(file)
    logger.warning("%s: its last line is incomplete and was moved to %s", path, aside)
