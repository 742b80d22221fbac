"""The safety case names tests that exist, and its page is of the present file."""

from __future__ import annotations

from collections import Counter

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
