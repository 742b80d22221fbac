"""The daemon's log, written by a thread: the main loop does not wait for the folder's disk."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Queue
from typing import Any

MOST_WAITING = 10_000  # lines; further ones are lost while a disk hangs


@contextmanager
def logged(logger: logging.Logger, file: Path) -> Generator[None]:
    """Write what `logger` is told to `file` (two of 1 MiB at most), in order, until the end."""
    logging.raiseExceptions = False  # a log that cannot be written stops nothing
    sink = RotatingFileHandler(file, maxBytes=1 << 20, backupCount=1)
    sink.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    lines: Queue[Any] = Queue(MOST_WAITING)
    source, writer = QueueHandler(lines), QueueListener(lines, sink)
    logger.addHandler(source)
    logger.setLevel(logging.INFO)
    writer.start()
    try:
        yield
    finally:
        logger.removeHandler(source)
        writer.stop()
