"""Daemon: the operator's interface to a robot. Starts its processes and forwards commands.

The daemon never talks to the robot. An operator's command goes to the control process through a
mailbox, and the reply is what the control process reports. When the control process dies, the
robot's own watchdog has to act. When the policy dies, the control process holds the arm and latches
a fault by itself. Neither is started again before an operator says `reset`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

from numpy.typing import NDArray

from embodied.core.build import ConfigError
from embodied.real_robot.assemble import build_chain, open_channels, open_flight_recorder
from embodied.real_robot.control.main import lock_arm
from embodied.real_robot.daemon.processes import Answer, Processes, Restarts
from embodied.real_robot.daemon.requests import Reply, Request, Verb
from embodied.real_robot.daemon.server import Asked, RpcServer, RpcServerError
from embodied.real_robot.daemon.status import Endpoint, Notifier, StatusMonitor, render
from embodied.real_robot.deployment import Deployment, compared
from embodied.real_robot.ipc.channels import READY, TAKEOVER, Channels, Role
from embodied.real_robot.ipc.ring_buffer import BlackBox, BlackBoxError, keep_newest, write_records
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import MailboxError
from embodied.real_robot.kernel.messages import DEADMAN, PRESSED_AGAIN, Mode
from embodied.real_robot.policy.lockdown import missing

KILLED = "-of-a-killed-daemon"


class BlackBoxes:
    """Flight records of the daemon in `folder`; the newest `keep` files of the deployment stay."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = folder
        self.newest = deployment.keep
        self.place = Path(deployment.records) if deployment.records else folder / "blackbox"
        self._last: Thread | None = None
        self._results: SimpleQueue[str] = SimpleQueue()

    def rescue(self) -> str:
        """Keep the black box of a daemon before this one that could not; what to note of it."""
        file = self.folder / "ring"
        if not file.exists():
            return ""
        with suppress(DriverError):  # its control process may still be bringing the arm to rest
            os.close(lock_arm(self.folder))
        try:
            ring = BlackBox.left(file)
            records, path = ring.records(), self._new_path(KILLED)
            self._write(records, path)
            ring.close()
        except (MailboxError, BlackBoxError, OSError) as error:
            aside = file.rename(file.with_name(f"ring{KILLED}-{time.time_ns()}"))
            return f"a daemon before this one was killed; its black box stays in {aside}: {error}"
        return f"a daemon before this one was killed; its last {len(records)} records are in {path}"

    def save(self, ring: BlackBox) -> None:
        """A thread copies `ring` (not to be closed) at once, and writes it after the others."""
        arguments = (ring, self._new_path(), self._last)
        # A thread each: a disk that hangs must not delay the copy of what the next fault left.
        self._last = Thread(target=self._save, args=arguments, daemon=True)
        self._last.start()

    def results(self) -> list[str]:
        """Notes about the records that were saved since the last call, in the order of `save`."""
        found: list[str] = []
        while True:
            try:
                found.append(self._results.get_nowait())
            except Empty:
                return found

    def close(self, patience: float) -> bool:
        """Wait up to `patience` s for what is being saved; whether all of it was."""
        if self._last is not None:
            self._last.join(patience)
        return self._last is None or not self._last.is_alive()

    def _new_path(self, name: str = "") -> Path:
        """A file that is named by the present time, with `name` behind it."""
        return self.place / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}{name}.npz"

    def _write(self, records: NDArray[Any], path: Path) -> None:
        write_records(records, path)
        keep_newest(self.place, self.newest)

    def _save(self, ring: BlackBox, path: Path, before: Thread | None) -> None:
        try:
            records = ring.records()
            if before is not None:
                before.join()
            self._write(records, path)
            self._results.put(f"the last {len(records)} records are in {path}")
        except (BlackBoxError, OSError, ValueError, MemoryError) as error:
            self._results.put(str(error) or f"the black box could not be saved to {path}")


ANSWER = 2.0  # s that the control process has for an answer
MOST_QUEUED = 32
STOPS = (Verb.STOP, Verb.ESTOP, Verb.QUIT)


