"""The pool: newest first, bounded, beside the caller; killed, restarted, out of budget, at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from embodied.llm.ask_pool import AskPool, ask_all
from embodied.llm.chat import BudgetSpent, ChatError
from tests.builders import wait_until


class Model:
    """Answers a question with itself in capitals, once `gate` is open; keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.fails: list[Exception] = []

    def __call__(self, questions: Sequence[str]) -> list[str]:
        self.batches.append(list(questions))
        self.entered.set()
        assert self.gate.wait(600)
        if self.fails:
            raise self.fails.pop()
        return [question.upper() for question in questions]


def test_newest_first_in_batches_and_the_oldest_fall_out_of_a_full_queue() -> None:
    model = Model()
    pool = AskPool(model, batch=2, room=3, synchronous=True)
    assert pool.submit([*"ab"]) == []
    assert pool.submit([*"cde"]) == [*"ab"]
    assert pool.questions() == [*"cde"] and pool.dropped == 2
    assert not model.batches
    assert [asked.answer for asked in pool.poll()] == [*"EDC"]
    assert model.batches == [["e", "d"], ["c"]]
    assert pool.asked == 3 and pool.calls == 2 and pool.seconds > 0


def test_a_failed_call_is_no_answer() -> None:
    model = Model()
    model.fails = [ChatError("prose")]
    pool = AskPool(model, batch=2, synchronous=True)
    pool.submit([*"ab"])
    assert [(one.answer, one.why) for one in pool.poll()] == [(None, "prose")] * 2
    assert pool.failed == 1


def test_submitting_does_not_wait_for_the_model() -> None:
    """Killed and started again, nothing is lost or counted twice."""
    model = Model()
    model.gate.clear()
    pool = AskPool(model, batch=2, workers=1)
    pool.submit([*"ab"])
    assert model.entered.wait(600)
    pool.submit(["c"])
    assert pool.poll() == [] and sorted(pool.questions()) == [*"abc"]
    pool.stop()
    assert sorted(pool.questions()) == [*"abc"]
    model.gate.set()
    assert pool.drain(600)
    assert sorted(asked.question for asked in pool.poll()) == [*"abc"] and pool.asked == 3


@pytest.mark.parametrize("synchronous", [False, True])
def test_as_many_are_asked_at_a_time_as_there_are_workers(synchronous: bool) -> None:
    """All four wait for each other: fewer at a time would never end."""
    together = threading.Barrier(4)

    def ask(questions: Sequence[str]) -> list[int]:
        return [together.wait(600) + 1 for _ in questions]

    pool = AskPool(ask, workers=4, synchronous=synchronous)
    pool.submit([*"abcdefgh"])
    assert pool.drain(20)
    assert [asked.question for asked in pool.poll()] == [*"hgfedcba"]  # as they were asked


def test_one_slow_question_holds_back_no_other() -> None:
    model, slow = Model(), threading.Event()

    def ask(questions: Sequence[str]) -> list[str]:
        assert questions[0] != "slow" or slow.wait(600)
        return model(questions)

    pool = AskPool(ask, workers=2)
    pool.submit([*"abc", "slow"])
    found: list[str] = []
    wait_until(lambda: found.extend(one.question for one in pool.poll()) or len(found) == 3)
    assert sorted(found) == [*"abc"] and pool.questions() == ["slow"]
    slow.set()
    assert pool.drain(600)


def test_a_spent_budget_leaves_questions_waiting() -> None:
    model = Model()
    model.fails = [BudgetSpent("10 calls are used up")]
    pool = AskPool(model, batch=2, workers=1, synchronous=True)
    pool.submit([*"abc"])
    assert pool.poll() == [] and pool.spent == "10 calls are used up"
    assert pool.questions() == [*"abc"] and len(model.batches) == 1
    assert pool.discard() == [*"abc"] and not pool.pending


def test_a_spent_budget_does_not_lose_what_is_in_flight() -> None:
    slow, entered = threading.Event(), threading.Event()

    def ask(questions: Sequence[str]) -> list[str]:
        if questions[0] == "slow":
            entered.set()
            assert slow.wait(600)
            return ["SLOW"]
        assert entered.wait(600)
        threading.Timer(0.05, slow.set).start()
        raise BudgetSpent("spent")

    pool = AskPool(ask, workers=2)
    pool.submit(["a", "slow"])
    assert not pool.drain(600)
    assert [asked.answer for asked in pool.poll()] == ["SLOW"] and pool.questions() == ["a"]


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_fault_is_the_learners_to_see(synchronous: bool) -> None:
    model = Model()
    model.fails = [ZeroDivisionError("a bug")]
    pool = AskPool(model, batch=9, synchronous=synchronous)
    pool.submit([*"ab"])
    assert not pool.drain(600)
    model.gate.clear()  # its thread may ask again at once
    with pytest.raises(ZeroDivisionError, match="a bug"):
        pool.poll()
    assert pool.questions() == [*"ab"]
    model.gate.set()
    assert pool.drain(600)
    assert len(pool.poll()) == 2


def test_all_answers_come_in_order() -> None:
    together = threading.Barrier(3)

    def ask(number: int) -> int:
        together.wait(600)
        return 10 * number

    assert ask_all(ask, range(6), workers=3) == [0, 10, 20, 30, 40, 50]
    assert ask_all(ask, [], workers=3) == []
    for workers in (1, 2):
        with pytest.raises(ZeroDivisionError):
            ask_all(lambda number: 1 // number, [1, 0, 2], workers)
