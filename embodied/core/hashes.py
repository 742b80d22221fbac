"""SHA-256 of files, and whether those of a checkpoint are as they were saved; imports no torch.

The `files` in about.json are the hashes of all other files of its checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from embodied.core.files import read_json

ABOUT, FILES = "about.json", "files"


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's present content."""
    found = path.stat()
    return _hash(path.resolve(), found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(maxsize=64)
def _hash(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_in(folder: Path) -> dict[str, str]:
    """The hashes of the files in `folder` by name, but for about.json, which holds them."""
    return {file.name: file_hash(file) for file in sorted(folder.iterdir()) if file.name != ABOUT}


def read_about(folder: Path) -> dict[str, Any]:
    """The facts in the about.json of a checkpoint. OSError, ValueError, TypeError."""
    return dict(read_json(folder / ABOUT))


def damage(folder: Path, names: Iterable[str]) -> str:
    """Why the files `names` of a checkpoint are not those that were saved; empty where they are, or
    neither there nor saved, and in a checkpoint of format 1, which has no hashes."""
    try:
        about = read_about(folder)
        if about.get("format", 1) == 1:
            return ""
        known: dict[str, str] = dict(about[FILES])
        for name in names:
            file = folder / name
            if name not in known and not file.exists():
                continue
            if not file.exists():
                return f"{name} is missing"
            if not file.is_file() or file_hash(file) != known.get(name):
                return f"{name} is not what was saved"
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        return f"{ABOUT} cannot be read" if not isinstance(error, OSError) else str(error)
    return ""