@dataclass
class Commands:
    """Commands on their way to the control process: one at a time, in order; a stop overtakes them.
    `put` and `overtake`, and `poll` often. `quit`: the control process agreed to quit."""

    channels: Channels
    monitor: StatusMonitor
    answer: Answer
    clock: Callable[[], float]
    queue: deque[Asked] = field(default_factory=deque[Asked])
    pending: Asked | None = None  # the control process was told and has not answered
    deadline: float = 0.0  # of its answer
    sent: int = 0
    quit: bool = False

    def put(self, asked: Asked) -> None:
        """Behind the others; refused where too many wait."""
        if len(self.queue) >= MOST_QUEUED:
            self.answer(asked, False, "too many requests are waiting")
        else:
            self.queue.append(asked)

    def overtake(self, asked: Asked) -> None:
        """Before all others, of which nothing comes."""
        self.drop_all("overtaken by a stop")
        self._forward(asked)

    def poll(self) -> None:
        self._answer_pending()
        if self.pending is None and self.queue:
            self._forward(self.queue.popleft())

    def drop_all(self, reason: str) -> None:
        """Tell all clients that wait that nothing came of it."""
        for asked in (*([] if self.pending is None else [self.pending]), *self.queue):
            self.answer(asked, False, reason)
        self.pending = None
        self.queue.clear()

    def _forward(self, asked: Asked) -> None:
        request, client = asked.request, asked.client
        if client is not None and client.gone and request.verb in (Verb.ARM, Verb.START):
            return  # who asked for it no longer looks
        self.sent += 1
        fields = self.channels.request.fields
        fields["number"] = self.sent
        fields["command"] = request.command
        fields["seconds"] = 0.0 if request.seconds is None else request.seconds
        fields["stop"] = request.stop
        self.channels.request.send()
        self.pending = asked
        self.deadline = self.clock() + ANSWER

    def _answer_pending(self) -> None:
        pending = self.pending
        if pending is None:
            return
        done = self.monitor.answered(self.sent)
        if done is None and self.clock() < self.deadline:
            return
        self.pending = None
        verb = pending.request.verb
        reason = "" if done else self.monitor.why_not(verb)
        if done is None:
            reason = f"no answer within {ANSWER:.0f} s; use the robot's own stop"
        self.answer(pending, bool(done), reason)
        if done is None and verb not in STOPS:
            # Obeyed later, it would move an arm of which its operator was told that it does not.
            self._forward(Asked(Request(1, self.clock(), Verb.STOP)))
        self.quit = self.quit or (bool(done) and verb == Verb.QUIT)


LOG = logging.getLogger("embodied.robot")
POLL, SOON = 0.05, 0.005  # s between two looks; while an answer is awaited
AFTER = 0.5  # s from a fault to the black box, so that the stop is in it
SAVING = 60.0  # s that a disk has for the last black boxes when the daemon ends
SHOW = 0.5  # s between two pictures for the reader of the metrics
UNHEARD = 2.0  # s of silence of the session whose episode has no time limit
MOST_NOTES = 30
SHARED_FILES = (
    "state",
    "chunk",
    "request",
    "heartbeat",
    DEADMAN,
    TAKEOVER,
    "estop",
    "ring",
    "recorded",
    "discard",
    READY,
)
LOST = "; the robot's own watchdog acts, then `reset` starts again"


