"""Coverage-guided fuzzing of the doors where files and records of others come in.

    python -m tests.attacks.fuzz [SUBJECT ...] [--minutes M] [--work DIR] [--keep]

SUBJECTs are those of `tests.attacks.subjects` (default: all), fuzzed together for M minutes of
computing. A try is right where the door uses the changed file or refuses it in one line; anything
else is a finding and is written to DIR/findings: another exception, 60 s of computing, 2 GB of
memory, something written outside of the folder for output, a process that is started, a connection.
It needs atheris, which is no requirement of this project: pip install atheris. `--keep` writes the
few tries that together reach most of what was reached to `corpus/kept.jsonl`; `make test` does
these again, and what was a finding once (`corpus/found.jsonl`), without atheris.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.attacks.child import OUR_OWN, STARTS, WIRES, brought, forget_peak, peak

if TYPE_CHECKING:
    from tests.attacks.edits import Base, Edit

MOST = 2 * 10**9  # bytes of memory
CPU = 60  # s of computing for one try
WALL = 900.0  # s for one try
GROWN = 15 * 10**8  # bytes of a process that is started anew
LEAKY = 4 * 10**9  # bytes of addresses that tries may add
KEPT = Path(__file__).with_name("corpus")
FOUND, CHOSEN = KEPT / "found.jsonl", KEPT / "kept.jsonl"
MOST_KEPT = 10  # tries of a subject
MOST_ENDS = 50  # processes
AGAIN = 3  # exit status of a process that has grown
OURS = f"{os.sep}embodied{os.sep}"
OWN_LINE = re.compile(r'File "[^"]*/embodied/([^"]*)", line (\d+)')
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("shutil.rmtree", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
CHANGES += ("os.symlink", "os.link")


class Tries:
    """Sound files of a subject in `folder`, and one try after the other with changes of them."""

    def __init__(self, name: str, folder: Path) -> None:
        from tests.attacks.edits import Base
        from tests.attacks.files import Bases
        from tests.attacks.subjects import SUBJECTS

        self.door = SUBJECTS[name].door
        self.out = folder / "work" / "out"
        self.scratch = folder / "work" / "out-tmp"  # for temporary files
        self.scratch.mkdir(parents=True)
        (folder / "in").mkdir()
        self.free = (str(self.out), str(self.out.parent / ".out"), "/dev/null", "/dev/shm/")
        self.did: list[str] = []
        with contextlib.redirect_stdout(io.StringIO()):
            made = SUBJECTS[name].make(Bases(folder.parent / "bases"), folder / "in" / "in")
        self.base: Base = Base(made)
        self.watching = False
        sys.addaudithook(self._audit)

    def _audit(self, event: str, words: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event in (*STARTS, *WIRES) and not OUR_OWN.search(str(words)):
            self.did.append(f"{event} {words!s:.200}")
        elif event == "open" and words[2] & WRITES:
            self._changed(event, words[0])
        elif event in CHANGES and words[-1] in (None, -1):  # not in a folder that is open
            self._changed(event, words[event in ("os.rename", "os.link", "os.symlink")])

    def _changed(self, event: str, path: Any) -> None:
        place = "/dev/null" if isinstance(path, int) else os.path.abspath(os.fsdecode(path))
        if not place.startswith(self.free):
            self.did.append(f"{event} {place:.200}")

    def one(self, edits: list[Edit]) -> str | None:
        """Try it: what is wrong with the outcome, None where it is right. Unwritable."""
        files = self.base.changed(edits)
        for name, data in files.items():
            (self.base.path / name).write_bytes(data)
        self.did.clear()
        forget_peak()
        said, tempfile.tempdir = io.StringIO(), str(self.scratch)
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(record=True),
        ):
            self.watching = True
            line = brought(self.door, self.base.path, self.out)
            self.watching = False
        tempfile.tempdir = None
        for name in files:
            (self.base.path / name).write_bytes(self.base.data[name])
        for old in {*self.out.parent.iterdir(), *self.scratch.iterdir()} - {self.scratch}:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        if line is not None and "\n" in line:
            return line
        return "; ".join(self.did[:3]) or (f"{peak() / 1e9:.1f} GB" if peak() > MOST else None)


def all_tries(names: Sequence[str]) -> dict[str, Tries]:
    from tests.attacks.subjects import SUBJECTS

    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    return {name: Tries(name, place / name) for name in names or SUBJECTS}


def kept() -> list[tuple[str, list[Edit]]]:
    """Subjects and changes: former findings, and those that reach most."""
    lines = [line for file in (FOUND, CHOSEN) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def replay(names: Sequence[str]) -> Iterator[str]:
    """Do what was kept again; what is wrong."""
    tries = all_tries(names)
    for name, edits in [*((name, []) for name in tries), *kept()]:
        if name in tries and (wrong := tries[name].one(edits)):
            yield f"{json.dumps([name, edits])}: {wrong}"


class Fuzzer:
    """What libFuzzer calls, in a process of its own."""

    def __init__(self, names: Sequence[str], work: Path, seconds: float) -> None:
        from tests.attacks import edits

        self.edits, self.work, self.seconds = edits, work, seconds
        self.tries, self.words = all_tries(names), constants()
        self.count, self.cpu = Counter[str](), Counter[str]()
        for tries in self.tries.values():
            tries.one([])
        self.begun = time.process_time()
        self.log = (work / "hang").open("w")
        faulthandler.register(signal.SIGXCPU, self.log, chain=True)
        roof = memory()[0] + LEAKY
        resource.setrlimit(resource.RLIMIT_AS, (roof, roof))

    def parsed(self, data: bytes) -> tuple[str, list[Edit]]:
        """The subject and the changes that `data` is the JSON of; else the first, without any."""
        try:
            name, edits = json.loads(data)
            return (name, edits) if name in self.tries else (next(iter(self.tries)), [])
        except (ValueError, TypeError, RecursionError):
            return next(iter(self.tries)), []

    def test(self, data: bytes) -> int:
        try:
            return self._test(data)
        except BaseException:  # of this file: libFuzzer would hang at its exit
            traceback.print_exc(file=self.log)
            self.log.flush()
            os._exit(1)

    def _test(self, data: bytes) -> int:
        name, edits = self.parsed(data)
        (self.work / "current").write_bytes(data)
        before = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(before) + CPU, resource.RLIM_INFINITY))
        faulthandler.dump_traceback_later(WALL, exit=True, file=self.log)
        try:
            wrong = self.tries[name].one(edits)
        except self.edits.Unwritable:
            return -1
        finally:
            faulthandler.cancel_dump_traceback_later()
        now = time.process_time()
        self.count[name] += 1
        self.cpu[name] += now - before  # pyright: ignore[reportArgumentType]
        if wrong:
            note(self.work / "findings", data, wrong)
        if memory()[1] > GROWN or now - self.begun > self.seconds:
            self.end(AGAIN if now - self.begun <= self.seconds else 0)
        return 0

    def end(self, code: int) -> NoReturn:
        with (self.work / "tries.txt").open("a") as sink:
            for name, count in self.count.items():
                sink.write(f"{name} {count} {self.cpu[name]:.1f}\n")
        os._exit(code)

    def mutate(self, data: bytes, most: int, seed: int) -> bytes:
        dice = random.Random(seed)
        name, edits = self.parsed(data)
        if dice.random() < 0.05:
            name, edits = dice.choice(list(self.tries)), []
        made = self.edits.mutated(edits, self.tries[name].base, self.words, dice)
        text = json.dumps([name, made]).encode()
        return text if len(text) <= most else data


def fuzz_here(names: Sequence[str], work: Path, seconds: float) -> NoReturn:
    """Fuzz in this process, for `seconds` of computing."""
    import atheris

    atheris.instrument_imports(include=["embodied"]).__enter__()  # for good: a try imports, too
    import torch

    torch.set_num_threads(1)
    fuzzer = Fuzzer(names, work, seconds)
    words = ["-rss_limit_mb=0", "-timeout=9999", "-max_len=4096", "-len_control=0"]
    words += ["-close_fd_mask=3", f"-artifact_prefix={work}/"]
    command = [sys.argv[0], str(work / "corpus"), *words]
    atheris.Setup(command, fuzzer.test, custom_mutator=fuzzer.mutate)
    atheris.Fuzz()
    fuzzer.end(0)


def memory() -> tuple[int, int]:
    """Addresses and resident memory of this process (bytes)."""
    total, resident = Path("/proc/self/statm").read_text().split()[:2]
    return 4096 * int(total), 4096 * int(resident)


def note(folder: Path, data: bytes, wrong: str) -> None:
    """Keep a finding, the shortest of those with its last line of ours and its exception."""
    lines, last = OWN_LINE.findall(wrong), wrong.strip().splitlines()[-1].split(":")[0][:60]
    digest = hashlib.sha256(f"{lines[-1:]} {last}".encode()).hexdigest()[:8]
    file = folder / f"{digest}.txt"
    if not file.exists() or len(data) < len(file.read_bytes().splitlines()[0]):
        file.write_bytes(data + b"\n" + wrong.encode(errors="replace"))


def constants() -> list[str]:
    """The short texts in our modules that are loaded: names of settings, of kinds, of types."""
    found = set[str]()
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("embodied.")]
    values = [value for module in modules for value in vars(module).values()]
    values += [each for value in values if isinstance(value, type) for each in vars(value).values()]
    for value in values:
        code = getattr(value, "__code__", None)
        found |= {c for c in getattr(code, "co_consts", ()) if isinstance(c, str)}
    return sorted(word for word in found if re.fullmatch(r"[\w./:-]{1,30}", word))


def fuzz(names: Sequence[str], work: Path, seconds: float) -> None:
    """Fuzz the subjects together, in one process after the other; what became of it is printed."""
    findings = work / "findings"
    for folder in (work / "corpus", findings):
        folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate([*([name, []] for name in names), *kept()]):
        if one[0] in names or not names:
            (work / "corpus" / f"kept-{number}").write_text(json.dumps(one))
    (work / "tries.txt").unlink(missing_ok=True)
    for _ in range(MOST_ENDS):
        left = seconds - sum(cpu for _, cpu in spent(work).values())
        words = [sys.executable, "-m", "tests.attacks.fuzz", "--here", str(work), f"{left}", *names]
        with (work / "log").open("wb") as sink:
            env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
            code = subprocess.run(words, stdout=sink, stderr=sink, env=env, check=False).returncode
        log = (work / "log").read_text(errors="replace")
        print(*re.findall(r"cov: \d+ ft: \d+ corp: \d+", log)[-1:], f"exit {code}", flush=True)
        if code == 0:
            break
        if code != AGAIN:
            said = f"{log[-2000:]}{(work / 'hang').read_text()[-2000:]}\nit ended with {code}"
            note(findings, (work / "current").read_bytes(), said)
    for name, (count, cpu) in spent(work).items():
        print(f"{name:20} {count:8.0f} tries {cpu:8.0f} s of computing")
    print(f"{len(list(findings.iterdir()))} findings in {findings}", flush=True)


def spent(work: Path) -> dict[str, tuple[float, float]]:
    """Tries and seconds of computing of each subject."""
    found: dict[str, tuple[float, float]] = {}
    file = work / "tries.txt"
    for line in file.read_text().splitlines() if file.exists() else ():
        name, count, cpu = line.split()
        before = found.get(name, (0.0, 0.0))
        found[name] = before[0] + float(count), before[1] + float(cpu)
    return found


def keep(names: Sequence[str], work: Path) -> None:
    """Write few tries of each subject that reach most of what was reached."""
    from tests.attacks.edits import Unwritable

    old = [json.loads(line) for line in CHOSEN.read_text().splitlines()]
    texts = sorted({file.read_text() for file in (work / "corpus").iterdir()}, key=len)
    made = [one for one in old if names and one[0] not in names]
    for name, tries in all_tries(names).items():
        tries.one([])
        known, lines = reached(tries, []), dict[str, set[Any]]()
        for text in texts:
            with contextlib.suppress(Unwritable, ValueError):
                if json.loads(text)[0] == name:
                    lines[text] = reached(tries, json.loads(text)[1])
        for _ in range(min(MOST_KEPT, len(lines))):
            best = max(lines, key=lambda text: len(lines[text] - known) / (len(text) + 100))
            if not lines[best] - known:
                break
            known |= lines.pop(best)
            made.append(json.loads(best))
    CHOSEN.write_text("".join(f"{json.dumps(one)}\n" for one in made))


def reached(tries: Tries, edits: list[Edit]) -> set[tuple[str, int]]:
    """The lines of this project that a try runs."""
    found = set[tuple[str, int]]()

    def line(frame: Any, event: str, _: Any) -> Any:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    sys.settrace(lambda frame, *_: line if OURS in frame.f_code.co_filename else None)
    try:
        tries.one(edits)
    finally:
        sys.settrace(None)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        fuzz_here(sys.argv[4:], Path(sys.argv[2]), float(sys.argv[3]))
    if sys.argv[1:2] == ["--replay"]:
        print(json.dumps(list(replay(sys.argv[2:]))))
        return
    parser = argparse.ArgumentParser(description="Fuzz the doors where files of others come in.")
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT")
    parser.add_argument("--minutes", type=float, default=60.0, help="of computing")
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--keep", action="store_true", help="write corpus/kept.jsonl, do not fuzz")
    args = parser.parse_args()
    work = args.work.resolve()
    if args.keep:
        keep(args.subjects, work)
    else:
        fuzz(args.subjects, work, 60 * args.minutes)


if __name__ == "__main__":
    main()
