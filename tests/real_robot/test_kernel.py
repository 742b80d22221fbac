"""The kernel is told from the rest: what it imports, how large it is, and what its README says."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "real_robot" / "kernel"
README = (KERNEL / "README.md").read_text()
SEEN = {"embodied", "embodied.core", "embodied.core.bounds", "embodied.core.errors"}
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def test_it_imports_nothing_of_the_rest() -> None:
    """Not through others either."""
    modules = [f"embodied.real_robot.kernel.{path.stem}" for path in KERNEL.glob("[a-z]*.py")]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    own = {name for name in loaded if name.partition(".")[0] == "embodied"}
    assert own - set(modules) <= SEEN | {"embodied.real_robot", "embodied.real_robot.kernel"}
    for path in KERNEL.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                known = top in sys.stdlib_module_names or top in ("numpy", "ruckig")
                inside = name in SEEN or name.startswith("embodied.real_robot.kernel.")
                assert known or inside, f"{path.name} imports {name}"


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor a comment nor a docstring."""
    source = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def test_the_readme_says_how_large_it_is() -> None:
    files = list(KERNEL.glob("*.py"))
    found = re.search(r": ([\d,]+) lines of code in (\d+) files", README)
    assert found is not None and int(found[2]) == len(files)
    count = sum(map(code_lines, files))
    said = int(found[1].replace(",", ""))
    assert abs(count - said) < 50, f"say {round(count, -2):,} lines in real_robot/kernel/README.md"
    named = set(re.findall(r"`(\w+)`", README.partition("## In which order")[2].partition("##")[0]))
    assert named == {path.stem for path in files} - {"__init__"}


def test_every_promise_has_its_test() -> None:
    promises = README.partition("## What it promises")[2].partition("## What is outside")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, f"no test: {row}"
        for file, test in named:
            assert f"def {test}(" in (Path(__file__).parent / file).read_text(), f"{file}: {test}"
