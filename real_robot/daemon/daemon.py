"""Daemon: the operator's interface to a robot. Starts its processes and forwards commands.

The daemon never talks to the robot. An operator's command goes to the control process through a
mailbox, and the reply is what the control process reports. When the control process dies, the
robot's own watchdog has to act. When the policy dies, the control process holds the arm and latches
a fault by itself. Neither is started again before an operator says `reset`.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

import numpy as np

from embodied.core.build import ConfigError
from real_robot.assemble import build_chain, open_channels, open_flight_recorder
from real_robot.cameras.processes import CameraProcesses
from real_robot.daemon.child import Child
from real_robot.daemon.prometheus import Endpoint, render
from real_robot.daemon.requests import COMMANDS, Reply, Request, Verb
from real_robot.daemon.server import Client, RpcServer, RpcServerError, private
from real_robot.daemon.status import StatusMonitor, recorder_status
from real_robot.daemon.systemd import Notifier
from real_robot.deployment import Deployment
from real_robot.ipc.blackbox_files import BlackBoxFiles
from real_robot.ipc.mailbox import Mailbox
from real_robot.ipc.messages import READY, RECORDED, VERSION, Command
from real_robot.ipc.ring_buffer import BlackBoxError
from real_robot.policy.hot_swap import HotSwap

LOG = logging.getLogger("embodied.robot")
POLL, SOON = 0.05, 0.005  # s between two looks; while an answer is awaited
ANSWER = 2.0  # s that the control process has for one
AFTER = 0.5  # s from a fault to the black box, so that the stop is in it
SHOW = 0.5  # s between two pictures for whoever reads the metrics
MOST_QUEUED, MOST_NOTES = 32, 30
SHARED_FILES = ("state", "chunk", "request", "ring", "recorded", READY)
LOST = "; the robot's own watchdog acts, then `reset` starts again"


@dataclass
class Pending:
    """A wish that the control process was told and has not answered."""

    client: Client
    request: Request
    command: int
    deadline: float


class Daemon:
    """`serve` until an operator quits or `done` is set. RpcServerError: another one runs here."""

    def __init__(
        self, folder: Path, deployment: Deployment, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.deployment, self.clock = private(folder), deployment, clock
        self.names = build_chain(deployment).names
        self.server = RpcServer(folder, clock)
        self.control = Child("control", "real_robot.control.main", folder)
        self.policy = Child("policy", "real_robot.policy.main", folder)
        self.recorder = Child("recorder", "real_robot.recording.main", folder)
        self.cameras = CameraProcesses(folder, deployment)
        self.remote = Child("remote", "real_robot.remote.server", folder, log="remote.out")
        self.hot_swap = HotSwap(folder, clock)
        self.records = BlackBoxFiles(folder, deployment)
        self.loading: tuple[Client, Request] | None = None
        self.queue: deque[tuple[Client, Request]] = deque(maxlen=MOST_QUEUED)
        self.pending: Pending | None = None
        self.notes: deque[str] = deque(maxlen=MOST_NOTES)
        self.sent_commands, self.done = 0, False
        self.endpoint: Endpoint | None = None
        self.systemd = Notifier(clock=clock)
        self.metrics_at = 0.0
        self.save_at: float | None = None

    def serve(self) -> None:
        """Start both processes, and answer. What they leave behind is in the folder."""
        try:
            self.deployment.write(self.folder)
            left = self.records.rescue()
            self._start()
            if left:
                self.monitor.note(left)
            if self.deployment.metrics is not None:
                self.endpoint = Endpoint(self.deployment.metrics)
                self.monitor.note(f"metrics: http://127.0.0.1:{self.endpoint.port}/metrics")
            if self.deployment.remote is not None:
                self.remote.start()
            self.systemd.ready()
            while not self.done:
                self.poll()
                self.systemd.alive()
        finally:
            self.systemd.ending()
            if self.endpoint is not None:
                self.endpoint.close()
            # The control process brings the arm to rest before it goes.
            self.control.stop(patience=10.0)
            if self.save_at is not None:
                self.save()
            self.hot_swap.cancel()
            self.policy.stop(patience=2.0)
            self.recorder.stop(patience=30.0)  # it has an episode to write, and files to join
            self.cameras.stop()
            self.remote.stop(patience=2.0)
            self.server.close()
            if self.done:  # else there was a mistake of ours, and what is there says more of it
                self._clear()

    def poll(self) -> None:
        """Look once at everyone."""
        asked = self.server.poll(SOON if self.pending else POLL)
        self._supervise()
        for client, request in asked:
            self._handle_request(client, request)
        self._answer_pending()
        self._finish_hot_swap()
        if self.pending is None and self.queue:
            self._forward(*self.queue.popleft())
        if self.endpoint is not None and self.clock() > self.metrics_at + SHOW:
            self.metrics_at = self.clock()
            self.endpoint.text = render(self.monitor.status(self.control, self.policy))

    def save(self) -> Path | None:
        """The black box, to a file; None, and a note, where that cannot be done."""
        self.save_at = None
        try:
            path, count = self.records.save(self.ring)
        except (BlackBoxError, OSError) as error:
            self.monitor.note(str(error))
            return None
        self.monitor.note(f"the last {count} records are in {path}")
        return path

    def _start(self) -> None:
        """Both processes, on new mailboxes: one that died may have left the old ones half
        written."""
        self._clear()
        self.channels = open_channels(self.deployment, self.folder, create=True)
        self.ring = open_flight_recorder(self.deployment, self.folder, len(self.names), create=True)
        self.recorded = Mailbox(self.folder / "recorded", RECORDED, VERSION, create=True)
        self.monitor = StatusMonitor(
            self.channels, self.names, self.notes, self.deployment.step, self.clock
        )
        self.control.start()
        self.cameras.start()
        self.policy.start()
        self._record()

    def _record(self) -> None:
        """A recorder, where one is wanted, that has told of nothing yet."""
        if self.deployment.recording:
            self.recorded.fields[:] = np.zeros(1, RECORDED)
            self.recorded.send()
            self.recorder.start()

    def _clear(self) -> None:
        for name in SHARED_FILES:
            (self.folder / name).unlink(missing_ok=True)
        self.cameras.clear()

    def _supervise(self) -> None:
        now = self.clock()
        if self.control.has_died():
            self.monitor.note(self.control.died + LOST)
            self._drop_all(self.control.died + LOST)
            self.save()
        for child in (self.policy, self.recorder, self.remote, *self.cameras):
            if child.has_died():
                self.monitor.note(child.died)
        if self.monitor.update():
            self.save_at = now + AFTER
        if self.save_at is not None and now >= self.save_at:
            self.save()

    def _handle_request(self, client: Client, request: Request) -> None:
        verb = request.verb
        if verb != Verb.STATUS:
            self.monitor.note(f"an operator asks: {verb}")
        if verb == Verb.RESET:
            self.cameras.restart_failed()
        if verb == Verb.RESET and self.recorder.died:
            self._record()
        if verb == Verb.RESET and self.remote.died:
            self.remote.start()
        if verb == Verb.STATUS:
            self._answer(client, request, True)
        elif not self.control.alive:
            self._without_control(client, request)
        elif verb == Verb.LOAD:
            self._load(client, request)
        elif verb == Verb.RESET and (self.monitor.policy_silent or not self.policy.alive):
            self._restart_policy(client, request)
        elif verb == Verb.ESTOP:
            self._drop_all("overtaken by a stop")
            self._forward(client, request)
        elif len(self.queue) == MOST_QUEUED:
            self._answer(client, request, False, "too many requests are waiting")
        else:
            self.queue.append((client, request))

    def _without_control(self, client: Client, request: Request) -> None:
        if request.verb == Verb.QUIT:
            self.done = True
            self._answer(client, request, True)
        elif request.verb == Verb.RESET:
            self.control.stop(0.0)
            self.policy.stop(0.0)
            self.recorder.stop(10.0)
            self.cameras.stop()
            self._start()
            self._answer(client, request, True, "starting the arm's processes again")
        else:
            self._answer(client, request, False, (self.control.died or "no control process") + LOST)

    def _restart_policy(self, client: Client, request: Request) -> None:
        """The policy anew; an arm that latched meanwhile is reset as well."""
        self.policy.stop(0.0)
        self.policy.start()
        self.monitor.policy_started()
        if self.monitor.latched:
            self.queue.append((client, request))
        else:
            self._answer(client, request, True, "starting the policy again")

    def _load(self, client: Client, request: Request) -> None:
        if self.hot_swap.child is not None:
            self._answer(client, request, False, "another policy is being loaded; wait for it")
            return
        self.hot_swap.start(request.policy, self.policy)
        self.loading = (client, request)

    def _finish_hot_swap(self) -> None:
        """To the policy that is to take over, once it is ready."""
        if self.hot_swap.child is None or (problem := self.hot_swap.poll()) is None:
            return
        if not problem:
            try:
                made = self.hot_swap.swap(self.policy, self.deployment)
                self.policy, self.deployment = made
                self.monitor.policy_started()
                self.monitor.note(f"the policy is now {self.deployment.policy}")
            except OSError as error:
                self.hot_swap.cancel()
                problem = f"{error}; the one before goes on"
        if self.loading is not None:
            self._answer(*self.loading, not problem, problem)
        self.loading = None

    def _forward(self, client: Client, request: Request) -> None:
        if client.gone and request.verb in (Verb.ARM, Verb.START):
            return  # who asked for it no longer looks
        self.sent_commands += 1
        fields = self.channels.request.fields
        fields["number"], fields["command"] = (
            self.sent_commands,
            COMMANDS.get(request.verb, Command.NOTHING),
        )
        self.channels.request.send()
        self.pending = Pending(client, request, self.sent_commands, self.clock() + ANSWER)

    def _answer_pending(self) -> None:
        """Answer the pending request, if the control process has, or had time enough."""
        pending = self.pending
        if pending is None:
            return
        done = self.monitor.answered(pending.command)
        if done is None and self.clock() < pending.deadline:
            return
        self.pending = None
        verb = pending.request.verb
        reason = "" if done else self.monitor.why_not(verb)
        if done is None:
            reason = f"no answer within {ANSWER:.0f} s; use the robot's own stop"
        self._answer(pending.client, pending.request, bool(done), reason)
        self.done = self.done or (bool(done) and verb == Verb.QUIT)

    def _drop_all(self, reason: str) -> None:
        """Whoever waits is told that nothing came of it."""
        if self.pending is not None:
            self._answer(self.pending.client, self.pending.request, False, reason)
        for client, request in self.queue:
            self._answer(client, request, False, reason)
        self.pending = None
        self.queue.clear()

    def _answer(self, client: Client, request: Request, ok: bool, reason: str = "") -> None:
        status, about = self.monitor.status(self.control, self.policy), self.deployment
        status |= {"robot": about.robot, "dry": about.dry, "acting": about.policy}
        status["now"] = self.clock()
        if about.recording:
            status["recorder"] = recorder_status(self.recorder, self.recorded)
        if about.cameras:
            status["cameras"] = self.cameras.status()
        if about.remote is not None:
            status["remote"] = {"pid": self.remote.pid, "died": self.remote.died}
        status |= {"clients": len(self.server.clients), "refused": self.server.refused}
        self.server.answer(client, Reply(request.number, ok, reason, status))


def serve(folder: Path, deployment: Deployment, tied: bool = False) -> None:
    """A daemon in `folder` until an operator quits or this process is told to end (SIGTERM,
    Ctrl-C; `tied`: its standard input ends, as when whoever started it is gone). RpcServerError,
    ConfigError."""
    daemon = Daemon(folder, deployment)
    logging.raiseExceptions = False  # a log that cannot be written stops nothing
    log = RotatingFileHandler(folder / "daemon.log", maxBytes=1 << 20, backupCount=1)
    log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(log)
    LOG.setLevel(logging.INFO)

    def end(number: int, frame: FrameType | None) -> None:
        daemon.done = True

    def untie() -> None:
        sys.stdin.buffer.read()
        daemon.done = True

    if tied:
        threading.Thread(target=untie, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    daemon.serve()


if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]), Deployment.read(Path(sys.argv[1])), "tied" in sys.argv[2:])
    except (ConfigError, RpcServerError) as error:
        sys.exit(f"daemon: {error}")
