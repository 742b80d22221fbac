"""An annotator beside the learner: questions go in, answers come out, nobody waits.

The newest questions are asked first (what the agent does now matters more than what it did an hour
ago), in batches, by a thread that lives while there are questions; the queue is bounded, and what
falls out of it is handed back as not answered. After ONI (Zheng et al., 2024).
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
    """What was said to a question; `value` None: nothing that can be used. The rest says who said
    it, what it cost, and `why` there is no value."""

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
    """`judge` is asked `batch` questions at a time; `room` of them wait at most.

    With `beside` a thread asks; without, `work` does, in the caller. A judge that fails with a
    ChatError has abstained on that batch; one whose budget is spent is not asked again, and its
    questions wait. Any other error is raised by the next `poll`, and the batch waits again.
    """

    def __init__(self, labeller: Labeller, batch: int, room: int, beside: bool) -> None:
        self.labeller, self.batch, self.room, self.beside = labeller, batch, room, beside
        self.lock = threading.Lock()
        self.waiting: deque[Question] = deque()  # the newest on the right
        self.asking: list[Question] = []
        self.done: list[Label] = []
        self.thread: threading.Thread | None = None
        self.turn = 0  # what an earlier thread still says is not listened to
        self.fault: Exception | None = None
        self.spent = ""
        self.asked = self.calls = self.dropped = self.failed = 0
        self.seconds = 0.0

    def submit(self, questions: Sequence[Question]) -> list[Question]:
        """Put questions in line; returns those that fell out of it. Never blocks on the judge."""
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
        """The answers since the last look."""
        with self.lock:
            done, self.done = self.done, []
            fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        if self.beside:
            self.start()
        return done

    def start(self) -> None:
        """Let a thread ask, if there is something to ask and none does."""
        with self.lock:
            if self.thread is not None or not self.waiting or self.spent or self.fault is not None:
                return
            self.turn += 1
            self.thread = threading.Thread(
                target=self._serve, args=(self.turn,), name="annotator", daemon=True
            )
            self.thread.start()

    def stop(self) -> None:
        """Ask no more; a batch that is out waits again, and what comes back of it is ignored."""
        with self.lock:
            self.turn += 1
            self.thread = None
            self.waiting.extend(reversed(self.asking))
            self.asking = []

    def forget(self) -> None:
        """Ask no more, and drop what waits and what was answered."""
        self.stop()
        with self.lock:
            self.waiting.clear()
            self.done = []

    def work(self) -> bool:
        """Ask one batch here and now; False when there is nothing to ask."""
        return self._ask(self.turn, aside=False)

    def drain(self, timeout: float) -> bool:
        """Wait until all is answered, at most `timeout` seconds; whether it is."""
        thread = self.thread
        if thread is not None:
            thread.join(timeout)
        with self.lock:
            return not self.waiting and not self.asking

    @property
    def pending(self) -> int:
        """How many questions wait or are out."""
        with self.lock:
            return len(self.waiting) + len(self.asking)

    def questions(self) -> list[Question]:
        """All that wait for an answer, the oldest first."""
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
        except Exception as error:  # the learner is told by `poll`, in its own thread
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
        """The batch waits again."""
        with self.lock:
            if turn != self.turn:
                return
            self.waiting.extend(reversed(self.asking))
            self.asking = []
            self.spent, self.fault = spent, fault
            if fault is not None:
                self.turn, self.thread = self.turn + 1, None
