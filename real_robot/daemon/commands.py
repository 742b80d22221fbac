"""Commands on their way to the control process: one at a time, in order; a stop overtakes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from embodied.real_robot.daemon.requests import Request, Verb
from embodied.real_robot.daemon.server import Client
from embodied.real_robot.daemon.status import StatusMonitor
from embodied.real_robot.ipc.channels import Channels

ANSWER = 2.0  # s that the control process has for an answer
MOST_QUEUED = 32


class Answer(Protocol):
    """Tells a client (None: the daemon itself asked) what came of its request."""

    def __call__(
        self, client: Client | None, request: Request, ok: bool, reason: str = ""
    ) -> None: ...


@dataclass
class Pending:
    """A command that the control process was told and has not answered."""

    client: Client | None
    request: Request
    number: int
    deadline: float


class Commands:
    """`put` and `overtake`, and `poll` often. `quit`: the control process agreed to quit."""

    def __init__(
        self,
        channels: Channels,
        monitor: StatusMonitor,
        answer: Answer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.channels = channels
        self.monitor = monitor
        self.answer = answer
        self.clock = clock
        self.queue: deque[tuple[Client | None, Request]] = deque()
        self.pending: Pending | None = None
        self.sent = 0
        self.quit = False

    def put(self, client: Client | None, request: Request) -> None:
        """Behind the others; refused where too many wait."""
        if len(self.queue) >= MOST_QUEUED:
            self.answer(client, request, False, "too many requests are waiting")
        else:
            self.queue.append((client, request))

    def overtake(self, client: Client | None, request: Request) -> None:
        """Before all others, of which nothing comes."""
        self.drop_all("overtaken by a stop")
        self._forward(client, request)

    def poll(self) -> None:
        """Answer what the control process has answered, and send the next."""
        self._answer_pending()
        if self.pending is None and self.queue:
            self._forward(*self.queue.popleft())

    def drop_all(self, reason: str) -> None:
        """Tell all clients that wait that nothing came of it."""
        if self.pending is not None:
            self.answer(self.pending.client, self.pending.request, False, reason)
        for client, request in self.queue:
            self.answer(client, request, False, reason)
        self.pending = None
        self.queue.clear()

    def _forward(self, client: Client | None, request: Request) -> None:
        if client is not None and client.gone and request.verb in (Verb.ARM, Verb.START):
            return  # who asked for it no longer looks
        self.sent += 1
        fields = self.channels.request.fields
        fields["number"] = self.sent
        fields["command"] = request.command
        fields["seconds"] = 0.0 if request.seconds is None else request.seconds
        self.channels.request.send()
        self.pending = Pending(client, request, self.sent, self.clock() + ANSWER)

    def _answer_pending(self) -> None:
        pending = self.pending
        if pending is None:
            return
        done = self.monitor.answered(pending.number)
        if done is None and self.clock() < pending.deadline:
            return
        self.pending = None
        verb = pending.request.verb
        reason = "" if done else self.monitor.why_not(verb)
        if done is None:
            reason = f"no answer within {ANSWER:.0f} s; use the robot's own stop"
        self.answer(pending.client, pending.request, bool(done), reason)
        self.quit = self.quit or (bool(done) and verb == Verb.QUIT)
