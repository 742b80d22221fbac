"""Files of somebody who means harm, at the doors where they come in: no code runs, nothing outside
of out= is written, less than 2 GB are taken, and one line says what is wrong."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from embodied.core.files import FileError, inside, read_bytes, reading
from tests.attacks.files import ATTACKS, FILM, Attack, Bases
from tests.attacks.fuzz import kept
from tests.builders import ROOT
from tests.tiers import only_all

MOST = 2 * 10**9  # bytes of memory
FEW = [name for name, attack in ATTACKS.items() if not attack.heavy]
HEAVY = [name for name, attack in ATTACKS.items() if attack.heavy]


@dataclass(frozen=True)
class Outcome:
    """`changed`: what is different outside of the folder for output; `answer`: what the process
    said, None where it ended at this file."""

    changed: set[str]
    answer: dict[str, Any] | None
    ended: str


def listing(place: Path) -> set[str]:
    """Every file in `place`, with its size and time; without what a door may write."""
    found = set[str]()
    for top, folders, names in os.walk(place):
        for name in [*folders, *names]:
            path = (Path(top) / name).relative_to(place)
            if not str(path).startswith(("work/out", "work/.out.partial")):
                about = (place / path).lstat()
                time = 0 if stat.S_ISDIR(about.st_mode) else about.st_mtime_ns
                found.add(f"{path} {about.st_mode} {about.st_size} {time}")
    return found


def run_all(names: Sequence[str], root: Path) -> dict[str, Outcome]:
    """Bring the files to their doors, in one process unless it ends before the last one."""
    bases, jobs, before = Bases(root / "bases"), list[list[str]](), dict[str, set[str]]()
    for name in names:
        place = root / f"{len(jobs)}"
        victim = place / "work" / "victim" / FILM
        victim.parent.mkdir(parents=True)
        victim.write_text("kept")
        path = ATTACKS[name].make(bases, place / "in")
        jobs.append([name, ATTACKS[name].door, str(path), str(place / "work" / "out")])
        before[name] = listing(place)
    answers, ends = dict[str, dict[str, Any]](), dict[str, str]()
    left = jobs
    while left:
        (root / "jobs.json").write_text(json.dumps(left))
        done = subprocess.run(
            [sys.executable, "-m", "tests.attacks.child", str(root / "jobs.json")],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(root), "PWNED": str(root)},
            capture_output=True,
            text=True,
        )
        new = [json.loads(line) for line in done.stdout.splitlines()]
        answers |= {answer["name"]: answer for answer in new}
        if len(new) < len(left):
            ends[left[len(new)][0]] = f"exit {done.returncode}: {done.stderr[-1500:]}"
        left = left[len(new) + 1 :]
    return {
        name: Outcome(before[name] ^ listing(root / str(i)), answers.get(name), ends.get(name, ""))
        for i, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    @cache
    def of(heavy: bool) -> dict[str, Outcome]:
        return run_all(HEAVY if heavy else FEW, tmp_path_factory.mktemp("attacks"))

    yield of


def require_refused(attack: Attack, outcome: Outcome) -> None:
    answer = outcome.answer
    assert answer is not None, f"the process ended: {outcome.ended}"
    assert not outcome.changed
    assert not answer["started"]
    assert answer["taken"] < MOST, f"{answer['taken'] / 1e9:.2f} GB"
    line = answer["line"]
    if attack.says is None and line is None:
        return
    assert line is not None, "it was believed"
    assert "\n" not in line, line
    assert (attack.says or "") in line, line


@pytest.mark.parametrize("name", FEW)
def test_a_file_is_refused_in_one_line(name: str, outcomes: Any) -> None:
    require_refused(ATTACKS[name], outcomes(False)[name])


@only_all
@pytest.mark.parametrize("name", HEAVY)
def test_a_file_that_asks_for_much_is_refused(name: str, outcomes: Any) -> None:
    require_refused(ATTACKS[name], outcomes(True)[name])


def test_a_name_stays_in_its_folder(tmp_path: Path) -> None:
    folder, hub = tmp_path / "a", tmp_path / "repo" / "snapshots" / "1" / "meta"
    folder.mkdir()
    (folder / "own").symlink_to("sub")
    (folder / "out").symlink_to(tmp_path)
    assert inside(folder, "sub/file") == folder / "sub/file"
    assert inside(folder, "own/file") == folder / "own/file"
    for name in ("../a/b", "sub/../../b", "/etc/passwd", "out/b", "a\0b", str(folder / "own")):
        with pytest.raises(FileError):
            inside(folder, name)
    hub.mkdir(parents=True)
    (hub / "info.json").symlink_to("../../../blobs/1234")  # as huggingface_hub stores it
    assert inside(hub, "info.json") == hub / "info.json"


def test_only_ordinary_files_of_some_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"x" * 11)
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "long"):
        with pytest.raises(FileError):
            read_bytes(place, 10)
    assert read_bytes(tmp_path / "long", 11) == b"x" * 11


def test_what_is_no_fault_of_the_file_stays_a_traceback() -> None:
    for error in (RuntimeError("a bug"), TypeError("a bug"), KeyError("bug"), AssertionError()):
        with pytest.raises(type(error)), reading("a file", ValueError):
            raise error
    faults = (MemoryError(), RecursionError("deep"), ZeroDivisionError("by zero"), ValueError())
    for error in faults:
        with pytest.raises(FileError) as refused, reading("a file", ValueError):
            raise error
        assert "a file" in str(refused.value) and "\n" not in str(refused.value)


SLOW = {
    *("adopt-act", "adopt-diffusion", "check", "classifier", "drop", "eval", "export", "info"),
    *("lerobot", "maniskill", "minari", "mjcf", "rlds", "robomimic", "study", "urdf", "view"),
    *("resume", "zarr"),
}


def require_right(*names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.fuzz", "--replay", *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert not wrong, "\n".join(wrong)


@only_all  # a sample of them: test_files.py
def test_no_kept_try_is_wrong() -> None:
    require_right(*sorted({name for name, _ in kept()} - SLOW))


@only_all
def test_no_kept_try_of_a_slow_door_is_wrong() -> None:
    require_right(*sorted(SLOW))