class Daemon:
    """`serve` until an operator quits or `done` is set. RpcServerError: another one runs here.

    `token`: of the session that started it (empty: none did). Requests of other sessions are
    refused. Nothing in the main loop waits for a disk or for the end of a process: the control
    process watches its heartbeat.
    """

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.clock = clock
        self.names = build_chain(deployment).names
        self.server = RpcServer(folder, clock, token)
        self.processes = Processes(folder, deployment)
        self.records = BlackBoxes(folder, deployment)
        self.save_at: float | None = None
        self.restarts = Restarts(
            self.processes, self._answer, self._start, self._policy_started, clock
        )
        self.notes: deque[str] = deque(maxlen=MOST_NOTES)
        self.done = False
        self.endpoint: Endpoint | None = None
        self.systemd = Notifier(clock=clock)
        self.metrics_at = 0.0
        self.heard = clock()
        self.needs_session = False
        self.safety = ""
        """Checksum of the safety parameters, and what changed; empty before the start."""

    @property
    def deployment(self) -> Deployment:
        return self.processes.deployment

    def serve(self) -> None:
        """Start the processes, and answer. What they leave behind is in the folder."""
        try:
            left = self.records.rescue()
            self._start()
            self.safety = compared(self.deployment, self.folder)
            self.monitor.note(self.safety)
            if left:
                self.monitor.note(left)
            if self.deployment.metrics is not None:
                self.endpoint = Endpoint(self.deployment.metrics)
                self.monitor.note(f"metrics: http://127.0.0.1:{self.endpoint.port}/metrics")
            if self.deployment.remote is not None:
                self.processes.remote.start()
            self.systemd.ready()
            while not self.done:
                self.poll()
                self.systemd.alive()
        finally:
            self.processes.control.end(patience=10.0)  # first of all: it brings the arm to rest
            self.systemd.ending()
            if self.endpoint is not None:
                self.endpoint.close()
            self.processes.stop()
            self.server.close()
            if self.save_at is not None:
                self.save()
            if not self.records.close(SAVING):
                self.monitor.note(f"the black box could not be saved within {SAVING:.0f} s")
            for line in self.records.results():
                self.monitor.note(line)
            if self.done:  # else there was a mistake of ours, and what is there says more of it
                self._clear()

    def poll(self) -> None:
        self.channels.beat(self.clock())
        asked = self.server.poll(SOON if self.commands.pending or self.restarts.busy else POLL)
        self._supervise()
        for each in asked:
            self._handle(each)
        self.commands.poll()
        self.done = self.done or self.commands.quit
        self.restarts.poll()
        if self.endpoint is not None and self.clock() > self.metrics_at + SHOW:
            self.metrics_at = self.clock()
            self.endpoint.text = render(self._status())

    def save(self) -> None:
        self.save_at = None
        self.records.save(self.ring)

    def _start(self) -> None:
        """All processes, on new mailboxes: who died may have left the old ones half written."""
        self._clear()
        # Only the daemon, which has the folder's lock, writes it; what another program wrote goes.
        self.deployment.write(self.folder)
        self.channels = open_channels(self.deployment, self.folder, Role.DAEMON, create=True)
        self.ring = open_flight_recorder(self.deployment, self.folder, create=True)
        self.monitor = StatusMonitor(
            self.channels, self.names, self.notes, self.deployment.step, self.clock
        )
        self.commands = Commands(self.channels, self.monitor, self._answer, self.clock)
        if self.deployment.policy and (reason := missing()):
            self.monitor.note(f"the policy process is not locked: {reason}")
        self.channels.beat(self.clock())
        self.processes.start()

    def _clear(self) -> None:
        for name in SHARED_FILES:
            (self.folder / name).unlink(missing_ok=True)
        self.processes.cameras.clear()

    def _supervise(self) -> None:
        now, control = self.clock(), self.processes.control
        if control.has_died():
            self.monitor.note(control.died + LOST)
            self.commands.drop_all(control.died + LOST)
            self.save()
        if self.monitor.update():
            self.save_at = now + AFTER
        if self.save_at is not None and now >= self.save_at:
            self.save()
        for line in (*self.processes.died(), *self.records.results()):
            self.monitor.note(line)
        self._watch_session(now)

    def _watch_session(self, now: float) -> None:
        """Stop an episode without a time limit when the session that began it is silent: nothing
        else would end it. Actions that a session posts itself (no policy) grow old anyway."""
        if self.monitor.mode != Mode.RUNNING or not self.deployment.policy:
            return
        if self.needs_session and now - self.heard > UNHEARD:
            self.needs_session = False
            self.monitor.stopped = f"the session that started it was silent for {UNHEARD:.0f} s"
            self.monitor.note(f"stopping: {self.monitor.stopped}")
            self.commands.overtake(Asked(Request(1, now, Verb.STOP)))

    def _handle(self, asked: Asked) -> None:
        request, policy = asked.request, self.processes.policy
        verb = request.verb
        if request.session:
            self.heard = self.clock()
        if verb == Verb.STATUS:
            self._answer(asked, True, "")
            return
        self.monitor.note(f"{'its session' if request.session else 'an operator'} asks: {verb}")
        if verb == Verb.ESTOP:
            self.channels.estop.press()  # a number of its own, as every press has
        if verb == Verb.RESET and request.stop != self.channels.estop.number:
            self._answer(asked, False, PRESSED_AGAIN)
            return
        if verb == Verb.RESET:
            self.processes.restart_dead()
        if not self.processes.control.alive:
            if verb == Verb.QUIT:
                self.done = True
                self._answer(asked, True, "")
            elif verb == Verb.RESET:
                self.restarts.restart_all(asked)
            else:
                died = self.processes.control.died or "no control process"
                self._answer(asked, False, died + LOST)
        elif verb == Verb.LOAD:
            self.restarts.load(asked)
        elif verb == Verb.RESET and (self.monitor.policy_silent or not policy.alive):
            self.restarts.restart_policy(asked, self._policy_restarted)
        elif verb == Verb.ESTOP:
            self.commands.overtake(asked)
        else:
            self.commands.put(asked)

    def _policy_restarted(self, asked: Asked) -> None:
        """An arm that latched meanwhile is reset as well."""
        if self.monitor.mode == Mode.ESTOP:
            self.commands.put(asked)
        else:
            self._answer(asked, True, "starting the policy again")

    def _policy_started(self, note: str) -> None:
        self.monitor.policy_started()
        if note:
            self.monitor.note(note)

    def _status(self) -> dict[str, Any]:
        about = self.deployment
        return {
            **self.monitor.status(self.processes.control, self.processes.policy),
            **{"robot": about.robot, "dry": about.dry, "acting": about.policy},
            "safety": self.safety,
            **self.processes.status(),
            "now": self.clock(),
            "clients": len(self.server.clients),
            "refused": self.server.refused,
            "estop": self.channels.estop.number,
        }

    def _answer(self, asked: Asked, ok: bool, reason: str) -> None:
        request = asked.request
        if ok and request.verb == Verb.START:
            self.monitor.stopped = ""
            self.needs_session = bool(request.session) and request.seconds is None
        if asked.client is not None:
            self.server.answer(asked.client, Reply(request.number, ok, reason, self._status()))


