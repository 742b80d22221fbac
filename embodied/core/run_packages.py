"""The user's packages that a run was allowed to use, kept in the user's own state folder.

`embodied train "allow=[my_lab]"` writes the run folder, the packages and a hash of its run.yaml to
STATE/allowed.json (STATE: $XDG_STATE_HOME/embodied, else ~/.local/state/embodied). A later command
that names that run need not repeat `allow=`. Nothing inside a run folder is believed: a folder of
another person has no entry there, and one whose run.yaml was changed is not the run that was
allowed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from embodied.core import build
from embodied.core.atomic_write import write_json

SETTINGS = "run.yaml"


def state_file() -> Path:
    """STATE/allowed.json; it need not exist."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "embodied" / "allowed.json"


def remember(folder: Path) -> None:
    """Keep the user's packages that this process was asked to allow, for the run in `folder`.
    Packages of this project that reach robots and networks are allowed anew each time."""
    asked = [name for name in build.asked_packages() if name.split(".")[0] != "embodied"]
    known = _read()
    if not asked and str(folder.resolve()) not in known:
        return
    known[str(folder.resolve())] = {"packages": asked, "sha256": _hash(folder)}
    known = {run: entry for run, entry in known.items() if (Path(run) / SETTINGS).exists()}
    state_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(state_file(), known)


def recall(words: Iterable[str]) -> list[str]:
    """Allow what was allowed for the runs that `words` of a command line name ("outputs/a",
    "init=outputs/a", a checkpoint in it); returns the packages that this adds. Where several runs
    are named, only what was allowed for each of them: a run of another person gains nothing from
    being named beside one of the user's own."""
    known = _read()
    folders = set[Path]()
    for word in words if known else ():
        if (folder := _run_of(word)) is not None:
            folders.add(folder.resolve())
    allowed: list[set[str]] = []
    for folder in folders:  # an entry counts if the run still is the one that it was made for
        entry = known.get(str(folder))
        if entry is None or entry["sha256"] != _hash(folder):
            allowed.append(set())
        else:
            allowed.append(set(map(str, entry["packages"])))
    shared = set[str].intersection(*allowed) if allowed else set[str]()
    added = sorted(shared - {*build.asked_packages()})
    for package in added:
        build.allow(package)
    return added


def _run_of(word: str) -> Path | None:
    """The run folder that a word names, by itself or by a checkpoint."""
    # os.path answers for a word that is too long to be a path, too.
    path = Path(word if os.path.exists(word) else word.rpartition("=")[2])
    places = (path, path.parent.parent)
    return next((place for place in places if os.path.isfile(place / SETTINGS)), None)


def _hash(folder: Path) -> str:
    return hashlib.sha256((folder / SETTINGS).read_bytes()).hexdigest()


def _read() -> dict[str, Any]:
    try:
        known = json.loads(state_file().read_text())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], known) if isinstance(known, dict) else {}
