"""Kills: `python -m tests.real_robot.kills [ROBOT...]` types `embodied deploy` on five simulated
robots, kills or hangs one of its processes while the arm moves, and types it again; 20 times.

What is said of the set-point is from the robot's own record, which outlives the process that wrote
it. Every process of a deployment has a mark in its environment, by which those that stay are found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from embodied.compose import compose
from embodied.core.build import build
from embodied.core.checkpoint import save
from embodied.core.spec import Leaf, Spec
from embodied.embodiments.controller import Controller
from embodied.real_robot.assemble import open_flight_recorder
from embodied.real_robot.daemon.client import ClientError, call
from embodied.real_robot.daemon.requests import Verb
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.mailbox import memory_folder
from embodied.real_robot.kernel.messages import Mode
from tests.builders import make_policy

MARK = "EMBODIED_KILLS"
MOVING, REST = 0.05, 0.01  # rad/s (m/s) of the set-point
QUIET = 0.1  # s of rest
SETTLE = 3.0  # s after a blow until the record is read: the daemon is missed after 2 s
END = 20.0  # s in which a deployment has ended by itself, or is asked to
BEGIN = 120.0  # s in which an arm begins to move
BOUND = 0.5  # s until the set-point rests

ROBOTS: dict[str, tuple[str, ...]] = {
    "sim": ("demonstrator=reach",),
    "franka_sim": ("demonstrator=fr3_lift_deploy",),
    "ur_sim": ("demonstrator=reach",),
    "so101_sim": ("demonstrator=reach",),
    "two_so101_sim": (),  # with a policy of random weights
}
KILL, STOP, HANGUP = signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP
BLOWS: dict[str, tuple[tuple[str, signal.Signals], ...]] = {
    "sim": (("deploy", KILL), ("terminal", HANGUP), ("daemon", KILL), ("control", KILL)),
    "franka_sim": (("daemon", STOP), ("control", KILL), ("emulator", KILL), ("terminal", HANGUP)),
    "ur_sim": (("control", STOP), ("policy", KILL), ("emulator", KILL), ("deploy", KILL)),
    "so101_sim": (("daemon", KILL), ("policy", STOP), ("terminal", HANGUP), ("all", KILL)),
    "two_so101_sim": (("control", KILL), ("emulator", STOP), ("daemon", STOP), ("all", KILL)),
}
"""What is struck, in this order: a process; `terminal`: the group of the terminal's processes;
`all`: every process of the deployment."""


@dataclass(frozen=True)
class Kill:
    """What came of a blow. `rest`: s until the set-point rested (None: it still moves); `yielded`:
    how far (rad, m) it went on to where the arm was measured; `ended`: how the command ended;
    `left`: what was there when it had; `again`: s until the arm of the next deployment moved (None:
    it did not), and `why` not; `after`: what was still there then."""

    robot: str
    done: str
    rest: float | None
    yielded: float
    reason: str
    ended: str
    left: tuple[str, ...]
    again: float | None
    why: str
    after: tuple[str, ...] = ()

    @property
    def late(self) -> bool:
        """Whether the set-point moved for too long; an arm that is gone hears none."""
        return "emulator" not in self.done and (self.rest is None or self.rest > BOUND)


class Deployed:
    """`embodied deploy` in a session of its own, as in a terminal."""

    def __init__(self, robot: str, place: Path, number: int, words: Sequence[str]) -> None:
        self.folder = place / "folder"
        self.out = place / f"out{number}"
        self.mark = f"{place.name}-{number}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark}
        self.log = place / f"said{number}"
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "embodied.cli", "deploy", f"robot={robot}", *words),
                *("yes=true", "episodes=100", f"out={self.out}", f"folder={self.folder}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )

    def pids(self) -> dict[int, str]:
        """Processes with this deployment's mark, and their names."""
        return dict(marked(f"{MARK}={self.mark}".encode()))

    def moving(self) -> bool:
        """Wait until its policy moves the arm; False where it never does. Opens the record."""
        while time.monotonic() < self.began + BEGIN and self.process.poll() is None:
            time.sleep(0.02)
            with suppress(ClientError):
                if call(self.folder, Verb.STATUS, timeout=5.0).status["mode"] == "RUNNING":
                    break
        else:
            return False
        self.ring = self.record()
        while time.monotonic() < self.began + BEGIN and self.process.poll() is None:
            time.sleep(0.01)
            if (speeds(self.ring.records())[1][-1:] > MOVING).any():
                return True
        return False

    def record(self) -> BlackBox:
        """The control process's record."""
        return open_flight_recorder(Deployment.read(self.out), self.folder)

    def strike(self, who: str, number: signal.Signals) -> None:
        """Send the signal. A process that hangs is killed by `end`."""
        if who == "terminal":
            os.killpg(self.process.pid, number)
        elif who == "deploy":
            self.process.send_signal(number)
        else:
            for pid, name in self.pids().items():
                if who in ("all", name):
                    os.kill(pid, number)

    def end(self, hung: bool) -> str:
        """Let the command end by itself, or as an operator ends it (Ctrl-C; what hangs is killed
        first), and say how it ended."""
        how = "by itself"
        if hung:
            for pid in self.pids():
                if stopped(pid):
                    os.kill(pid, KILL)
                    how = "what hung was killed"
        try:
            self.process.wait(END / 2)
        except subprocess.TimeoutExpired:
            how = "Ctrl-C"
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END)
        if self.process.poll() is None:
            how = "HAD TO BE KILLED"
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + END / 2
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        return f"{how}, status {self.process.returncode}"

    def said(self) -> str:
        """The last line that the command printed."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def marked(mark: bytes) -> Iterator[tuple[int, str]]:
    """Processes whose environment holds `mark`: a pid and what it is."""
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                yield int(place.name), named((place / "cmdline").read_bytes().decode())


def named(command: str) -> str:
    """What the process of this command line is."""
    parts = {
        "emulators": "emulator",
        "hardware_sim": "emulator",
        "real_robot.daemon.daemon": "daemon",
        "daemon_process": "daemon",
        "control.main": "control",
        "policy.main": "policy",
        "recording.main": "recorder",
        "embodied.cli": "deploy",
    }
    return next((name for part, name in parts.items() if part in command), command)


def stopped(pid: int) -> bool:
    """Whether a process hangs (SIGSTOP)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def speeds(records: Any) -> tuple[Any, Any]:
    """Times [k] (s) and the largest speed [k] (rad/s, m/s) of the recorded set-point."""
    now = records["now"]
    if len(now) < 3:
        return np.zeros(0), np.zeros(0)
    steps = np.abs(np.diff(records["sent"], axis=0)).max(1)
    return now[1:], steps / np.maximum(np.diff(now), 1e-4)


