"""A deployment session: the daemon as a subprocess, one episode after the other, an orderly end."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from embodied.core.build import ConfigError
from embodied.real_robot.control.main import lock_arm
from embodied.real_robot.daemon.client import ClientError, DaemonEnded, DaemonProcess, press
from embodied.real_robot.daemon.requests import Reply, RequestError, Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import DISCARD
from embodied.real_robot.kernel.driver import DriverError
from embodied.real_robot.kernel.mailbox import Mailbox
from embodied.real_robot.kernel.messages import VERSION
from embodied.real_robot.policy.observer import Success
from embodied.real_robot.teleop.hold_to_run import EpisodeKeys, Key
from embodied.real_robot.teleop.teleop import Device

PATIENCE = 120.0  # s for processes to start and to end, on a busy machine
ANSWER = 20.0  # s that a daemon has for an answer, on a busy machine
SILENT = 5.0  # s without a tick of the control process after which the session ends
LOOK = 0.1  # s
LONGEST = 15.0  # s of an episode whose success is measured, unless seconds= is given
LOGS = ("daemon", "control", "policy", "policy.next", "recorder")
AT_REST = ("IDLE", "ESTOP", "DISCONNECTED")
SUCCESS, TIME = "success", "time"
KEPT, DISCARDED = "ended by the operator", "discarded by the operator"
WHOLE = (SUCCESS, TIME, KEPT, DISCARDED)  # after these, another episode may begin
INTERRUPTED = "stopped from the keyboard"
DROPPED = "discarded"  # from the recording
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
    """A context with a daemon in `folder` that ends when this process does.

    Every request carries the token of this daemon: one that another session started refuses it.
    """

    folder: Path
    deployment: Deployment
    output: Path
    show: Show
    episodes: list[Episode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.success = Success(self.deployment)
        self.served = self.lost = False  # whether our daemon has answered; and does no longer

    def __enter__(self) -> Self:
        self.deployment.write(self.output)
        self.daemon = DaemonProcess(self.folder, self.deployment)
        return self

    def __exit__(self, *_: object) -> None:
        """Bring the arm to rest and hold it, close the recording, end all processes."""
        self.daemon.stop(ANSWER if self.lost else PATIENCE)
        if not self.served:
            return  # what is in the folder may be another session's
        for name in (*LOGS, *[log.stem for log in self.folder.glob("camera-*.log")]):
            log = self.folder / f"{name}.log"
            if log.exists():
                shutil.copy(log, self.output / log.name)

    @property
    def status(self) -> Status:
        """The daemon's status. Stopped where it is gone or does not answer."""
        return self._ask(Verb.STATUS).status

    def ready(self) -> Status:
        """Wait until the arm is held and policy and recorder are ready; Stopped."""

        def is_ready(status: Status) -> bool:
            recorder = status.get("recorder")
            recorded = recorder is None or recorder["ready"] or bool(recorder["died"])
            return status["mode"] == "IDLE" and status["policy"]["number"] > 0 and recorded

        return self._until(is_ready, "the arm, the policy and the recorder to be ready")

    def run(self, episodes: int, seconds: float | None, home: bool) -> None:
        """Run episodes. Stopped where an operator, a fault or a dead process ended one."""
        if seconds is None and self.success.known:
            seconds = LONGEST
        for _ in range(episodes):
            if home:
                self._go_home()
            self._play(seconds)

    def asked(self) -> str:
        """Why the operator ends the episode now (KEPT or DISCARDED); empty while they do not."""
        return ""

    def _go_home(self) -> None:
        if not self.deployment.home:
            return
        self._do(Verb.HOME)
        # A hand may let go for as long as it likes.
        patience = math.inf if self.deployment.hold_to_run else PATIENCE
        self._until(self._is_idle, "the arm to reach its home pose", patience=patience)
        pairs = zip(self.status["sent"], self.deployment.home, strict=True)
        if max(abs(sent - home) for sent, home in pairs) > 0.02:
            raise Stopped(
                "the arm is not at its home pose: it was stopped, or the workspace is in the way"
            )

    def _play(self, seconds: float | None) -> None:
        self._do(Verb.ARM)
        try:
            first = self._start(seconds)
        except Stopped as error:
            if self.lost:  # the arm may have run
                self.episodes.append(Episode(0.0, None, str(error), {}, 0, unkept=self._unkept()))
            raise
        self._episode(first)
        self._until(self._is_idle, "the arm to come to rest")
        self._recorded()

    def stop(self) -> None:
        """Bring the arm to rest, from any mode; a second Ctrl-C is an emergency stop."""
        try:
            self._ask(Verb.STOP)
            self._until(lambda s: s["mode"] in AT_REST, "the arm to come to rest", watch=False)
            self._recorded()
        except KeyboardInterrupt:
            if self.served:
                press(self.folder)  # whatever the daemon does
            with suppress(Stopped, RequestError):
                self._ask(Verb.ESTOP)
        except (RequestError, Stopped):
            return  # the daemon is gone: closing waits for the control process

    @property
    def unrecorded(self) -> str:
        """Which episodes are not (completely) in the recording, and why; empty where all are."""
        lost = [k for k, each in enumerate(self.episodes, 1) if each.unkept not in ("", DROPPED)]
        if not lost or not self.deployment.recording:
            return ""
        kept, first = sum(each.recorded for each in self.episodes), lost[0]
        return (
            f"{len(lost)} of {len(self.episodes)} episodes are not (completely) recorded, the "
            f"first is episode {first} ({self.episodes[first - 1].unkept}); {kept} are complete in "
            f"{self.deployment.recording}"
        )

    def summary(self) -> dict[str, Any]:
        known = [each.success for each in self.episodes if each.success is not None]
        return {
            "robot": self.deployment.robot,
            "policy": self.deployment.policy,
            "dry": self.deployment.dry,
            "episodes": [asdict(each) for each in self.episodes],
            "successes": sum(known) if known else None,
        }

    def _ask(self, verb: Verb, seconds: float | None = None) -> Reply:
        """RequestError; Stopped where our daemon is gone or does not answer."""
        try:
            reply = self.daemon.call(verb, ANSWER, seconds)
        except ClientError as error:
            self.lost = True
            raise Stopped(self._why_gone(error)) from error
        self.served = True
        return reply

    def _why_gone(self, error: ClientError) -> str:
        """The reason in a line, once the arm is at rest: the control process sees it as well."""
        with suppress(DaemonEnded, ClientError):
            self.daemon.wait_until(lambda: False, 1.0, LOOK, error)
        if self.daemon.returncode is None:
            return str(error)
        try:
            os.close(lock_arm(self.folder))
        except DriverError:
            return f"{self.daemon.cause()}; the arm may still move: use the robot's own stop"
        return f"{self.daemon.cause()}; the control process brought the arm to rest and ended"

    def _start(self, seconds: float | None) -> Status:
        """Start as soon as the policy has posted an action for the armed arm; the status then. The
        control process ends the episode after `seconds`, whatever becomes of this process."""
        deadline = time.monotonic() + PATIENCE
        while not (reply := self._ask(Verb.START, seconds)).ok:
            self._alive(reply.status)
            if reply.status["mode"] != "ARMED" or time.monotonic() > deadline:
                raise Stopped(f"the arm does not start: {reply.reason}")
            time.sleep(LOOK)
        return reply.status

    def _episode(self, first: Status) -> None:
        began = time.monotonic()
        self.before = first.get("recorder", {}).get("ended")
        status, end, success = first, "", self._success(first)
        while not end:
            try:
                time.sleep(LOOK)
                status, ran = self.status, time.monotonic() - began
                success = self._success(status)
                self.show(relative(status, first), ran, success)
                end = _end(status, success) or self.asked()
            except KeyboardInterrupt:
                end = INTERRUPTED
            except Stopped as error:
                end = str(error)
        ran = time.monotonic() - began
        since = relative(status, first)
        counts = {name: stage["count"] for name, stage in since["stages"].items()}
        missed = since["control"]["missed"]
        self.episodes.append(Episode(ran, success, end, counts, missed, unkept=self._unkept()))
        if end == INTERRUPTED:
            raise KeyboardInterrupt
        if end not in WHOLE:
            raise Stopped(end)
        if status["mode"] == "RUNNING":
            reply = self._ask(Verb.STOP)  # the arm's time may just have run out
            if not reply.ok and reply.status["mode"] not in ("STOPPING", "IDLE"):
                raise Stopped(f"{Verb.STOP} was refused: {reply.reason}")

    def _unkept(self) -> str:
        return "the daemon ended before it said whether it was recorded" if self.lost else ""

    def _success(self, status: Status) -> bool | None:
        if any(number is None for number in [*status["q"], *status["sensed"]]):
            return False if self.success.known else None
        return self.success(np.array(status["q"]), status["sensed"])

    def _recorded(self) -> None:
        """Wait for the recorder; an episode that could not be recorded is only reported."""
        if not self.deployment.recording or not self.episodes:
            return

        def done(status: Status) -> bool:
            """Whether the newest episode is finished, or cannot be."""
            recorder = status["recorder"]
            gone = bool(recorder["died"]) or not status["control"]["pid"]
            return gone or recorder["ended"] != self.before

        said = self._until(done, "the episode to be recorded", watch=False)
        why = said["recorder"]["problem"] or said["recorder"]["died"]
        self.episodes[-1].recorded, self.episodes[-1].unkept = not why, why

    def _do(self, verb: Verb) -> None:
        reply = self._ask(verb)
        if not reply.ok:
            raise Stopped(f"{verb} was refused: {reply.reason}")

    def _is_idle(self, status: Status) -> bool:
        return status["mode"] == "IDLE"

    def _until(
        self,
        so: Callable[[Status], bool],
        what: str,
        watch: bool = True,
        patience: float = PATIENCE,
    ) -> Status:
        """The status once `so` is True of it. Stopped where it is late or (`watch`) faulty."""
        found: list[Status] = []

        def reached() -> bool:
            try:
                found[:] = [self.daemon.call(Verb.STATUS, ANSWER).status]
            except ClientError:
                return False  # our daemon does not listen yet, or is gone
            self.served = True
            if so(found[0]):
                return True
            if watch:
                self._alive(found[0])
            return False

        late = Stopped(f"timed out after {patience:.0f} s waiting for {what}")
        try:
            self.daemon.wait_until(reached, patience, LOOK, late)
        except DaemonEnded as error:
            if not self.served:
                raise ConfigError(str(error) or self.daemon.cause()) from error
            self.lost = True
            raise Stopped(self._why_gone(ClientError(str(error)))) from error
        return found[0]

    def _alive(self, status: Status) -> None:
        for name in ("control", "policy"):
            if status[name]["died"]:
                raise Stopped(status[name]["died"])
        if status["mode"] == "ESTOP":
            raise Stopped(status["fault"])


