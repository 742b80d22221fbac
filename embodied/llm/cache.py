"""Cache: every answer of a language model with what was asked, one JSON line each, only appended.

A label that cost money is kept for good: lines are written whole and made durable before they
count. Several processes may append to one file. A line that was cut off by a kill is set aside in
`FILE.broken`, with one warning.
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
    """Records by the key of their question; the newest counts. Made by the first `put`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.records: dict[str, Record] = {}
        self.read_to = 0
        self.lock = threading.Lock()
        self._read()

    def __len__(self) -> int:
        return len(self.records)

    def get(self, key: str) -> Record | None:
        """What is known of a question, also if another process has just asked it."""
        with self.lock:
            if key not in self.records:
                self._read()
            return self.records.get(key)

    def put(self, record: Record) -> None:
        """Append a record; when this returns it is on the disk. ChatError where it cannot be."""
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
        """Take in the lines that were appended since the last time."""
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
            logger.warning("%s: %d lines cannot be read and are left alone", self.path, unreadable)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file, made if need be, for this process alone."""
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
    """Move the end of a locked file that is no whole line to `FILE.broken`."""
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
    logger.warning("%s: its last line was cut off; set aside in %s, the rest is used", path, aside)


def answer_from(record: Record) -> Answer:
    """A remembered answer; ChatError where what is remembered is that there was none."""
    if record.get("error"):
        raise ChatError(f"{record['error']} (remembered)")
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
    """The error for a question that was never recorded."""
    return ChatError(
        f"{path} has no answer of {question.model} to {question.shown} ({question.key[:12]}); "
        "only recorded answers are allowed here"
    )
