"""AskPool: asks a language model in threads, so that training never waits for an answer.

The newest questions are asked first, because current behaviour matters most. The queue is bounded;
what is dropped is returned to the caller. Threads run while there are questions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from embodied.llm.chat import BudgetSpent, ChatError

Q = TypeVar("Q")
A = TypeVar("A")
WORKERS = 8  # threads that ask at a time


@dataclass(frozen=True)
class Asked(Generic[Q, A]):
    """A question and its answer; None if there is no usable one, and `why`."""

    question: Q
    answer: A | None
    why: str = ""


class AskPool(Generic[Q, A]):
    """Calls `ask` with up to `batch` questions in each of `workers` threads.

    With `synchronous`, `poll` asks all questions and waits for the answers, so that a run is
    repeatable. A ChatError counts as no answer to the batch. After BudgetSpent nothing is asked any
    more, and questions stay queued. Any other error is raised by the next `poll`, and its batch is
    queued again.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Q]], Sequence[A]],
        batch: int = 1,
        workers: int = WORKERS,
        room: int | None = None,
        synchronous: bool = False,
    ) -> None:
        """`room`: questions that wait at most; the oldest are dropped (None: no limit)."""
        self.ask = ask
        self.batch = batch
        self.workers = workers
        self.room = room
        self.synchronous = synchronous
        self.changed = threading.Condition()
        self.waiting: deque[Q] = deque()  # the newest on the right
        self.asking: dict[int, list[Q]] = {}  # batches in flight, by the number of the call
        self.done: dict[int, list[Asked[Q, A]]] = {}  # by the number of the call
        self.threads = 0
        self.generation = 0  # answers to an earlier generation of questions are ignored
        self.fault: Exception | None = None
        self.spent = ""
        self.begun = 0
        self.asked = 0
        self.calls = 0
        self.dropped = 0
        self.failed = 0
        self.seconds = 0.0

    def submit(self, questions: Sequence[Q]) -> list[Q]:
        """Queue questions; returns those that were dropped. Never waits."""
        fell: list[Q] = []
        with self.changed:
            self.waiting.extend(questions)
            while self.room is not None and len(self.waiting) > self.room:
                fell.append(self.waiting.popleft())
            self.dropped += len(fell)
            if not self.synchronous:
                self._start()
        return fell

    def poll(self) -> list[Asked[Q, A]]:
        """The answers since the last call, in the order in which the questions were asked."""
        if self.synchronous:
            self.drain()
        with self.changed:
            if self.fault is not None:
                fault = self.fault
                self.fault = None
                raise fault
            done = self.done
            self.done = {}
            if not self.synchronous:
                self._start()
        return [asked for call in sorted(done) for asked in done[call]]

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything is answered, or nothing more will be (BudgetSpent, a fault), at
        most `timeout` seconds; returns whether everything is answered."""
        with self.changed:
            self._start()
            self.changed.wait_for(self._at_rest, timeout)
            return not self.waiting and not self.asking

    def stop(self) -> None:
        """Stop asking; batches in flight are queued again, and their answers are ignored."""
        with self.changed:
            self._stop()

    def clear(self) -> None:
        """Stop asking, and empty the queue and the answers."""
        with self.changed:
            self._stop()
            self.waiting.clear()
            self.done = {}

    def discard(self) -> list[Q]:
        """Empty the queue, but for what is in flight; returns the questions in it."""
        with self.changed:
            left = list(self.waiting)
            self.waiting.clear()
            self.changed.notify_all()
        return left

    @property
    def pending(self) -> int:
        """Number of questions whose answers were not taken."""
        return len(self.questions())

    def questions(self) -> list[Q]:
        """All questions whose answers were not taken, the oldest first; answered ones last."""
        with self.changed:
            done = [asked.question for found in self.done.values() for asked in found]
            return [*self.waiting, *self._in_flight(), *done]

    def _at_rest(self) -> bool:
        """Whether nothing is in flight, and nothing will be."""
        over = not self.waiting or bool(self.spent) or self.fault is not None
        return over and not self.asking

    def _in_flight(self) -> list[Q]:
        """The questions of all calls, the oldest first."""
        return [question for batch in self.asking.values() for question in batch][::-1]

    def _stop(self) -> None:
        self.generation += 1
        self.threads = 0
        self.waiting.extend(self._in_flight())
        self.asking = {}
        self.changed.notify_all()

    def _start(self) -> None:
        """Start the threads that the queue needs."""
        if self.spent or self.fault is not None:
            return
        batches = -(-len(self.waiting) // self.batch)
        for _ in range(min(self.workers - self.threads, batches)):
            self.threads += 1
            serve = threading.Thread(
                target=self._serve, args=(self.generation,), name="ask pool", daemon=True
            )
            serve.start()

    def _serve(self, generation: int) -> None:
        """Ask in this thread while there are questions."""
        while batch := self._take(generation):
            self._ask(generation, *batch)

    def _take(self, generation: int) -> tuple[int, list[Q]] | None:
        """Take a batch from the queue, with the number of its call; None if there is none."""
        with self.changed:
            if generation != self.generation:
                return None
            if not self.waiting or self.spent or self.fault is not None:
                self.threads -= 1
                return None
            batch = [self.waiting.pop() for _ in range(min(self.batch, len(self.waiting)))]
            self.begun += 1
            self.asking[self.begun] = batch
            return self.begun, batch

    def _ask(self, generation: int, call: int, batch: list[Q]) -> None:
        began = time.perf_counter()
        found: list[Asked[Q, A]] | Exception
        failed = False
        try:
            found = [Asked(q, answer) for q, answer in zip(batch, self.ask(batch), strict=True)]
        except BudgetSpent as error:
            found = error
        except ChatError as error:
            found = [Asked(question, None, str(error)) for question in batch]
            failed = True
        except Exception as error:  # raised by `poll`, in the training thread
            found = error
        with self.changed:
            if generation == self.generation:
                del self.asking[call]
                self.seconds += time.perf_counter() - began
                self.failed += failed
                self._settle(call, batch, found)
                self.changed.notify_all()

    def _settle(self, call: int, batch: list[Q], found: list[Asked[Q, A]] | Exception) -> None:
        """Keep the answers to a batch, or queue it again."""
        if isinstance(found, Exception):
            self.waiting.extend(reversed(batch))
            if isinstance(found, BudgetSpent):
                self.spent = str(found)
            else:
                self.fault = found
            return
        self.calls += 1
        self.asked += len(batch)
        self.done[call] = found


def ask_all(ask: Callable[[Q], A], questions: Sequence[Q], workers: int) -> list[A]:
    """The answers to all questions, in order, with up to `workers` asked at a time. Waits; a
    ChatError of `ask` is raised."""
    pool = AskPool[tuple[int, Q], A](
        lambda batch: [ask(question) for _, question in batch], workers=workers
    )
    pool.submit(list(enumerate(questions))[::-1])
    pool.drain()
    found = {asked.question[0]: asked for asked in pool.poll()}
    answers: list[A] = []
    for number in range(len(questions)):
        asked = found.get(number)
        if asked is None or asked.answer is None:
            raise ChatError(pool.spent if asked is None else asked.why)
        answers.append(asked.answer)
    return answers
