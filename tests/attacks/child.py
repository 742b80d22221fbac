"""A process that brings files to doors: `python -m tests.attacks.child JOBS.json`.

It prints a line of JSON for each job [name, door, path, out]: the line with which the door refused
(null: it did not; with a traceback: it failed), the most memory that it took (bytes), and the
processes and connections that were started. It ends by itself where one takes too long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pyarrow

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
WIRES = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request")
SECONDS = 300.0  # for one job
OUR_OWN = re.compile(r"rev-parse|uname")  # git, and what h5py asks at its import


def peak() -> int:
    """The most resident memory since the last `forget_peak` (bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> int:
    """Memory that an earlier file left in an allocator is not counted for the next one: the
    resident memory now (bytes)."""
    pyarrow.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def brought(door: Any, path: Path, out: Path) -> str | None:
    """What is said about a file; None where it is used."""
    from embodied.mistakes import mistake

    try:
        door(path, out)
    except SystemExit as stop:
        return f"exit {stop.code}" if stop.code else None
    except BaseException as error:
        line = mistake(error) if isinstance(error, Exception) else None
        return traceback.format_exc() if line is None else line
    return None


def main(jobs: list[Any]) -> None:
    started: list[str] = []
    sys.addaudithook(
        lambda event, words: (
            started.append(f"{event} {words!s:.200}")
            if event in (*STARTS, *WIRES) and not OUR_OWN.search(str(words))
            else None
        )
    )
    answers = os.fdopen(os.dup(1), "w")
    from tests.attacks.doors import DOORS

    for name, door, path, out in jobs:
        before = forget_peak()
        started.clear()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        said = io.StringIO()
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(record=True),
        ):
            line = brought(DOORS[door], Path(path), Path(out))
        faulthandler.cancel_dump_traceback_later()
        answer = {"name": name, "line": line, "taken": peak() - before, "started": list(started)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
