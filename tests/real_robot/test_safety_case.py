"""The safety case names tests that exist, and its page is of the present file."""

from __future__ import annotations

import ast
from collections import Counter

from tests.real_robot.mutation import mutants
from tests.real_robot.safety_case import PAGE, Results, exists, hazards


def test_every_test_that_a_hazard_names_exists() -> None:
    named = [test for each in hazards() for test in each.tests]
    assert len(named) > 50 and [test for test in named if not exists(test)] == []
    assert not exists("chain::test_that_nobody_wrote") and not exists("nothing::test_it")
    assert all(each.tests and each.left and each.required for each in hazards())


def test_the_page_is_of_the_present_file_and_of_a_run_that_passed() -> None:
    page = PAGE.read_text()
    for number, each in enumerate(hazards(), 1):
        assert f"## H{number}. {each.hazard}\n" in page, "python -m tests.real_robot.safety_case"
        assert each.required.strip() in page and each.left.strip() in page
        for test in each.tests:
            assert f"`{test.partition('::')[2]}`" in page
    assert "NOT RUN" not in page and "FAILED" not in page


def test_what_failed_is_said() -> None:
    results, counts = Results(), Counter[str]()
    assert results.line("chain::test_it") == "NOT RUN"
    results.counts["chain::test_it"] = counts
    for outcome, said in (
        ("passed", "passed"),
        ("skipped", "passed 1, skipped 1"),
        ("failed", "FAILED (1 of 3)"),
    ):
        counts[outcome] += 1
        assert results.line("chain::test_it") == said


def test_mutants_are_other_programs_that_can_be_read() -> None:
    source = b"def f(x: int = 3) -> bool:\n    g(x)\n    return not x < 1 and (x + 2.0) > 0\n"
    made = list(mutants("f.py", source))
    assert [(each.old, each.new) for each in made] == [
        *(("3", "300"), ("g(x)", "pass"), ("and", "or"), ("not", ""), ("<", "<="), ("1", "0")),
        *((">", ">="), ("+", "-"), ("2.0", "200.0"), ("0", "1")),
    ]
    for each in made:
        ast.parse(source[: each.start] + each.new.encode() + source[each.end :])
