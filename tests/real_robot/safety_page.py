"""The safety page: `python -m tests.real_robot.safety_page [FILE]` hurts a bridge in every way of
`blows.py`, with the settings that one would give a real arm, and writes what was measured."""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path

from embodied.bench.measure import processor
from tests.real_robot.blows import ARM, BUS, TABLE
from tests.real_robot.chaos import Blow, Outcome, Scene, scene, suffer
from tests.real_robot.chaos_drone import DRONE, flown
from tests.real_robot.test_daemon import HERTZ

HERE = Path(__file__).with_name("safety_page.md")
TRIES = 4
HEAD = (
    "| what was done | what stops the arm | at rest (bound), s | latched (bound), s "
    "| reason, as logged | records whole |\n|---|---|---|---|---|---|\n"
)


def main(path: Path) -> None:
    """Measure, print row by row, and write the page; about two minutes."""
    rows: list[str] = []
    with suppress(PermissionError):
        os.nice(-10)  # before others, as a process that moves an arm would run
    with scene(TABLE) as arm:
        for blow in ARM:
            rows.append(line(blow, tried(arm, blow)))
            print(rows[-1], flush=True)
    with scene(TABLE, bus=True) as bus:
        for blow in BUS:
            rows.append(line(blow, tried(bus, blow)))
            print(rows[-1], flush=True)
    with flown(TABLE) as drone:
        for blow in DRONE:
            rows.append(line(blow, tried(drone, blow)))
            print(rows[-1], flush=True)
    fresh = TABLE.fresh
    page = HERE.read_text().format(
        table=HEAD + "\n".join(rows),
        hertz=HERTZ,
        hold=fresh.hold,
        stop=fresh.stop,
        state=fresh.state,
        frozen=fresh.frozen,
        pause=fresh.pause,
        watchdog=TABLE.watchdog,
        silence=TABLE.silence,
        hover=TABLE.hover,
        machine=f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}",
        load=os.getloadavg()[0],
        nice=os.nice(0),
        date=time.strftime("%Y-%m-%d"),
    )
    path.write_text(page)


def line(blow: Blow, outcome: Outcome) -> str:
    """Of the table."""
    done, whole = blow.done.format(paused=TABLE.paused), "yes" if outcome.whole else "NO"
    if blow.ends == "goes on":
        return f"| {done} | nothing has to: it goes on | | not latched | | {whole} |"
    at_rest, latched = blow.within(TABLE)
    still, locked = took(outcome.still, at_rest), took(outcome.latched, latched)
    return f"| {done} | {blow.stops} | {still} | {locked} | {outcome.reason} | {whole} |"


def took(measured: float | None, bound: float) -> str:
    if measured is None:
        return "NEVER"
    return f"{measured:.2f} ({bound:.2f}){' LATE' if measured > bound else ''}"


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
