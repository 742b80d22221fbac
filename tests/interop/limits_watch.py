"""Watches every tick of a daemon: whether what was sent stayed within the robot's limits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from embodied.real_robot.assemble import build_regions, open_flight_recorder
from embodied.real_robot.daemon.client import ClientError, call
from embodied.real_robot.daemon.requests import RequestError
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import DAEMON_GONE, TERMINATED
from embodied.real_robot.kernel.mailbox import MailboxError
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.safety.workspace import Region

PAST = 3  # ticks that a difference of the third order looks back
BULGE = 0.005  # m that a motion to rest may lead out of a region between two samples


class RegionWatch:
    """How far outside of one region the set-point is, against where it may be: not further out
    than it was since the last reset, and not further than where an arm that was stopped is
    measured (its set-point yields to the measured pose, docs/safety.md)."""

    def __init__(self, region: Region) -> None:
        self.region, self.best, self.stopped = region, 0.0, False

    def out(self, sent: Any, measured: Any, stopped: bool) -> float:
        """m further out than allowed; at most 0 inside."""
        inside = self._inside(sent)
        if self.stopped and not stopped:  # a reset: it begins here
            self.best = inside
        elif stopped:
            self.best = min(self.best, self._inside(measured))
        self.stopped = stopped
        further = self.best - inside
        self.best = max(self.best, inside)
        return further

    def _inside(self, q: Any) -> float:
        """0 inside, negative by as many m as it is outside."""
        return min(0.0, float(np.min(self.region.depths(q[None])[0])))


class LimitsWatch:
    """As a context, beside the program that moves the robot of `folder`. `reset`: after a latched
    fault, do what an operator does."""

    def __init__(self, folder: Path, reset: bool = True) -> None:
        self.folder, self.reset = folder, reset
        self.ticks, self.resets = 0, 0
        self.worst: dict[str, float] = {"position": 0, "velocity": 0, "acceleration": 0, "jerk": 0}
        """How much of each limit was used at most, 1 being all of it; region: m further outside
        than where the motion began, or than where a stopped arm, which yields, was measured."""
        self.reset_jump = 0.0
        """The farthest (rad) that a reset moved the set-point: after a lost wire it begins where
        the arm is measured. Differences across it are not counted above."""
        self.faults: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()
        self.latched: set[str] = set()
        """Reasons of latched stops; not the one with which every session ends."""
        self.seen: list[Any] = []
        """Joint positions that were measured, a few times a second."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LimitsWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def require(self) -> None:
        """AssertionError where anything was sent that is outside of a limit."""
        assert self.ticks > 0
        for name, share in self.worst.items():
            assert share <= (BULGE if name == "region" else 1 + 1e-6), (name, share)

    def _run(self) -> None:
        ring, made, count = self._wait(), Deployment.read(self.folder), 0
        self.made, self.regions = made, [RegionWatch(each) for each in build_regions(made)]
        past = np.zeros((0, made.joints))
        last, mode = -1, -1
        while not self._done.wait(0.05):
            with suppress(MailboxError):
                records, count = ring.since(count)
                for tick in records:
                    number = int(tick["tick"])
                    past = past if number == last + 1 else past[:0]
                    if mode == Mode.ESTOP and int(tick["mode"]) != mode and len(past):
                        jump = float(np.abs(tick["sent"] - past[-1]).max())
                        self.reset_jump, past = max(self.reset_jump, jump), past[:0]
                    last, mode = number, int(tick["mode"])
                    past = np.concatenate([past[-PAST:], tick["sent"][None]])
                    self._check(past, tick)
                if len(records):
                    self.seen.append(records[-1]["q"].copy())
                    self._operator(records[-1])

    def _wait(self) -> Any:
        while not self._done.wait(0.02):
            with suppress(Exception):
                made = Deployment.read(self.folder)
                return open_flight_recorder(made, self.folder)
        raise SystemExit

    def _check(self, past: Any, tick: Any) -> None:
        limits, dt = self.made.limits, 1 / self.made.hertz
        self.ticks += 1
        self.modes[Mode(int(tick["mode"])).name] += 1
        reason = bytes(tick["fault"]).decode(errors="replace")
        if reason and not reason.startswith((DAEMON_GONE, TERMINATED)):
            self.latched.add(reason)
        sent = past[-1]
        low, high = np.asarray(limits.low), np.asarray(limits.high)
        middle, half = (low + high) / 2, (high - low) / 2
        self._most("position", np.abs(sent - middle) / half)
        orders = ((limits.velocity, "velocity"), (limits.acceleration, "acceleration"))
        for order, (most, name) in enumerate((*orders, (limits.jerk, "jerk")), 1):
            if len(past) > order:
                change = np.diff(past[-order - 1 :], order, axis=0)[0] / dt**order
                self._most(name, np.abs(change) / np.asarray(most))
        stopped = int(tick["mode"]) == Mode.ESTOP
        for region in self.regions:
            self._most("region", region.out(sent, np.asarray(tick["q"]), stopped))

    def _most(self, name: str, shares: Any) -> None:
        self.worst[name] = max(self.worst.get(name, 0.0), float(np.max(shares)))

    def _operator(self, tick: Any) -> None:
        if int(tick["mode"]) != Mode.ESTOP or not self.reset:
            return
        reason = bytes(tick["fault"]).decode(errors="replace")
        with suppress(ClientError, RequestError):
            if call(self.folder, "reset", 10.0).ok:
                self.faults[reason] += 1
                self.resets += 1
                time.sleep(0.1)
