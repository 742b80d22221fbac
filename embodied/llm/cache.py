"""Append-only cache of language-model answers with their requests, one JSON line each.

Lines are written whole and synced to disk. Several processes may append to one file. A partial
line, left by a killed process, is moved to `FILE.broken` with a warning.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied.core.atomic_write import sync_folder
from embodied.llm.chat import Answer, ChatError
from embodied.llm.request import Request

logger = logging.getLogger(__name__)
Record = dict[
    str, Any
]  # key, request, text, data, error, served, fingerprint, time, usage, seconds


class Cache:
    """Records by the key of their request; the newest counts. The first `put` creates the file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.records: dict[str, Record] = {}
        self.read_to = 0
        self.lock = threading.Lock()
        self._read()

    def __len__(self) -> int:
        return len(self.records)

    def get(self, key: str) -> Record | None:
        """The record of a request, also if another process has just added it."""
        with self.lock:
            if key not in self.records:
                self._read()
            return self.records.get(key)

    def put(self, record: Record) -> None:
        """Append a record and sync it to disk. ChatError if it cannot be written."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            with self.lock, self._open() as file:
                _set_aside(self.path, file)
                os.write(file, line)
                os.fsync(file)
        except OSError as error:
            raise ChatError(f"cannot write the cache {self.path}: {error.strerror}") from error
        self.records[record["key"]] = record

    def _read(self) -> None:
        """Read the lines that were appended since the last call."""
        if not self.path.exists() or self.path.stat().st_size == self.read_to:
            return
        with self._open() as file:
            _set_aside(self.path, file)
            os.lseek(file, min(self.read_to, os.fstat(file).st_size), os.SEEK_SET)
            with os.fdopen(os.dup(file), "rb") as source:
                data = source.read()
                self.read_to = os.fstat(file).st_size
        unreadable = 0
        for line in data.splitlines():
            try:
                record = json.loads(line)
                self.records[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                unreadable += 1
        if unreadable:
            logger.warning("%s: %d lines cannot be parsed and are ignored", self.path, unreadable)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file, created if needed, locked for this process."""
        fresh = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if fresh:
                sync_folder(self.path.parent)
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


def answer_from(record: Record) -> Answer:
    """A cached answer; ChatError if the record is of a failure."""
    if record.get("error"):
        raise ChatError(f"{record['error']} (cached)")
    usage = record.get("usage") or {}
    return Answer(
        record["text"],
        record.get("data"),
        record.get("served") or record["request"]["model"],
        record["key"],
        cached=True,
        tokens=int(usage.get("total_tokens", 0)),
        seconds=float(record.get("seconds", 0.0)),
    )


def missing(question: Request, path: Path | str) -> ChatError:
    """The error for a request that is not in the cache."""
    return ChatError(
        f"{path} has no answer of {question.model} to {question.shown} ({question.key[:12]}); "
        "only cached answers are allowed here"
    )
