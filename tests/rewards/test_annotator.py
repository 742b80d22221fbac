"""The annotator: newest first, bounded, beside the caller; killed, restarted, out of budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from embodied.llm.chat import BudgetSpent, ChatError
from embodied.rewards.language.annotator import Annotator, Label, Question


class Judged:
    """Answers 1 to everything, once `gate` is open; remembers the order of what it was asked."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.fails: list[Exception] = []

    def __call__(self, questions: Sequence[Question]) -> list[Label]:
        self.batches.append([question[0] for question in questions])
        self.entered.set()
        assert self.gate.wait(10)
        if self.fails:
            raise self.fails.pop()
        return [Label(question, 1.0, "test", seconds=0.05) for question in questions]


def names(*texts: str) -> list[Question]:
    return [(text,) for text in texts]


def test_newest_first_in_batches() -> None:
    judge = Judged()
    annotator = Annotator(judge, batch=2, room=10, beside=False)
    annotator.submit(names("a", "b", "c", "d", "e"))
    while annotator.work():
        pass
    assert judge.batches == [["e", "d"], ["c", "b"], ["a"]]
    assert [label.question[0] for label in annotator.poll()] == ["e", "d", "c", "b", "a"]
    assert annotator.asked == 5 and annotator.calls == 3
    assert annotator.seconds == pytest.approx(0.15)


def test_the_oldest_fall_out_of_a_full_queue() -> None:
    annotator = Annotator(Judged(), batch=2, room=3, beside=False)
    assert annotator.submit(names("a", "b")) == []
    assert annotator.submit(names("c", "d", "e")) == names("a", "b")
    assert annotator.questions() == names("c", "d", "e") and annotator.dropped == 2


def test_a_failed_call_abstains() -> None:
    judge = Judged()
    judge.fails = [ChatError("prose")]
    annotator = Annotator(judge, batch=2, room=9, beside=False)
    annotator.submit(names("a", "b"))
    while annotator.work():
        pass
    assert [(one.value, one.why) for one in annotator.poll()] == [(None, "prose")] * 2
    assert annotator.failed == 1


def test_submitting_does_not_wait_for_the_judge() -> None:
    judge = Judged()
    judge.gate.clear()
    annotator = Annotator(judge, batch=1, room=9, beside=True)
    annotator.submit(names("a"))
    assert judge.entered.wait(10)
    annotator.submit(names("b"))
    assert annotator.poll() == [] and annotator.questions() == names("b", "a")
    judge.gate.set()
    assert annotator.drain(10)
    assert {label.question[0] for label in annotator.poll()} == {"a", "b"}


def test_killed_and_started_again_nothing_is_lost_or_counted_twice() -> None:
    judge = Judged()
    judge.gate.clear()
    annotator = Annotator(judge, batch=2, room=9, beside=True)
    annotator.submit(names("a", "b", "c"))
    assert judge.entered.wait(10)
    old = annotator.thread
    annotator.stop()
    assert annotator.questions() == names("a", "b", "c")
    judge.gate.set()
    assert old is not None
    old.join(10)
    assert annotator.poll() == [] or annotator.thread is not None
    annotator.start()
    assert annotator.drain(10)
    found = [label.question[0] for label in annotator.poll()]
    assert sorted(found) == ["a", "b", "c"] and annotator.asked == 3


def test_a_spent_budget_leaves_questions_waiting() -> None:
    judge = Judged()
    judge.fails = [BudgetSpent("10 calls are used up")]
    annotator = Annotator(judge, batch=2, room=9, beside=False)
    annotator.submit(names("a", "b", "c"))
    while annotator.work():
        pass
    assert annotator.spent == "10 calls are used up"
    assert annotator.questions() == names("a", "b", "c") and annotator.poll() == []


@pytest.mark.parametrize("beside", [False, True])
def test_a_fault_is_the_learners_to_see(beside: bool) -> None:
    judge = Judged()
    judge.fails = [ZeroDivisionError("a bug")]
    annotator = Annotator(judge, batch=9, room=9, beside=beside)
    annotator.submit(names("a", "b"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        if beside:
            assert annotator.thread is not None or annotator.fault is not None
            annotator.drain(10)
            annotator.poll()
        else:
            annotator.work()
    assert annotator.questions() == names("a", "b")
    assert not beside or annotator.poll() == []
    assert annotator.drain(10) if beside else annotator.work()
    assert len(annotator.poll()) == 2
