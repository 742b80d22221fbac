"""Mutation score of the kernel: `python -m tests.real_robot.mutation [COUNT] [SEED] [FILE...]`.

A mutant is a copy of the repository in which one operator or constant of a kernel's file is another
one, or one call is left out. The file's nearest tests have to fail. COUNT mutants are drawn (0: all
of them); each is printed with what became of it, then the share that was caught. A mutant whose
tests take five times as long as usual counts as caught: something hangs.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNEL = {
    "real_robot/kernel/chain.py": ("chain", "long_run"),
    "real_robot/kernel/checks.py": ("chain", "homing", "hold_to_run", "invariants"),
    "real_robot/kernel/channels.py": ("guarded_loop",),
    "real_robot/kernel/guarded_loop.py": ("guarded_loop", "control"),
    "real_robot/kernel/last_resort.py": ("guarded_loop",),
    "real_robot/kernel/loop.py": ("control", "guarded_loop", "stop_test", "invariants", "homing"),
    "real_robot/kernel/rate.py": ("rate",),
    "real_robot/kernel/yielding.py": ("yielding",),
    "real_robot/kernel/report.py": ("guarded_loop", "control"),
    "real_robot/kernel/source.py": ("source",),
    "real_robot/control/chunk_follower.py": ("control", "guarded_loop", "takeover"),
    "real_robot/control/policy_source.py": ("control", "guarded_loop", "takeover"),
    "real_robot/kernel/mailbox.py": ("mailbox",),
    "real_robot/ipc/channels.py": ("mailbox",),
    "real_robot/watchdog/client.py": ("watchdog",),
}
"""Files of the kernel, and their nearest tests (tests/real_robot/test_NAME.py)."""
OPERATORS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+"},
    **{"*": "/", "/": "*", "and": "or", "or": "and", "is": "is not", "is not": "is"},
    **{"in": "not in", "not in": "in", "|": "&", "&": "|"},
}
SLOWER, LEAST = 5.0, 30.0  # times as long as usual, and s, that a mutant's tests may take


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of `file` become `new`."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old!r} -> {self.new!r}"


def mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of a source."""
    lines = source.split(b"\n")
    starts = [0]
    for each in lines:
        starts.append(starts[-1] + len(each) + 1)

    def place(line: int | None, column: int | None) -> int:
        return starts[(line or 1) - 1] + (column or 0)

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = place(node.lineno, node.col_offset)
        return start, place(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        """The operator between two expressions."""
        begin, end = span(left)[1], span(right)[0]
        text = source[begin:end].decode()
        old = " ".join(text.strip(" ()\\\n").split())
        if old in OPERATORS and text.count(old) == 1:
            at = begin + text.encode().index(old.encode())
            yield Mutant(file, left.lineno, at, at + len(old), old, OPERATORS[old])

    for node in _visited(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from between(left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(file, node.lineno, span(node)[0], span(node.operand)[0], "not", "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            start, end = span(node)
            yield Mutant(file, node.lineno, start, end, str(node.value), _other(node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            start, end = span(node)
            yield Mutant(file, node.lineno, start, end, source[start:end].decode(), "pass")


def _other(value: bool | int | float) -> str:
    """Another constant: clearly another one, since a little more is often as right."""
    if isinstance(value, bool):
        return str(not value)
    if value in (0, 1):
        return repr(type(value)(1 - value))
    return repr(value * 100)


def _visited(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, whose bounds are settings', and texts with values in them."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or isinstance(tree, ast.JoinedStr):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from _visited(node)


class Copy:
    """A copy of the working tree, whose kernel is changed and tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.usual: dict[str, float] = {}
        """How long (s) the tests of each file take."""
        self.said = ""
        """The last words of the newest tests."""
        listed = ["git", "ls-files", "-co", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in names.splitlines():
            if (
                not name.startswith("docs/images")
                and (ROOT / name).is_symlink() | (ROOT / name).is_file()
            ):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def tested(self, file: str, limit: float | None = None) -> bool:
        """Whether the nearest tests of `file` pass. TimeoutExpired after `limit` s."""
        tests = [f"tests/real_robot/test_{name}.py" for name in KERNEL[file]]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, timeout=limit, check=False
        )
        self.said = done.stdout.decode(errors="replace")[-600:]
        return done.returncode == 0

    def survives(self, mutant: Mutant) -> bool:
        """Whether no test sees the mutant."""
        file = mutant.file
        if file not in self.usual:
            began = time.monotonic()
            if not self.tested(file):
                raise SystemExit(f"the tests of {file} fail without a mutant:\n{self.said}")
            self.usual[file] = time.monotonic() - began
        path = self.folder / file
        whole = path.read_bytes()
        try:
            path.write_bytes(whole[: mutant.start] + mutant.new.encode() + whole[mutant.end :])
            self._forget(path)
            return self.tested(file, max(LEAST, SLOWER * self.usual[file]))
        except subprocess.TimeoutExpired:
            return False
        finally:
            path.write_bytes(whole)
            self._forget(path)

    def _forget(self, path: Path) -> None:
        """Remove what Python compiled: it compares times to the second, and sizes."""
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()


def main(words: list[str]) -> None:
    """Draw, test and print mutants, then the score of each file and of all."""
    count, seed = (*map(int, words[:2]), *(40, 0)[len(words[:2]) :])
    found = [
        mutant
        for file in words[2:] or KERNEL
        for mutant in mutants(file, (ROOT / file).read_bytes())
    ]
    drawn = random.Random(seed).sample(found, min(count or len(found), len(found)))
    caught: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for mutant in sorted(drawn, key=lambda each: (each.file, each.start)):
            survived = copy.survives(mutant)
            caught[mutant.file] += not survived
            print("SURVIVED" if survived else "caught  ", mutant, flush=True)
    for file, total in sorted(Counter(mutant.file for mutant in drawn).items()):
        print(f"{file}: {caught[file]} of {total}")
    print(f"{caught.total()} of {len(drawn)} caught, of {len(found)} possible (seed {seed})")


if __name__ == "__main__":
    main(sys.argv[1:])
