"""A deployment session: the daemon as a subprocess, one episode after the other, an orderly end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from embodied.core.build import ConfigError
from real_robot.daemon.client import ClientError, DaemonEnded, DaemonProcess, call
from real_robot.daemon.requests import RequestError, Verb
from real_robot.daemon.server import private
from real_robot.deployment import Deployment
from real_robot.policy.success import Success

PATIENCE = 120.0  # s for processes to start and to end, on a busy machine
LOOK = 0.1  # s
LONGEST = 15.0  # s of an episode whose success is measured, unless seconds= is given
LOGS = ("daemon", "control", "policy", "policy.next", "recorder")
AT_REST = ("IDLE", "ESTOP", "DISCONNECTED")
INTERRUPTED = "stopped from the keyboard"
Status = dict[str, Any]
Show = Callable[[Status, float, bool | None], None]


class Stopped(RuntimeError):
    """The session ended before it was done: one line that says why."""


@dataclass
class Episode:
    """The result of one episode. `success` is None where it is not measured; `end` is why it ended;
    `interventions` counts the ticks in which each safety stage changed the command; `unkept` says
    why the episode is not (completely) recorded."""

    seconds: float
    success: bool | None
    end: str
    interventions: dict[str, int]
    missed: int
    recorded: bool = False
    unkept: str = ""


@dataclass
class Session:
    """A context with a daemon in `folder` that ends when this process does."""

    folder: Path
    deployment: Deployment
    output: Path
    show: Show
    episodes: list[Episode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.success = Success(self.deployment)

    def __enter__(self) -> Self:
        private(self.folder)
        self.deployment.write(self.folder)
        self.deployment.write(self.output)
        self.daemon = DaemonProcess(self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Bring the arm to rest and hold it, close the recording, end all processes."""
        self.daemon.stop(PATIENCE)
        cameras = [log.stem for log in self.folder.glob("camera-*.log")]
        for name in (*LOGS, *cameras):
            log = self.folder / f"{name}.log"
            if log.exists():
                shutil.copy(log, self.output / log.name)

    @property
    def status(self) -> Status:
        """The daemon's status. ClientError where it is gone."""
        return call(self.folder, Verb.STATUS, PATIENCE).status

    def ready(self) -> Status:
        """Wait until the arm is held and policy and recorder are ready; Stopped."""
        return self._until(self._is_ready, "the arm, the policy and the recorder to be ready")

    def run(self, episodes: int, seconds: float | None, home: bool) -> None:
        """Run episodes. Stopped where an operator, a fault or a dead process ended one."""
        if seconds is None and self.success.known:
            seconds = LONGEST
        for _ in range(episodes):
            if home and self.deployment.home:
                self._do(Verb.HOME)
                self._until(self._is_idle, "the arm to reach its home pose")
                self._require_home()
            self._do(Verb.ARM)
            self._start()
            self._episode(seconds)
            self._until(self._is_idle, "the arm to come to rest")
            self._recorded()

    def stop(self) -> None:
        """Bring the arm to rest, from any mode; a second Ctrl-C is an emergency stop."""
        try:
            call(self.folder, Verb.STOP, PATIENCE)
            self._until(lambda s: s["mode"] in AT_REST, "the arm to come to rest", watch=False)
            self._recorded()
        except KeyboardInterrupt:
            call(self.folder, Verb.ESTOP, PATIENCE)
        except (ClientError, RequestError, Stopped):
            return  # the daemon is gone: closing waits for the control process

    def summary(self) -> dict[str, Any]:
        """The summary that is written to summary.json."""
        rows = [asdict(each) for each in self.episodes]
        known = [each.success for each in self.episodes if each.success is not None]
        return {
            "robot": self.deployment.robot,
            "policy": self.deployment.policy,
            "dry": self.deployment.dry,
            "episodes": rows,
            "successes": sum(known) if known else None,
        }

    def _start(self) -> None:
        """Start as soon as the policy has posted an action for the armed arm."""
        deadline = time.monotonic() + PATIENCE
        while not (reply := call(self.folder, Verb.START, PATIENCE)).ok:
            self._alive(reply.status)
            if reply.status["mode"] != "ARMED" or time.monotonic() > deadline:
                raise Stopped(f"the arm does not start: {reply.reason}")
            time.sleep(LOOK)

    def _episode(self, seconds: float | None) -> None:
        began, first = time.monotonic(), self.status
        self.before = first.get("recorder", {}).get("ended")
        status, end, success = first, "", self._success(first)
        while not end:
            try:
                time.sleep(LOOK)
                status, ran = self.status, time.monotonic() - began
                success = self._success(status)
                self.show(relative(status, first), ran, success)
            except KeyboardInterrupt:
                end = INTERRUPTED
                continue
            if status["mode"] != "RUNNING":
                end = status["fault"] or status["control"]["died"] or "stopped by an operator"
            elif success:
                end = "success"
            elif seconds is not None and ran >= seconds:
                end = "time"
        ran = time.monotonic() - began
        since = relative(status, first)
        counts = {name: stage["count"] for name, stage in since["stages"].items()}
        self.episodes.append(Episode(ran, success, end, counts, since["control"]["missed"]))
        if end == INTERRUPTED:
            raise KeyboardInterrupt
        if status["mode"] != "RUNNING":
            raise Stopped(end)
        self._do(Verb.STOP)

    def _success(self, status: Status) -> bool | None:
        numbers = [*status["q"], *status["sensed"]]
        if any(number is None for number in numbers):
            return False if self.success.known else None
        return self.success(np.array(status["q"]), status["sensed"])

    def _recorded(self) -> None:
        """Wait for the recorder; an episode that could not be recorded is only reported."""
        if not self.deployment.recording or not self.episodes:
            return
        said = self._until(self._recorder_done, "the episode to be recorded", watch=False)
        why = said["recorder"]["problem"] or said["recorder"]["died"]
        self.episodes[-1].recorded, self.episodes[-1].unkept = not why, why

    def _recorder_done(self, status: Status) -> bool:
        """Whether the recorder has finished the newest episode, or cannot before it closes. A
        restarted recorder counts from 0."""
        recorder = status["recorder"]
        gone = bool(recorder["died"]) or not status["control"]["pid"]
        return gone or recorder["ended"] != self.before

    def _do(self, verb: Verb) -> None:
        reply = call(self.folder, verb, PATIENCE)
        if not reply.ok:
            raise Stopped(f"{verb} was refused: {reply.reason}")

    def _require_home(self) -> None:
        status = self.status
        pairs = zip(status["sent"], self.deployment.home, strict=True)
        if max(abs(sent - home) for sent, home in pairs) > 0.02:
            raise Stopped(
                "the arm is not at its home pose: it was stopped, or the workspace is in the way"
            )

    def _is_ready(self, status: Status) -> bool:
        recorder = status.get("recorder")
        return (
            status["mode"] == "IDLE"
            and status["policy"]["number"] > 0
            and (recorder is None or recorder["ready"] or bool(recorder["died"]))
        )

    def _is_idle(self, status: Status) -> bool:
        return status["mode"] == "IDLE"

    def _until(self, so: Callable[[Status], bool], what: str, watch: bool = True) -> Status:
        """The status once `so` is True of it. Stopped after `PATIENCE` s, and (`watch`) where a
        process died or the arm stopped."""
        found: list[Status] = []

        def reached() -> bool:
            try:
                status = self.status
            except ClientError:
                return False  # the daemon does not listen yet
            found[:] = [status]
            if so(status):
                return True
            if watch:
                self._alive(status)
            return False

        late = Stopped(f"timed out after {PATIENCE:.0f} s waiting for {what}")
        try:
            self.daemon.wait_until(reached, PATIENCE, LOOK, lambda: late)
        except DaemonEnded as error:
            raise ConfigError(str(error) or "the daemon died") from error
        return found[0]

    def _alive(self, status: Status) -> None:
        for name in ("control", "policy"):
            if status[name]["died"]:
                raise Stopped(status[name]["died"])
        if status["mode"] == "ESTOP":
            raise Stopped(status["fault"])


def relative(status: Status, first: Status) -> Status:
    """`status` with what is counted since `first`."""
    before = first["stages"]
    stages = {
        k: {**v, "count": v["count"] - before[k]["count"]} for k, v in status["stages"].items()
    }
    missed = status["control"]["missed"] - first["control"]["missed"]
    return {**status, "stages": stages, "control": {**status["control"], "missed": missed}}
