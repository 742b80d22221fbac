"""Annotator: labels questions in a background thread, so that training never waits.

The newest questions are labelled first, in batches, because current behaviour matters most. The
thread runs while there are questions. The queue is bounded; what is dropped is returned to the
caller. After ONI (Zheng et al., 2024).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embodied.llm.chat import BudgetSpent, ChatError

Question = tuple[str, ...]


@dataclass(frozen=True)
class Label:
    """The answer to a question. `value` None: no usable answer, and `why`; the rest is provenance
    and cost."""

    question: Question
    value: float | None
    model: str = ""
    key: str = ""
    cached: bool = False
    tokens: int = 0
    seconds: float = 0.0
    why: str = ""


Labeller = Callable[[Sequence[Question]], list[Label]]


class Annotator:
    """Calls `labeller` with `batch` questions at a time; at most `room` of them are queued.

    With `beside` a thread calls it; otherwise `work` does, in the calling thread. A ChatError
    counts as an abstention on the batch. After BudgetSpent the labeller is not called again, and
    questions stay queued. Any other error is raised by the next `poll`, and the batch is queued
    again.
    """

    def __init__(self, labeller: Labeller, batch: int, room: int, beside: bool) -> None:
        self.labeller, self.batch, self.room, self.beside = labeller, batch, room, beside
        self.lock = threading.Lock()
        self.waiting: deque[Question] = deque()  # the newest on the right
        self.asking: list[Question] = []
        self.done: list[Label] = []
        self.thread: threading.Thread | None = None
        self.turn = 0  # answers of an earlier thread are ignored
        self.fault: Exception | None = None
        self.spent = ""
        self.asked = self.calls = self.dropped = self.failed = 0
        self.seconds = 0.0

    def submit(self, questions: Sequence[Question]) -> list[Question]:
        """Queue questions; returns those that were dropped. Never blocks."""
        fell: list[Question] = []
        with self.lock:
            self.waiting.extend(questions)
            while len(self.waiting) > self.room:
                fell.append(self.waiting.popleft())
            self.dropped += len(fell)
        if questions and self.beside:
            self.start()
        return fell

    def poll(self) -> list[Label]:
        """The labels since the last call."""
        with self.lock:
            done, self.done = self.done, []
            fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        if self.beside:
            self.start()
        return done

    def start(self) -> None:
        """Start the thread if there are questions and none is running."""
        with self.lock:
            if self.thread is not None or not self.waiting or self.spent or self.fault is not None:
                return
            self.turn += 1
            self.thread = threading.Thread(
                target=self._serve, args=(self.turn,), name="annotator", daemon=True
            )
            self.thread.start()

    def stop(self) -> None:
        """Stop labelling; a batch in flight is queued again, and its answers are ignored."""
        with self.lock:
            self.turn += 1
            self.thread = None
            self.waiting.extend(reversed(self.asking))
            self.asking = []

    def forget(self) -> None:
        """Stop labelling, and clear the queue and the labels."""
        self.stop()
        with self.lock:
            self.waiting.clear()
            self.done = []

    def work(self) -> bool:
        """Label one batch in this thread; False if there is nothing to label."""
        return self._ask(self.turn, aside=False)

    def drain(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until everything is labelled; returns whether it is."""
        thread = self.thread
        if thread is not None:
            thread.join(timeout)
        with self.lock:
            return not self.waiting and not self.asking

    @property
    def pending(self) -> int:
        """Number of questions queued or in flight."""
        with self.lock:
            return len(self.waiting) + len(self.asking)

    def questions(self) -> list[Question]:
        """All unanswered questions, the oldest first."""
        with self.lock:
            return [*self.waiting, *self.asking]

    def _serve(self, turn: int) -> None:
        while self._ask(turn, aside=True):
            pass

    def _ask(self, turn: int, aside: bool) -> bool:
        with self.lock:
            if turn != self.turn:
                return False
            if not self.waiting or self.spent:
                self.thread = None
                return False
            count = min(self.batch, len(self.waiting))
            batch = self.asking = [self.waiting.pop() for _ in range(count)]
        try:
            labels = self.labeller(batch)
        except BudgetSpent as error:
            self._returned(turn, spent=str(error))
        except ChatError as error:
            self._answered(turn, [Label(q, None, why=str(error)) for q in batch], failed=1)
        except Exception as error:  # raised by `poll`, in the training thread
            self._returned(turn, fault=error if aside else None)
            if not aside:
                raise
        else:
            self._answered(turn, labels)
        return True

    def _answered(self, turn: int, labels: list[Label], failed: int = 0) -> None:
        with self.lock:
            if turn != self.turn:
                return
            self.calls, self.failed = self.calls + 1, self.failed + failed
            self.asked += len(labels)
            self.seconds += max((label.seconds for label in labels), default=0.0)
            self.done += labels
            self.asking = []

    def _returned(self, turn: int, spent: str = "", fault: Exception | None = None) -> None:
        """Queue the batch again."""
        with self.lock:
            if turn != self.turn:
                return
            self.waiting.extend(reversed(self.asking))
            self.asking = []
            self.spent, self.fault = spent, fault
            if fault is not None:
                self.turn, self.thread = self.turn + 1, None