def rest(ring: BlackBox, began: float) -> tuple[float | None, float]:
    """s from `began` until the set-point rested for `QUIET` s (None: it never does), and how far
    (rad, m) it went on from there. A pause in what the policy does is no rest: only a latched arm
    may go on, and yields to where it was measured."""
    records = ring.records()  # once: the control process may still write
    times, speed = speeds(records)
    moves = speed > REST
    followed = times[moves & (records["mode"][1:] == Mode.RUNNING)]
    since = max(began, float(followed[-1])) if len(followed) else began
    moving = times[moves & (times > since)]
    ends = [since, *moving]
    quiet = np.maximum(QUIET, 2 * np.diff(times, append=times[-1]))  # a slow tick is no rest
    waits = dict(zip(times.tolist(), quiet.tolist(), strict=True))
    rested = next(t for t in ends if not ((moving > t) & (moving < t + waits.get(t, QUIET))).any())
    if rested > times[-1] - QUIET and times[-1] > began + SETTLE - QUIET:
        return None, 0.0
    sent = records["sent"]
    there = sent[int(np.searchsorted(times, rested, "right"))]
    return float(rested - began), float(np.abs(sent[-1] - there).max())


def remains(before: set[Path], folder: Path) -> tuple[str, ...]:
    """Sockets and shared memory that were not there before."""
    new = set(memory_folder().glob("embodied-*")) - before
    kept = [folder / name for name in ("daemon.sock", "state") if (folder / name).exists()]
    return tuple(sorted(path.name for path in {*new, *kept} if path != folder.parent))


