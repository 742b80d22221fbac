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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from embodied.real_robot.assemble import open_flight_recorder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.ring_buffer import BlackBox
from embodied.real_robot.kernel.mailbox import memory_folder
from embodied.real_robot.kernel.messages import Mode
from tests.builders import spawn
from tests.real_robot.test_daemon import in_mode
from tests.real_robot.test_joined import two_arm_words

MARK = "EMBODIED_KILLS"
MOVING, REST = 0.05, 0.01  # rad/s (m/s) of the set-point
QUIET = 0.1  # s of rest
SETTLE = 3.0  # s after a blow until the record is read: the daemon is missed after 2 s
END = 20.0  # s in which a deployment has ended by itself, or is asked to
BEGIN = 120.0  # s in which an arm begins to move
BOUND = 0.5  # s until the set-point rests
KILL, STOP, HANGUP = signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP

DEMONSTRATORS = {"sim": "reach", "franka_sim": "fr3_lift_deploy", "ur_sim": "reach"}
DEMONSTRATORS |= {"so101_sim": "reach"}
"""Of robots that a script moves; any other gets a policy of random weights."""
BLOWS: dict[str, tuple[tuple[str, signal.Signals], ...]] = {
    "sim": (("deploy", KILL), ("terminal", HANGUP), ("daemon", KILL), ("control", KILL)),
    "franka_sim": (("daemon", STOP), ("control", KILL), ("emulator", KILL), ("terminal", HANGUP)),
    "ur_sim": (("control", STOP), ("policy", KILL), ("emulator", KILL), ("deploy", KILL)),
    "so101_sim": (("daemon", KILL), ("policy", STOP), ("terminal", HANGUP), ("all", KILL)),
    "two_so101_sim": (("control", KILL), ("emulator", STOP), ("daemon", STOP), ("all", KILL)),
}
"""What is struck, in this order: a process; `terminal`: the group of the terminal's processes;
`all`: every process of the deployment."""
PROCESSES = {
    "emulators": "emulator",
    "hardware_sim": "emulator",
    "real_robot.daemon.daemon": "daemon",
    "control.main": "control",
    "policy.decider": "policy",
    "real_robot.recorder": "recorder",
    "embodied.cli": "deploy",
}
"""What a process is, by a part of its command line."""
COLUMNS = (
    *("robot", "struck", f"set-point rests (bound {BOUND}), s", "then yields by, rad"),
    *("reason, as recorded", "the command ended", "left then"),
    *("next deploy moves after, s", "left then"),
)


class Deployed:
    """`embodied deploy` in a session of its own, as in a terminal."""

    def __init__(self, place: Path, number: int, words: Sequence[str]) -> None:
        self.folder, self.out = place / "folder", place / f"out{number}"
        self.mark, self.log = f"{place.name}-{number}", place / f"said{number}"
        self.began = time.monotonic()
        more = ("yes=true", "episodes=100", f"out={self.out}", f"folder={self.folder}")
        self.process = spawn(
            *("-m", "embodied.cli", "deploy", *words, *more),
            env={MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def pids(self) -> dict[int, str]:
        """Processes with this deployment's mark in their environment, and what they are."""
        found: dict[int, str] = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                    line = (place / "cmdline").read_bytes().decode()
                    what = (name for part, name in PROCESSES.items() if part in line)
                    found[int(place.name)] = next(what, line)
        return found

    def moving(self) -> bool:
        """Wait until its policy moves the arm; False where it never does. Opens the record."""
        while not in_mode(self.folder, "RUNNING"):
            if time.monotonic() > self.began + BEGIN or self.process.poll() is not None:
                return False
            time.sleep(0.02)
        self.ring = open_flight_recorder(Deployment.read(self.out), self.folder)
        while time.monotonic() < self.began + BEGIN and self.process.poll() is None:
            time.sleep(0.01)
            if (speeds(self.ring.records())[1][-1:] > MOVING).any():
                return True
        return False

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

    def end(self, hung: bool = False) -> str:
        """Let the command end by itself, or as an operator ends it (Ctrl-C; what hangs is killed
        first), and say how it ended."""
        how = "by itself"
        for pid in self.pids() if hung else ():
            with suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
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
    quiet = np.maximum(QUIET, 2 * np.diff(times, append=times[-1]))  # a slow tick is no rest
    waits = dict(zip(times.tolist(), quiet.tolist(), strict=True))
    rested = next(
        t for t in [since, *moving] if not ((moving > t) & (moving < t + waits.get(t, QUIET))).any()
    )
    if rested > times[-1] - QUIET and times[-1] > began + SETTLE - QUIET:
        return None, 0.0
    sent = records["sent"]
    there = sent[int(np.searchsorted(times, rested, "right"))]
    return float(rested - began), float(np.abs(sent[-1] - there).max())


def struck(robot: str) -> Iterator[str]:
    """Rows of the table: each blow of a robot; the next deployment is struck by the next blow, the
    last one ends by Ctrl-C."""
    with TemporaryDirectory(dir=memory_folder(), prefix="embodied-kills-") as name:
        place = Path(name)
        before = set(memory_folder().glob("embodied-*"))
        own = (f"demonstrator={DEMONSTRATORS[robot]}",) if robot in DEMONSTRATORS else ()
        words = (f"robot={robot}", *(own or two_arm_words(place)))
        here = Deployed(place, 0, words)
        if not here.moving():
            raise SystemExit(f"{robot} does not move: {here.said()}")
        for number, (who, sent) in enumerate(BLOWS[robot], 1):
            began = time.monotonic()
            here.strike(who, sent)
            time.sleep(SETTLE)
            rested, yielded = rest(here.ring, began)
            reason = bytes(here.ring.records()["fault"][-1]).decode()
            here.ring.close()
            ended = here.end(hung=sent == STOP)
            # Sockets and shared memory that were not there before.
            new = [path.name for path in set(memory_folder().glob("embodied-*")) - before]
            kept = [each for each in ("daemon.sock", "state") if (here.folder / each).exists()]
            left = (*here.pids().values(), *sorted({*new, *kept} - {place.name}))
            last, here = here, Deployed(place, number, words)
            moves = here.moving()
            took = f"{time.monotonic() - here.began:.1f}"
            memory = {path.name for path in memory_folder().glob("embodied-emulator-*")}
            stay = (*last.pids().values(), *(memory & {*left}))
            # An arm that is gone hears no set-point.
            late = who != "emulator" and (rested is None or rested > BOUND)
            cells = (
                *(robot, f"{who}, {sent.name}"),
                f"{'never' if rested is None else f'{rested:.2f}'}{' LATE' if late else ''}",
                *(f"{yielded:.3f}", reason or "none", ended, ", ".join(left) or "nothing"),
                took if moves else f"DOES NOT: {here.said()}",
                f"STAYS: {', '.join(stay)}" if stay else "nothing",
            )
            yield f"| {' | '.join(cells)} |"
            if not moves:
                break
        here.end()


def table(robots: Sequence[str] = tuple(BLOWS)) -> str:
    """The table of all kills, printed row by row as they come."""
    made = [f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"]
    signal.signal(HANGUP, signal.SIG_DFL)  # also where this command was started by nohup
    for robot in robots:
        for row in struck(robot):
            made.append(row)
            print(row, flush=True)
    return "\n".join(made)


if __name__ == "__main__":
    table(sys.argv[1:] or tuple(BLOWS))
