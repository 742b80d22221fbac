"""A state machine of the modes: `python -m tests.real_robot.modes CONFIG [OPERATIONS] [SEED]`.

An operator, a policy, a hand on hold-to-run, a daemon and a wire do anything in any order to the
complete control loop of a robot configuration: driver, chain, follower and home as `assemble`
builds them, an ideal arm behind them. After every tick is looked at:

- after a press of stop, or a fault, only a later reset (or release) leads on;
- what is sent stays in IDLE and ARMED; RUNNING begins with START of an ARMED arm, HOMING with HOME
  of an IDLE one; a stopped arm, one that no hand holds to run, and one with no daemon, rest;
- nothing that is sent leaves a limit or a region (`oracle.Oracle`), and nothing raises.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from embodied.core.build import allow
from embodied.real_robot.assemble import build_control, open_channels, open_flight_recorder
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.ipc.channels import Role
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.checks import LET_GO
from embodied.real_robot.kernel.mailbox import memory_folder
from embodied.real_robot.kernel.messages import Command, Mode
from tests.real_robot.ideal_arm import IdealArm
from tests.real_robot.long_run import deployment
from tests.real_robot.oracle import Oracle

WAITS = (1, 2, 5, 20, 60, 150)  # ticks
ASKED = tuple(command for command in Command if command not in (Command.QUIT, Command.NOTHING))
TOGGLES = ("daemon", "hand", "policy", "broken", "deaf", "lying", "struck")
OPERATIONS = (
    *("go", "go", "go", "wait", "wait", "wait", "act", "act", "mend", "press", "lead"),
    *(f"ask {command.name}" for command in ASKED),
    *(f"toggle {name}" for name in TOGGLES),
)
"""What may be done; `Modes.do` takes a size from 0 to 5 with each."""
LEADS_ON = (Command.RESET, Command.RELEASE, Command.RELEASE_SUPPORTED)
STILL = (Mode.IDLE, Mode.ARMED)
RESTS = 1.5  # s that braking takes at most, within the limits of any configuration
YIELDS = 4.0  # s after which a stopped arm that is measured and obeys yields no more
EXACT = 1e-9
INSIDE = 1e-6  # rad, m: a person leads the arm up to here before its limits
KEPT: list[tempfile.TemporaryDirectory[str]] = []  # of the reflexes, until the process ends


@cache
def settings(config: str) -> Deployment:
    """Of configs/robot/CONFIG.yaml, with an ideal arm for its driver."""
    KEPT.append(tempfile.TemporaryDirectory())
    made = deployment(config, Path(KEPT[-1].name))
    limits = made.limits
    driver = {
        "_target_": "tests.real_robot.ideal_arm.IdealArm",
        "start": made.home,
        "low": (np.add(limits.low, limits.margin) + INSIDE).tolist(),
        "high": (np.subtract(limits.high, limits.margin) - INSIDE).tolist(),
        "blow": [2.0 * each for each in limits.torque],
    }
    return replace(made, driver=driver, sensed=(), outside=None, seconds=0.1)


class Modes:
    """`do` an operation; AssertionError where an invariant is broken."""

    def __init__(self, config: str) -> None:
        allow("tests")
        self.made = settings(config)
        self.folder = tempfile.TemporaryDirectory(dir=memory_folder())
        here = Path(self.folder.name)
        self.there = open_channels(self.made, here, Role.ALL, create=True)
        open_flight_recorder(self.made, here, create=True)
        self.control = build_control(self.made, here)
        assert isinstance(self.control.driver, IdealArm)
        self.arm: IdealArm = self.control.driver
        self.now, self.dt = 1000.0, 1 / self.made.hertz
        self.control.clock = self.arm.clock = lambda: self.now
        self.control.connect()
        self.names = self.control.source.follower.controller.names
        self.action = np.zeros(len(self.names))
        self.on = {"daemon": True, "hand": True, "policy": True}
        self.heard = dict.fromkeys(self.on, self.now)
        self.mode, self.since, self.pressed = Mode.IDLE, self.now, False
        self.failed = -np.inf
        """When (s) the arm was last not measured, or did not obey."""
        self.sent: Floats = self.control.chain.limiter.q.copy()
        self.oracle = Oracle(self.made, self.sent)
        self.random, self.ticks = np.random.default_rng(0), 0
        self.seen: Counter[str] = Counter()  # how often each mode was entered

    def close(self) -> None:
        """Check what was sent, and forget it."""
        self.oracle.check()
        self.folder.cleanup()

    def do(self, operation: str, size: int) -> None:
        """Do one of `OPERATIONS`; at least one tick goes by."""
        what, _, name = operation.partition(" ")
        if what == "toggle":
            self._toggle(name)
        elif what == "press":
            self.there.estop.press()
            self.pressed = True
        elif what == "act":
            scale = (0.0, 0.3, 1.0, 3.0, 1e6, np.nan)[size]
            self.action = scale * self.random.uniform(-1, 1, len(self.names))
        elif what == "lead":
            self.arm.led = 0.02 * size - 0.04
        elif what in ("mend", "go"):
            self._mend()
        self.tick(Command[name] if what == "ask" else None)
        if what == "wait":
            self.wait(WAITS[size] - 1)
        elif what == "go":
            self._go()

    def wait(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    def tick(self, command: Command | None = None) -> bool:
        """One tick of the control loop, in which `command` is asked for; whether it was done."""
        self.ticks += 1
        self.now += self.dt
        if self.on["daemon"]:
            self.there.beat(self.now)
        if self.on["hand"]:
            self.there.deadman.fields["count"] += 1
            self.there.deadman.fields["time"] = self.now
            self.there.deadman.send()
        for name in self.on:
            self.heard[name] = self.now if self.on[name] else self.heard[name]
        if self.arm.broken or self.arm.deaf or self.arm.lying:
            self.failed = self.now
        self._speak()
        request = self.there.request.fields
        if command is not None:
            request["number"] += 1
            request["command"] = command
            request["stop"] = self.there.estop.number
            self.there.request.send()
        self.control.turn()
        assert self.there.state.receive()
        state = self.there.state.fields[0]
        done = command is not None and state["answered"] == request["number"][0]
        self._judge(Mode(int(state["mode"])), command if done else None, state["sent"].copy())
        return done

    def _toggle(self, name: str) -> None:
        if name in self.on:
            self.on[name] = not self.on[name]
        else:
            setattr(self.arm, name, not getattr(self.arm, name))

    def _mend(self) -> None:
        """Everybody is there again, and nothing is broken."""
        self.on = dict.fromkeys(self.on, True)
        self.arm.broken = self.arm.deaf = self.arm.lying = self.arm.struck = False

    def _go(self) -> None:
        """What an operator does to let the policy act."""
        self.action = np.nan_to_num(np.clip(self.action, -1, 1))
        if self.mode in (Mode.ESTOP, Mode.RELEASED):
            self.wait(len(WAITS))
            self.tick(Command.RESET)
        self.tick(Command.ARM)
        self.wait(round(2 * self.made.step / self.dt))
        self.tick(Command.START)

    def _speak(self) -> None:
        """The policy posts a chunk in every step of its own."""
        if not self.on["policy"] or self.ticks % max(1, round(self.made.step / self.dt)):
            return
        chunk = self.there.chunk.fields[0]
        chunk["number"] += 1
        chunk["seen"] = chunk["start"] = self.now - self.dt
        chunk["steps"], chunk["size"] = 4, len(self.names)
        chunk["actions"][:4, : len(self.names)] = self.action
        self.there.chunk.send()

    def _judge(self, mode: Mode, done: Command | None, sent: Floats) -> None:
        """What became of this tick; `done`: the command that was done in it."""
        before, fault = self.mode, self.control.fault
        assert not self.control.internal_error, fault
        assert bool(fault) == (mode == Mode.ESTOP), f"{mode.name}: {fault!r}"
        if before == Mode.ESTOP and mode != before:
            assert done in LEADS_ON, f"{mode.name} after a stop"
        if self.pressed:
            assert mode in (Mode.ESTOP, Mode.RELEASED) or done == Command.RESET, "a press was lost"
            self.pressed = done != Command.RESET
        if mode == Mode.RUNNING and before != mode:
            assert before == Mode.ARMED and done == Command.START
        if mode == Mode.HOMING and before != mode:
            assert before == Mode.IDLE and done == Command.HOME
        if mode != before:
            self.since = self.now
            self.seen[mode.name] += 1
        self._judge_motion(before, mode, float(np.abs(sent - self.sent).max()))
        if Mode.RELEASED in (before, mode) or done == Command.RESET:
            self.oracle.check()  # it goes on from where a person led it, or where it was measured
            self.oracle.begin(sent)
        self.oracle.take(sent)
        self.sent, self.mode = sent, mode

    def _judge_motion(self, before: Mode, mode: Mode, moved: float) -> None:
        """`moved`: by how much (rad, m) the set-point did."""
        if before in STILL and mode in STILL:
            assert moved <= EXACT, f"{moved} in {mode.name}"
        if mode == Mode.ESTOP and self.now - max(self.since, self.failed) > YIELDS:
            assert moved <= EXACT, f"{moved} after a stop"
        if mode == before and mode in (Mode.RUNNING, Mode.HOMING):
            hand, daemon = (self.now - self.heard[name] for name in ("hand", "daemon"))
            waits = max(hand - LET_GO, daemon - self.made.heartbeat.hold)
            assert waits <= RESTS or moved <= EXACT, f"{moved} with nobody there"


def walk(config: str, operations: int, seed: int = 0) -> Modes:
    """Random operations, a hundred from each beginning; AssertionError says which were done."""
    random, seen, made = np.random.default_rng(seed), Counter[str](), Modes(config)
    done: list[tuple[str, int]] = []
    for number in range(1, operations + 1):
        done.append((str(random.choice(OPERATIONS)), int(random.integers(len(WAITS)))))
        try:
            made.do(*done[-1])
        except AssertionError as error:
            error.add_note(f"{config}, seed {seed}: after {done}")
            raise
        if number % 100 == 0 or number == operations:
            seen += made.seen
            made.close()
        if number % 100 == 0 and number < operations:
            made = Modes(config)
            done.clear()
    made.seen = seen
    return made


def main(config: str, operations: str = "20000", seed: str = "0") -> None:
    """Walk, and print how often each mode was entered."""
    torch.set_num_threads(1)
    seen = walk(config, int(operations), int(seed)).seen
    print(f"{config}: {operations} operations, all invariants held; {dict(seen)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
