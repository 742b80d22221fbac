"""Mutants of the kernel: what is tried, and what is said to be the same."""

from __future__ import annotations

import ast

from tests.real_robot.mutants import mutants
from tests.real_robot.mutation import FILES, equivalents, is_equivalent, source
from tests.tiers import only_all

PROGRAM = b"""LEAST: Annotated[int, Bound(0)] = 3
@cached(4)
class A:
    def f(self, x: int = 3) -> bool:
        g(min(x, -LEAST))
        self.x = 5
        return not (x < 1).any() and (x + 2.0) > 0
"""


def test_mutants_are_other_programs_that_can_be_read() -> None:
    made = mutants(PROGRAM)
    assert [each.change for each in made] == [
        *("3 -> 300", "3 -> 300", "g(min(x, -LEAST)) -> pass", "min -> max", "- -> "),
        *("self.x = 5 -> pass", "5 -> 500", "not -> ", "< -> <=", "1 -> 0", "any -> all"),
        *("and -> or", "+ -> -", "2.0 -> 200.0", "> -> >=", "0 -> 1"),
    ]
    for each in made:
        ast.parse(each.applied(PROGRAM))
    assert {each.where.function for each in made} == {"", "A.f"}
    assert [each.lines(PROGRAM) for each in made[:3]] == [{5}, {4, 5, 6, 7}, {5}]


@only_all  # for `make nightly`
def test_what_is_said_to_be_the_same_is_a_mutant() -> None:
    found = [
        (file, mutant.where.function, mutant.change)
        for file in FILES
        for mutant in mutants(source(file))
        if is_equivalent(file, mutant, source(file))
    ]
    said = {(each["file"], each["function"], each["change"]) for each in equivalents()}
    assert set(found) == said and all(each["why"] for each in equivalents())