def struck(robot: str, blows: Sequence[tuple[str, signal.Signals]]) -> Iterator[Kill]:
    """Each blow of a robot; the next deployment is struck by the next blow, the last one ends by
    Ctrl-C."""
    with TemporaryDirectory(dir=memory_folder(), prefix="embodied-kills-") as name:
        place = Path(name)
        before = set(memory_folder().glob("embodied-*"))
        words = (*ROBOTS[robot], *policy(robot, place))
        here = Deployed(robot, place, 0, words)
        if not here.moving():
            raise SystemExit(f"{robot} does not move: {here.said()}")
        for number, (who, sent) in enumerate(blows, 1):
            began = time.monotonic()
            here.strike(who, sent)
            time.sleep(SETTLE)
            rested, yielded = rest(here.ring, began)
            reason = bytes(here.ring.records()["fault"][-1]).decode()
            here.ring.close()
            ended = here.end(hung=sent == STOP)
            left = (*here.pids().values(), *remains(before, here.folder))
            after = here
            here = Deployed(robot, place, number, words)
            moves = here.moving()
            took = time.monotonic() - here.began if moves else None
            stay = [path.name for path in memory_folder().glob("embodied-emulator-*")]
            ours = set(stay) & set(left)
            yield Kill(
                robot,
                f"{who}, {sent.name}",
                rested,
                yielded,
                reason,
                ended,
                left,
                took,
                "" if moves else here.said(),
                (*after.pids().values(), *ours),
            )
            if not moves:
                here.end(hung=False)
                return
        here.end(hung=False)


def policy(robot: str, place: Path) -> tuple[str, ...]:
    """Words that name a policy where no script moves the robot."""
    if ROBOTS[robot]:
        return ()
    arm = "{_target_: embodied.embodiments.joint_position.JointPosition, arm: so101}"
    words = [f"robot.controller.controllers.{side}={arm}" for side in ("left", "right")]
    node = compose("deploy", [f"robot={robot}", *words]).node["robot"]
    names = tuple(build(node["controller"], Controller).names)
    seen = tuple(f"q{i}" for i in range(1, len(names) + 1))
    act = Leaf((len(names),), low=-1.0, high=1.0, names=names)
    spec = Spec({"state": Leaf((len(names),), names=seen)}, act, dt=0.05)
    made = make_policy("deterministic.Deterministic", spec)
    save(place / "run" / "checkpoints" / "00000000", made, 0)
    return (f"policy={place / 'run'}", *words)


def table(robots: Sequence[str] = tuple(ROBOTS)) -> str:
    """The table of all kills, printed row by row as they come."""
    columns = ("robot", "struck", f"set-point rests (bound {BOUND}), s", "then yields by, rad")
    columns += ("reason, as recorded",)
    columns += ("the command ended", "left then", "next deploy moves after, s", "left then")
    rows = [f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"]
    signal.signal(HANGUP, signal.SIG_DFL)  # also where this command was started by nohup
    for robot in robots:
        for kill in struck(robot, BLOWS[robot]):
            rows.append(line(kill))
            print(rows[-1], flush=True)
    return "\n".join(rows)


def line(kill: Kill) -> str:
    """A row of the table."""
    late = " LATE" if kill.late else ""
    cells = (
        kill.robot,
        kill.done,
        f"{'never' if kill.rest is None else f'{kill.rest:.2f}'}{late}",
        f"{kill.yielded:.3f}",
        kill.reason or "none",
        kill.ended,
        ", ".join(kill.left) or "nothing",
        f"DOES NOT: {kill.why}" if kill.again is None else f"{kill.again:.1f}",
        f"STAYS: {', '.join(kill.after)}" if kill.after else "nothing",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    table(sys.argv[1:] or tuple(ROBOTS))
