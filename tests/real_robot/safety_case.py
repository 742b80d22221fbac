"""The safety case: `python -m tests.real_robot.safety_case` runs the tests that `hazards.yaml`
names and writes hazards, requirements, results and what is left to docs/safety_case.md.

With `again`, only tests that did not pass when the page was written are run: simulated robots need
a calm machine.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "safety_case.md"


@dataclass(frozen=True)
class Hazard:
    """One entry of the file; `tests` are FILE::TEST."""

    hazard: str
    required: str
    tests: tuple[str, ...]
    left: str


def hazards() -> list[Hazard]:
    """All entries of the file."""
    entries = yaml.safe_load((HERE / "hazards.yaml").read_text())
    return [Hazard(**{**each, "tests": tuple(each["tests"])}) for each in entries]


def file_of(test: str) -> Path:
    """The file of FILE::TEST."""
    return HERE / f"test_{test.partition('::')[0]}.py"


def exists(test: str) -> bool:
    """Whether FILE::TEST is a test."""
    file = file_of(test)
    if not file.exists():
        return False
    names = {
        node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    return test.partition("::")[2] in names


class Results:
    """A plugin of pytest: how the cases of each test went; `kept`: tests that passed before."""

    def __init__(self, kept: dict[str, str] | None = None) -> None:
        self.kept = kept or {}
        self.counts: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            file, _, name = report.nodeid.partition("::")
            test = f"{Path(file).stem.removeprefix('test_')}::{name.partition('[')[0]}"
            self.counts.setdefault(test, Counter())[report.outcome] += 1

    def line(self, test: str) -> str:
        """How the cases of FILE::TEST went, for people."""
        counts = self.counts.get(test)
        if test in self.kept:
            return self.kept[test]
        if not counts:
            return "NOT RUN"
        if counts["failed"]:
            return f"FAILED ({counts['failed']} of {counts.total()})"
        if counts["skipped"]:
            return f"passed {counts['passed']}, skipped {counts['skipped']}"
        return f"passed ({counts['passed']})" if counts["passed"] > 1 else "passed"


def page(entries: list[Hazard], results: Results) -> str:
    """The page: a heading for each hazard."""
    parts: list[str] = []
    for number, each in enumerate(entries, 1):
        tests = [
            f"| `{test.partition('::')[2]}` | `tests/real_robot/test_{test.partition('::')[0]}.py` "
            f"| {results.line(test)} |"
            for test in each.tests
        ]
        rows = "\n".join(["| test | file | result |", "|---|---|---|", *tests])
        parts.append(
            f"## H{number}. {each.hazard}\n\n**Required.** {each.required.strip()}\n\n{rows}\n\n"
            f"**Left.** {each.left.strip()}"
        )
    tests = {test for each in entries for test in each.tests}
    passed = sum(results.line(test).startswith("passed") for test in tests)
    run = (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}: "
        f"{passed} of {len(tests)} tests passed."
    )
    template = (HERE / "safety_case.md").read_text()
    return template.format(hazards="\n\n".join(parts), run=run)


ROW = re.compile(
    r"^\| `(\w+)` \| `tests/real_robot/test_(\w+)\.py` \| (passed.*) \|$", re.MULTILINE
)


def main(again: bool) -> int:
    """Run the tests and write the page; pytest's exit status."""
    entries = hazards()
    before = PAGE.read_text() if again else ""
    results = Results({f"{file}::{name}": said for name, file, said in ROW.findall(before)})
    tests = sorted({test for each in entries for test in each.tests} - results.kept.keys())
    ids = [f"{file_of(test)}::{test.partition('::')[2]}" for test in tests]
    status = pytest.main(["-q", *ids], plugins=[results]) if ids else 0
    PAGE.write_text(page(entries, results))
    return int(status)


if __name__ == "__main__":
    sys.exit(main("again" in sys.argv[1:]))
