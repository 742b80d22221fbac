"""Mutation score of the kernel: `python -m tests.real_robot.mutation [FILE...]`, FILE being one of
real_robot/kernel.

Each mutant of a file (`mutants.py`) has to make a unit test fail that runs the changed line. It is
tried in a process of its own, forked from one that has imported and collected everything. A mutant
of a class's or module's own statements is imported anew. A test that sleeps, starts a process, or
takes more than LONGEST s, is no unit test; the cheapest ones are run first, as many in one process
as take BUDGET s. A mutant that takes far longer than its tests is caught: something hangs.

What was caught is kept in build/mutation.json, and not tried again until the file changes.
`equivalent_mutants.yaml` lists mutants that are no other program, with the reason.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import yaml

from tests.real_robot.mutants import Mutant, mutants

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = "embodied.real_robot.kernel"
KERNEL = ROOT / "embodied" / "real_robot" / "kernel"
FILES = tuple(
    sorted({file.stem for file in KERNEL.glob("*.py")} - {"__init__", "messages"})
)  # what `messages` declares has no right and wrong: both ends take it
TESTS = (
    *("chain", "checks", "limiter", "measured", "measured_edges", "hand", "mailbox", "rate"),
    *("control", "guarded_loop", "source", "stop_test", "yielding", "homing", "hold_to_run"),
    *("takeover", "seam", "watchdog", "invariants", "report", "loop"),
)
"""tests/real_robot/test_NAME.py, among which the unit tests are looked for."""
WARM = (
    *("embodied.envs", "numpy", "torch", "mujoco", "ruckig", "hypothesis.stateful"),
    *("embodied.core.checkpoint", "embodied.embodiments.fr3"),
)
"""What is imported once for all mutants: nothing that imports the kernel."""
LONGEST = 1.0  # s of a unit test
BUDGET = 4.0  # s of the tests of one process
SLOWER, LEAST = 10, 10  # times as long as usual, and s, that a mutant's tests may take
KEPT = ROOT / "build" / "mutation.json"
OPTIONS = ("-q", "-s", "-x", "-p", "no:cacheprovider", "-p", "no:randomly")

Reached = dict[str, tuple[float, dict[str, list[int]]]]
"""For each test how long it takes (s), and which lines of which files it runs."""


class NotUnit(Exception):
    """A test sleeps or starts a process."""


def source(file: str) -> bytes:
    """Of a file of the kernel."""
    return (KERNEL / f"{file}.py").read_bytes()


def equivalents() -> list[dict[str, str]]:
    """Entries of the list: `file`, `function`, `line` (how its text begins), `change`, `why`."""
    return yaml.safe_load((HERE / "equivalent_mutants.yaml").read_text()) or []


def is_equivalent(file: str, mutant: Mutant, text: bytes) -> bool:
    """Whether the mutant of a file with that text is listed."""
    line = text.splitlines()[mutant.line - 1].decode().strip()
    place = (file, mutant.where.function, mutant.change)
    return any(
        (each["file"], each["function"], each["change"]) == place and line.startswith(each["line"])
        for each in equivalents()
    )


def forked(work: Callable[[], Any], seconds: float) -> tuple[int, bytes]:
    """Exit status of a process that does `work`, and its result as JSON."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child:
        os.close(sender)
        with open(receiver, "rb") as file:
            said = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
    status = 1
    try:
        os.close(receiver)
        resource.setrlimit(resource.RLIMIT_CPU, (round(seconds), round(seconds) + 5))
        signal.alarm(60 * round(seconds))
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        result = json.dumps(work()).encode()
        with open(sender, "wb") as file:
            file.write(result)
        status = 0
    finally:
        os._exit(status)


def refuse_processes_and_sleep() -> None:
    """NotUnit where a test starts a process or sleeps. git may say the commit of a checkpoint."""
    from multiprocessing.process import BaseProcess

    start = subprocess.Popen.__init__

    def refuse(*args: Any, **settings: Any) -> Any:
        if len(args) < 2 or args[1][0] != "git":
            raise NotUnit
        return start(*args, **settings)

    def sleep(seconds: float) -> None:
        if seconds > 0:
            raise NotUnit

    subprocess.Popen.__init__ = refuse
    BaseProcess.start = refuse
    time.sleep = sleep


def passes(item: pytest.Item) -> bool:
    """Whether a test passes."""
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, log=False, nextitem=None)
    return not any(report.failed for report in reports)


