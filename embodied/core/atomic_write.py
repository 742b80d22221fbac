"""Atomic, fsynced writes: a file is either complete or absent. And a lock on the folder of a run,
into which one process at a time writes."""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from embodied.core.build import ConfigError
from embodied.core.errors import ContractWarning

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
MOST = 300  # bytes of the line in it, which names its holder


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
    write_durably(path, lambda sink: sink.write(json.dumps(data, indent=1).encode()))


@contextmanager
def locked(folder: Path | str) -> Generator[None]:
    """Keep other processes from writing into `folder`, which is made where there is none, until the
    block ends. ConfigError that names the process which does. The system lets go of the lock when
    its holder ends, however that ends. A file system without locks is a warning. A folder that was
    made here and is empty afterwards is taken away again."""
    folder = Path(folder)
    made, file = not folder.exists(), folder / LOCK
    folder.mkdir(parents=True, exist_ok=True)
    handle = _acquired(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # before the lock goes: its next holder makes a new one
        os.close(handle)
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _acquired(file: Path) -> int:
    """The locked `file`, with a line that names this process."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if sys.platform == "win32":
                raise OSError(0, "no locks on Windows")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, MOST).decode(errors="replace") or "another process"
            os.close(handle)
            raise ConfigError(
                f"{file.parent} is being written by {holder}: wait until that ends, or choose "
                "another folder (out=DIR)"
            ) from error
        except OSError as error:
            line = f"{file.parent} cannot be locked ({error.strerror}): let no other process write"
            warnings.warn(f"{line} into it", ContractWarning, stacklevel=4)
        else:
            if not _is(file, handle):  # its holder has ended meanwhile, and taken it away
                os.close(handle)
                continue
        with suppress(OSError):  # on a full disk it is locked without a name
            os.truncate(handle, 0)
            os.write(handle, _this_process())
        return handle


def _is(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _this_process() -> bytes:
    words = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    line = f"process {os.getpid()} on {socket.gethostname()} ({words})"
    return "".join(letter for letter in line if letter.isprintable()).encode()[:MOST]
