"""Foreign files: the names in them stay in a folder, their sizes are looked at before
they are read, and what libraries raise while they read becomes one line.

A file may take `allowed` bytes of memory: 1 GB, and beyond that 20 times its own size.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied.core.build import ConfigError

SETTINGS = 2**20  # bytes of a YAML file
TEXT = 2**25  # bytes of another text, of a header and of an answer
ROOM = 2**30  # bytes that the content of any file may take in memory
GROWTH = 20  # times its own size that a larger file may take
SIDE = 2**13  # pixels: the longest side of a picture
# What a RuntimeError of a library says where a size in a file is impossible.
SIZE = re.compile(r"alloc|memory|overflow|too (large|big|many)|storage|negative dim", re.IGNORECASE)
# What our code raises where a value that a file holds is of another kind than it should be.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, EOFError)


class FileError(ConfigError):
    """A foreign file cannot be used; one line says which and why."""


def cache_folder() -> Path:
    """Where this user's machine keeps what can be made anew: $XDG_CACHE_HOME/embodied."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied"


def inside(folder: Path, name: str | Path) -> Path:
    """The file `name`, as another file calls it, in `folder`. FileError where the name, or a link
    on its way, leads out of the folder. The links of a download of the Hugging Face hub
    (snapshots/REVISION/NAME to blobs/HASH) stay inside."""
    parts = Path(name).parts
    try:
        root, found = folder.resolve(), (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, links in a circle
        raise FileError(f"{folder}: {str(name)[:100]!r} is no name of a file ({error})") from error
    stored = [above.parent / "blobs" for above in root.parents if above.name == "snapshots"]
    within = any(found.is_relative_to(place) for place in (root, *stored))
    if not within or ".." in parts or Path(name).is_absolute():
        raise FileError(
            f"{folder}: a file in it names {str(name)[:100]!r}, which is outside of the folder; if "
            "you trust it, copy that file into the folder"
        )
    return folder / name


def require_names(names: Iterable[Any], where: Path | str) -> None:
    """FileError unless each of `names`, which `where` lists, can be a part of a file's name."""
    for name in names:
        plain = isinstance(name, str) and name.isprintable() and 0 < len(name) <= 200
        if not plain or name in (".", "..") or "/" in name or "\\" in name:
            raise FileError(f"{where}: {str(name)[:100]!r} should be a name, and no path")


def require_file(file: Path) -> int:
    """The bytes of an ordinary file. OSError where there is none; FileError for a device, a pipe or
    a folder in its place."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FileError(f"{file} is no ordinary file (a device, a pipe or a folder); get another")
    return found.st_size


def read_bytes(file: Path, most: int = TEXT) -> bytes:
    """The content of a file of at most `most` bytes. OSError, FileError."""
    size = require_file(file)
    if size > most:
        raise FileError(f"{file} has {size:,} bytes, and may have {most:,}: is it another file?")
    return file.read_bytes()


def read_text(file: Path, most: int = TEXT) -> str:
    """The text in a file of at most `most` bytes. OSError, FileError."""
    with reading(file, UnicodeError):
        return read_bytes(file, most).decode()


def read_json(file: Path) -> Any:
    """What a JSON file holds. OSError where it cannot be opened; FileError."""
    with reading(file, ValueError):
        return json.loads(read_text(file))


def allowed(size: int) -> int:
    """The bytes of memory that the content of a file of `size` bytes may take."""
    return ROOM + GROWTH * size


def require_room(needed: float, size: int, what: Path | str) -> None:
    """FileError if `what`, in a file of `size` bytes, needs more memory than `allowed` (bytes)."""
    if not 0 <= needed <= allowed(size):
        raise FileError(
            f"{what} would need {needed / 1e9:,.1f} GB of memory, and its file has {size:,} bytes: "
            "it is damaged, or meant to do harm"
        )


@contextmanager
def reading(what: Path | str, *malformed: type[Exception]) -> Generator[None]:
    """Around code that reads `what`, a foreign file: where it is nested too deeply, needs
    too much memory or leads to a division by zero, FileError says so in one line; also for the
    `malformed` errors. Everything else, and our own errors, pass."""
    try:
        yield
    except (MemoryError, RecursionError, ArithmeticError, *malformed) as error:
        if type(error).__module__.startswith("embodied."):
            raise
        raise _unreadable(what, error) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or not SIZE.search(str(error)):
            raise
        raise _unreadable(what, error) from error


def _unreadable(what: Path | str, error: Exception) -> FileError:
    known: dict[type[Exception], str] = {
        MemoryError: "it needs too much memory",
        RecursionError: "it is nested too deeply",
    }
    said = str(error).strip().partition("\n")[0][:200]
    reason = known.get(type(error)) or f"{type(error).__name__}: {said}"
    return FileError(f"{what} cannot be read ({reason}); if it should be sound, copy it again")