def _end(status: Status, success: bool | None) -> str:
    """Why the episode ended; empty while it goes on."""
    if success:
        return SUCCESS
    if status["control"]["silent"] and status["control"]["age"] > SILENT:
        return status["fault"]
    if status["mode"] == "RUNNING":
        return ""
    if status["fault"] or status["control"]["died"]:
        return status["fault"] or status["control"]["died"]
    return TIME if status["ended"] == "TIME" else status["stopped"] or "stopped by an operator"


def relative(status: Status, first: Status) -> Status:
    """`status` with what is counted since `first`."""
    before = first["stages"]
    stages = {
        k: {**v, "count": v["count"] - before[k]["count"]} for k, v in status["stages"].items()
    }
    missed = status["control"]["missed"] - first["control"]["missed"]
    return {**status, "stages": stages, "control": {**status["control"], "missed": missed}}


class TeleopSession(Session):
    """One episode without an end of its own: neither success nor a time that nobody said."""

    def run(self, episodes: int, seconds: float | None, home: bool) -> None:
        if home:
            self._go_home()
        self._play(seconds)

    def _success(self, status: Status) -> bool | None:
        return None


@dataclass(kw_only=True)
class RecordSession(Session):
    """Episodes are kept unless the operator discards them, until the dataset has as many as it
    should. Keys come from the terminal (`keys`) and from the `device`; `there`: episodes that the
    dataset has already; `reset_seconds`: time to put the scene back (None: until a key)."""

    keys: EpisodeKeys
    device: Device
    there: int
    reset_seconds: float | None
    stopping: bool = field(default=False, init=False)

    def run(self, episodes: int, seconds: float | None, home: bool) -> None:
        """Record until the dataset has `episodes`. Stopped as in a session."""
        with self.keys:
            while self.there < episodes and not self.stopping:
                if home:
                    self._go_home()
                print(f"episode {self.there + 1} of {episodes}", flush=True)
                self.pressed()  # what was typed before does not count
                self._play(seconds)
                episode = self.episodes[-1]
                if episode.end == DISCARDED:
                    self._discard()
                elif episode.recorded:
                    self.there += 1
                else:
                    raise Stopped(f"the episode is not on the disk: {episode.unkept}")
                if not self.stopping and (self.there < episodes or self.reset_seconds is None):
                    self._wait_for_reset(self.there < episodes)

    def pressed(self) -> Key:
        return self.keys.pressed() or self.device.pressed()

    def asked(self) -> str:
        key = self.pressed()
        self.stopping = self.stopping or key == "stop"
        return {"": "", "discard": DISCARDED}.get(key, KEPT)

    def stop(self) -> None:
        """Also: an episode that did not end by itself is not kept."""
        super().stop()
        if self.episodes and self.episodes[-1].end not in WHOLE and self.episodes[-1].recorded:
            with suppress(Stopped, ConfigError):
                self._discard()

    def _discard(self) -> None:
        number = int(self.status["recorder"]["ended"])
        box = Mailbox(self.folder / "discard", DISCARD, VERSION, create=False, write=True)
        box.fields["ended"] = number
        box.send()
        box.close()

        def gone(status: Status) -> bool:
            if problem := status["recorder"]["problem"] or status["recorder"]["died"]:
                raise Stopped(f"the episode was not discarded: {problem}")
            return status["recorder"]["discarded"] == number

        self._until(gone, "the episode to be discarded", watch=False)
        self.episodes[-1].recorded, self.episodes[-1].unkept = False, DROPPED

    def _wait_for_reset(self, more: bool) -> None:
        """The operator puts the scene back; they may still discard the episode before."""
        last = self.episodes[-1]
        words = "put the scene back; right arrow: the next episode" if more else "right arrow: done"
        words += "; left arrow: discard the last one" if last.recorded else ""
        print(f"{words}; Esc: stop recording", flush=True)
        seconds = math.inf if self.reset_seconds is None else self.reset_seconds
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._alive(self.status)
            key = self.pressed()
            if key == "discard" and last.recorded:
                self._discard()
                self.there -= 1
                print("discarded", flush=True)
            elif key == "stop":
                self.stopping = True
            if key in ("next", "stop"):
                return
            time.sleep(LOOK)