def reach(item: pytest.Item) -> tuple[float, dict[str, list[int]]] | None:
    """How long a test takes (s), and which lines it runs; None where it is no unit test."""
    refuse_processes_and_sleep()
    began = time.process_time()
    if not passes(item):
        return None
    seconds = time.process_time() - began
    ran: dict[str, set[int]] = {}

    def enter(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(str(KERNEL)):
            return None
        lines = ran.setdefault(Path(frame.f_code.co_filename).stem, set())

        def line(frame: Any, event: str, arg: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    if seconds <= LONGEST:
        sys.settrace(enter)
        passes(item)
        sys.settrace(None)
    return seconds, {file: sorted(lines) for file, lines in ran.items()}


def codes(code: CodeType) -> Iterator[CodeType]:
    """All code in a code."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


def functions(owner: ModuleType | type) -> Iterator[FunctionType]:
    """The functions of a module, and of its classes."""
    for value in vars(owner).values():
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type) and value.__module__.startswith(PACKAGE):
            yield from functions(value)


def change_functions(file: str, text: bytes) -> None:
    """Let the functions of an imported file do what the ones in `text` do."""
    module = sys.modules[f"{PACKAGE}.{file}"]
    other = compile(text, str(module.__file__), "exec", dont_inherit=True)
    named = {code.co_qualname: code for code in codes(other)}
    for function in functions(module):
        if function.__module__ == module.__name__:
            function.__code__ = named.get(function.__code__.co_qualname, function.__code__)


class Changed(SourceFileLoader):
    """Finds and loads a file of the kernel, with another text."""

    def __init__(self, file: str, text: bytes) -> None:
        super().__init__(f"{PACKAGE}.{file}", str(KERNEL / f"{file}.py"))
        self.text = text

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Loop:
    """A plugin of pytest: `work` with the collected tests, in place of running them."""

    def __init__(self, work: Callable[[dict[str, pytest.Item]], None]) -> None:
        self.work = work

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        session.config._tmp_path_factory.getbasetemp()  # pyright: ignore
        self.work({item.nodeid: item for item in session.items})
        return True


class Score:
    """Results of one run of this program, and those that were kept."""

    def __init__(self, files: list[str], folder: Path) -> None:
        self.files = files
        self.folder = folder
        self.kept: dict[str, Any] = {"tests": {}, "caught": {}, "collected": []}
        if KEPT.exists():
            self.kept |= json.loads(KEPT.read_text())

    def keep(self) -> None:
        """Write what is known."""
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(self.kept))

    def entry(self, kind: str, name: str, text: bytes, empty: Any) -> Any:
        """What is known of a file with that text."""
        digest = hashlib.sha256(text).hexdigest()
        entry = self.kept[kind].get(name)
        if entry is None or entry["of"] != digest:
            entry = self.kept[kind][name] = {"of": digest, "known": empty}
        return entry["known"]

    def caught(self, file: str) -> list[str]:
        """Mutants of a file that were caught."""
        return self.entry("caught", file, source(file), [])

    def reached(self) -> Reached:
        """All unit tests."""
        known = [entry["known"] for entry in self.kept["tests"].values()]
        collected = set(self.kept["collected"])
        return {
            test: each
            for tests in known
            for test, each in tests.items()
            if each and test in collected
        }

    def look(self, items: dict[str, pytest.Item]) -> None:
        """Run every test once, and note what it reaches."""
        kernel = b"".join(map(source, FILES))
        self.kept["collected"] = list(items)
        for test, item in items.items():
            known = self.entry("tests", item.path.stem, item.path.read_bytes() + kernel, {})
            if test in known:
                continue
            status, said = forked(lambda item=item: reach(item), 4 * LONGEST)
            known[test] = json.loads(said) if status == 0 else None
            self.keep()
            usual = known[test] is not None and known[test][0] <= LONGEST
            print("unit test" if usual else "left out ", test, flush=True)

    def tests_of(
        self, file: str, mutant: Mutant | None, text: bytes
    ) -> Iterator[tuple[list[str], float]]:
        """The unit tests that can see a mutant (None: any), in parts of BUDGET s, and how long each
        part takes (s): first those of the file's own tests, then the others, the cheapest first."""
        lines = set[int]() if mutant is None else mutant.lines(text)
        total, chosen = 0.0, list[str]()

        def rank(each: tuple[str, tuple[float, dict[str, list[int]]]]) -> tuple[bool, float]:
            return f"/test_{file}.py:" not in each[0], each[1][0]

        for test, (seconds, ran) in sorted(self.reached().items(), key=rank):
            here = ran.get(file, [])
            if seconds > LONGEST or not here or (lines and lines.isdisjoint(here)):
                continue
            if chosen and total + seconds > BUDGET:
                yield chosen, total
                total, chosen = 0.0, []
            chosen.append(test)
            total += seconds
        yield chosen, total

    def attack(self, in_functions: bool, fails: Callable[..., Callable[[], bool]]) -> None:
        """Try all mutants that are in functions, or all that are not; `fails(file, text, tests)`
        makes what a process does. SystemExit where the unchanged file fails."""
        for file in self.files:
            text, caught = source(file), self.caught(file)
            tests, seconds = next(self.tests_of(file, None, text))
            if forked(fails(file, text, tests), 60 + SLOWER * seconds) != (0, b"false"):
                raise SystemExit(f"the tests of {file} fail without a mutant")
            for mutant in mutants(text):
                if bool(mutant.where.function) != in_functions or mutant.key in caught:
                    continue
                if is_equivalent(file, mutant, text):
                    continue
                ran = 0
                for tests, seconds in self.tests_of(file, mutant, text):
                    work = fails(file, mutant.applied(text), tests)
                    status, said = forked(work, max(LEAST, SLOWER * seconds))
                    ran += len(tests)
                    if status or said == b"true":
                        caught.append(mutant.key)
                        self.keep()
                        break
                else:
                    print(f"SURVIVED {file}.py:{mutant} ({ran} tests)", flush=True)

    def in_session(self, items: dict[str, pytest.Item]) -> None:
        """Look at the tests, then try the mutants in functions."""

        def fails(file: str, text: bytes, tests: list[str]) -> Callable[[], bool]:
            def work() -> bool:
                refuse_processes_and_sleep()
                change_functions(file, text)
                return not all(passes(items[test]) for test in tests)

            return work

        self.look(items)
        self.attack(True, fails)

    def session(self) -> None:
        """Everything that needs collected tests."""
        tests = [str(HERE / f"test_{name}.py") for name in TESTS]
        options = [*OPTIONS, f"--basetemp={self.folder / 'session'}"]
        if pytest.main([*options, *tests], plugins=[Loop(self.in_session)]) not in (0, 5):
            raise SystemExit("the tests cannot be collected")

    def anew(self, file: str, text: bytes, tests: list[str]) -> Callable[[], bool]:
        """A process that imports the changed file and runs the tests."""

        def work() -> bool:
            refuse_processes_and_sleep()
            sys.meta_path.insert(0, Changed(file, text))
            options = [*OPTIONS, f"--basetemp={self.folder / 'anew'}"]
            return bool(tests) and pytest.main([*options, *tests]) != 0

        return work

    def report(self) -> None:
        """Print the score of each file and of all."""
        all_caught = all_possible = 0
        for file in self.files:
            text = source(file)
            possible = [each for each in mutants(text) if not is_equivalent(file, each, text)]
            caught = len({each.key for each in possible} & set(self.caught(file)))
            print(f"{file}: {caught} of {len(possible)} ({caught / len(possible):.1%})")
            all_caught, all_possible = all_caught + caught, all_possible + len(possible)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        share = all_caught / all_possible
        print(f"all: {all_caught} of {all_possible} ({share:.1%}) at {commit.stdout.strip()}")


def compile_arm() -> None:
    """Compile the FR3's model once: MuJoCo keeps what it has read of meshes."""
    from embodied.embodiments import fr3

    file = fr3.mjcf()
    spec = sys.modules["mujoco"].MjSpec.from_file(str(file))
    spec.meshdir = str(file.parent / "meshes")
    spec.compile()


def main(files: list[str]) -> None:
    """Try all mutants of the files that were not caught before."""
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in WARM:
        importlib.import_module(name)
    compile_arm()
    if PACKAGE in sys.modules:
        raise SystemExit("a module of WARM imports the kernel")
    settings = sys.modules["hypothesis"].settings
    settings.register_profile("mutation", database=None, derandomize=True)
    settings.load_profile("mutation")
    with tempfile.TemporaryDirectory() as folder:
        score = Score(files or list(FILES), Path(folder))
        if child := os.fork():  # it imports the kernel, which this process never does
            if os.waitpid(child, 0)[1]:
                raise SystemExit(1)
        else:
            score.session()
            os._exit(0)
        score = Score(files or list(FILES), Path(folder))
        score.attack(False, score.anew)
    score.report()


if __name__ == "__main__":
    main(sys.argv[1:])