def serve(folder: Path, deployment: Deployment, token: str = "", tied: bool = False) -> None:
    """A daemon in `folder` until an operator quits or this process is told to end (SIGTERM,
    Ctrl-C; `tied`: its standard input ends, as when its starter is gone). RpcServerError,
    ConfigError."""
    daemon = Daemon(folder, deployment.allow_packages(), token)

    def end(number: int, frame: FrameType | None) -> None:
        daemon.done = True

    def untie() -> None:
        sys.stdin.buffer.read()
        daemon.done = True

    if tied:
        threading.Thread(target=untie, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with logged(LOG, folder / "daemon.log"):
        daemon.serve()


def main(folder: Path, tied: bool) -> None:
    """Run the daemon with the deployment in `folder`; or (`tied`) with the one that its starter
    writes to the standard input: one line of JSON, `{"session": TOKEN, "deployment": {...}}`."""
    if not tied:
        serve(folder, Deployment.read(folder))
        return
    try:
        told: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    except ValueError as error:
        raise ConfigError("its starter ended before it said what to do") from error
    serve(folder, Deployment.parse(told["deployment"]), told["session"], tied)


MOST_WAITING = 10_000  # lines; further ones are lost while a disk hangs


@contextmanager
def logged(logger: logging.Logger, file: Path) -> Generator[None]:
    """Write what `logger` is told to `file` (two of 1 MiB at most), in order, until the end."""
    logging.raiseExceptions = False  # a log that cannot be written stops nothing
    sink = RotatingFileHandler(file, maxBytes=1 << 20, backupCount=1)
    sink.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    lines: Queue[Any] = Queue(MOST_WAITING)
    source, writer = QueueHandler(lines), QueueListener(lines, sink)
    logger.addHandler(source)
    logger.setLevel(logging.INFO)
    writer.start()
    try:
        yield
    finally:
        logger.removeHandler(source)
        writer.stop()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), "tied" in sys.argv[2:])
    except (ConfigError, RpcServerError) as error:
        sys.exit(f"daemon: {error}")
