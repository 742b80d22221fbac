"""The safety page: `python -m tests.real_robot.safety_page [FILE]` hurts a bridge in every way of
`blows.py` and its neighbours, with the settings that one would give a real arm, and writes what was
measured."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from benchmarks.measure import processor
from tests.real_robot import kills
from tests.real_robot.blows import ARM as BLOWS
from tests.real_robot.blows import BRIDGE, BUS, REFUSED, TABLE
from tests.real_robot.chaos import Blow, Outcome, Scene, scene, suffer
from tests.real_robot.chaos_drone import DRONE, flown
from tests.real_robot.chaos_scenes import (
    BOUND,
    CLOSED_BOUND,
    CONTACT,
    FINGER_AFTER,
    FINGER_BOUND,
    HANDS,
    TERMINAL,
    Contact,
    OnNothing,
    closed_on,
    contact,
    jaws,
    plate,
    reset_and_armed,
    terminal,
)
from tests.real_robot.contacts import ARMS, LONGEST, MOST_OVER, Touch, contacts, limit
from tests.real_robot.test_daemon import HERTZ
from tests.real_robot.test_yielding import PAYLOAD_BOUND, unsaid_payload

HERE = Path(__file__).with_name("safety_page.md")
TRIES = 4
COLUMNS = (
    "what was done",
    "what stops the arm",
    "at rest (bound), s",
    "latched (bound), s",
    f"contact force 1 s after the latch (bound {BOUND:.0f}), N",
    "reason, as logged",
    "records whole",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def main(path: Path) -> None:
    """Measure, print row by row, and write the page; about twenty minutes."""
    with suppress(PermissionError):
        os.nice(-10)  # before others, as a process that moves an arm would run
    rows: list[str] = []
    for row in table():
        rows.append(row)
        print(row, flush=True)
    text = HERE.read_text()
    made = {"table": HEAD + "\n".join(rows), "touches": touches(), "payload": payload()}
    made["kills"] = kills.table()
    path.write_text(text.format(**made, **settings()))


TOUCHES = (
    "robot",
    "limit, N",
    "drives",
    "contacts",
    "stopped by it",
    "largest force, N",
    "without the stage, N",
    f"longest above {MOST_OVER} of the limit (bound {1e3 * LONGEST:.0f}), ms",
    "without the stage, ms",
    "largest from 1 s after the latch on, N",
)


def touches(count: int = 300) -> str:
    """The table of running into walls: one row a simulated arm, `count` drives in all."""
    made = [f"| {' | '.join(TOUCHES)} |\n|{'---|' * len(TOUCHES)}"]
    for name in ARMS:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            found = contacts(name, Path(one), count // len(ARMS))
            free = contacts(name, Path(two), 10, force="unmeasured")
        made.append(touched(name, found, free))
        print(made[-1], flush=True)
    return "\n".join(made)


def touched(name: str, found: Sequence[Touch], free: Sequence[Touch]) -> str:
    """The row of robot NAME, whose force stage was left out in `free`."""
    over = max(each.over for each in found)
    cells = (
        name,
        f"{limit(name):g}",
        str(len(found)),
        str(sum(each.peak > 1 for each in found)),
        str(sum("pushes on the tool" in each.fault for each in found)),
        f"{max(each.peak for each in found):.0f}",
        f"{max(each.peak for each in free):.0f}",
        f"{1e3 * over:.0f}{' TOO LONG' if over > LONGEST else ''}",
        f"{1e3 * max(each.over for each in free):.0f}",
        f"{max(each.after for each in found):.1f}",
    )
    return f"| {' | '.join(cells)} |"


def payload() -> str:
    """What an arm with a payload that nobody said presses with from 1 s after a stop on, N."""
    with tempfile.TemporaryDirectory() as folder:
        pressed = unsaid_payload(Path(folder), "sim")
    return f"{pressed:.1f}{' TOO MUCH' if pressed > PAYLOAD_BOUND else ''}"


def settings() -> dict[str, object]:
    """What the text says of this run."""
    fresh = TABLE.fresh
    return {
        "hertz": HERTZ,
        "hold": fresh.hold,
        "stop": fresh.stop,
        "state": fresh.state,
        "frozen": fresh.frozen,
        "pause": fresh.pause,
        "watchdog": TABLE.watchdog,
        "silence": TABLE.silence,
        "hover": TABLE.hover,
        "beat_hold": TABLE.beat.hold,
        "beat_stop": TABLE.beat.stop,
        "bound": BOUND,
        "closed": CLOSED_BOUND,
        "finger": FINGER_BOUND,
        "finger_after": FINGER_AFTER,
        "payload_bound": PAYLOAD_BOUND,
        "machine": f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "load": os.getloadavg()[0],
        "nice": os.nice(0),
        "date": time.strftime("%Y-%m-%d"),
    }


def table() -> Iterator[str]:
    """Rows: the arm (each blow also in contact with a plate), servos, a drone."""
    forces: dict[str, str] = {}
    with plate(TABLE) as pressing:
        for blow in (*BRIDGE, *BLOWS):
            forces[blow.done] = force(contact(pressing, tried(pressing, blow)))
            print(f"on the plate: {blow.done}: {forces[blow.done]}", flush=True)
        at_stop = tried(pressing, CONTACT)
        armed = Contact(0.0, reset_and_armed(pressing), 0.0)
        stopped = f"{force(contact(pressing, at_stop))}; after reset and arm {force(armed)}"
    yield from rows(scene(TABLE), (*REFUSED, *BRIDGE, *BLOWS), forces)
    yield line(CONTACT, at_stop, stopped)
    yield from hands()
    yield from rows(terminal(TABLE), TERMINAL, forces)
    yield from rows(scene(TABLE, bus=True), BUS, forces)
    yield from rows(flown(TABLE), DRONE, forces)


def hands() -> Iterator[str]:
    """Rows of a hand that closes, on nothing and on a finger."""
    closing, finger = HANDS
    with jaws(TABLE, OnNothing) as empty:
        outcome = tried(empty, closing)
        lost = closed_on(outcome)
        wrong = " TOO MUCH" if lost > CLOSED_BOUND else ""
        yield line(closing, outcome, f"closed on by {lost:.1f} mm{wrong}")
    with jaws(TABLE) as full:
        outcome = tried(full, finger)
        pressed = contact(full, outcome, FINGER_AFTER)
        assert pressed is not None and pressed.after is not None
        wrong = " TOO MUCH" if pressed.after > FINGER_BOUND else ""
        yield line(finger, outcome, f"{pressed.after:.1f} from {FINGER_AFTER} s on{wrong}")


def rows(
    place: AbstractContextManager[Scene], blows: Sequence[Blow], forces: dict[str, str]
) -> Iterator[str]:
    """Of one scene, blow by blow."""
    with place as here:
        for blow in blows:
            yield line(blow, tried(here, blow), forces.get(blow.done, ""))


def line(blow: Blow, outcome: Outcome, force: str) -> str:
    """Of the table."""
    done, whole = (
        blow.done.format(paused=TABLE.paused, hung=TABLE.hung),
        "yes" if outcome.whole else "NO",
    )
    if blow.ends == "goes on":
        return f"| {done} | {blow.stops} | | not latched | | {outcome.reason} | {whole} |"
    at_rest, latched = blow.within(TABLE)
    still = took(outcome.still, at_rest)
    locked = "not latched" if blow.ends == "rests" else took(outcome.latched, latched)
    return f"| {done} | {blow.stops} | {still} | {locked} | {force} | {outcome.reason} | {whole} |"


def took(measured: float | None, bound: float) -> str:
    if measured is None:
        return "NEVER"
    return f"{measured:.2f} ({bound:.2f}){' LATE' if measured > bound else ''}"


def force(pressed: Contact | None) -> str:
    """What the plate says."""
    if pressed is None:
        return "NEVER latched"
    if pressed.after is None:  # the simulated arm is a part of the control process
        return f"{pressed.last:.1f} when the control process and the simulation end"
    return f"{pressed.after:.1f}{' TOO MUCH' if pressed.after > BOUND else ''}"


def tried(scene: Scene, blow: Blow) -> Outcome:
    """On a busy machine an arm may stop for a reason of its own before the blow falls."""
    for _ in range(TRIES):
        try:
            return suffer(scene, blow)
        except AssertionError as error:
            print(f"again: {blow.done}: {error}", flush=True)
    raise SystemExit(f"{blow.done}: not in {TRIES} tries; is the machine too busy?")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/safety.md"))
