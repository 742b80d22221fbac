"""The text of a robot's page, as HTML; text from the deployment is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape, unescape
from pathlib import Path
from typing import Any

from embodied.viewer.robot.monitor import RobotMonitor

SHAPING = "limits"
"""The stage that keeps rates. It acts in most ticks of a normal motion: no intervention."""
USUAL = (SHAPING, "enabled")
"""Stages that act in normal operation; `enabled` holds an arm before it is started."""
NOTES = 8
SLOW = 0.8
"""Share of its rate below which the control process is too slow."""
STYLE = f"<style>{Path(__file__).with_name('robot.css').read_text()}</style>"


def headline(monitor: RobotMonitor) -> str:
    """The robot, its mode, its fault, and whether this is current."""
    lines: list[str] = []
    about = monitor.deployment
    if about is not None:
        dry = " · dry run: a simulated arm moves" if about.dry else ""
        text = f"{about.robot} · {mode(monitor)}{dry}"
        kind = monitor.mode if monitor.alive else ""
        lines.append(f'<div class="robot mode {kind}">{escape(text)}</div>')
    lines.append(sentence(monitor.condition))
    if (fault := monitor.fault) and not monitor.finished:
        # A process that exits reports its reason in the same field.
        head = "Fault" if monitor.alive else "Last message"
        lines.append(sentence(f"{head}: {fault}", bad=True))
    return "".join(lines)


def mode(monitor: RobotMonitor) -> str:
    """The arm's mode; of a deployment that has ended, how its last episode ended."""
    if monitor.alive:
        return monitor.mode
    if not monitor.finished:
        return f"not running (last: {monitor.mode})"
    success = monitor.status.get("recorder", {}).get("success")
    known = {True: "success", False: "no success"}.get(success)
    ended = {"TIME": "time limit", "FAULT": "a fault"}.get(monitor.status.get("ended", ""))
    how = ", ".join(filter(None, (known, ended)))
    return f"finished: {how}" if how else "finished"


def tiles(monitor: RobotMonitor, rate: float) -> str:
    """Rate (Hz), lateness, missed ticks, age of what the policy saw, what safety did."""
    state, about = monitor.state, monitor.deployment
    if state is None or about is None:
        return ""
    ticks, missed = int(state["tick"]), int(state["missed"])
    late, worst = 1e3 * float(state["late"]), 1e3 * float(state["worst"])
    acted, shaped = interventions(monitor), rate_limited(monitor)
    facts = [
        ("control rate", f"{rate:.0f} of {about.hertz:.0f} Hz", rate < SLOW * about.hertz),
        (f"late, worst {worst:.1f} ms", f"{late:.1f} ms", False),
        (f"missed of {ticks} ticks", f"{missed}", missed > 0),
        ("newest observation", *observed(monitor)),
        ("interventions (ticks)", f"{sum(acted.values())}" if acted else "none", False),
        ("ticks shaped by rate limits", f"{shaped:.0%}", False),
    ]
    parts = [
        f"<div{' class=bad' if bad and monitor.alive else ''}><b>{value}</b>{name}</div>"
        for name, value, bad in facts
    ]
    return f'<div class="robot tiles">{"".join(parts)}</div>'


def observed(monitor: RobotMonitor) -> tuple[str, bool]:
    """The age of the observation that the newest chunk was computed from; whether it is too old."""
    if monitor.state is None or monitor.chunk is None:
        return "no chunk yet", False
    if not monitor.alive:
        return f"chunk {int(monitor.chunk['number'])}", False
    starved = bool(monitor.state["starved"]) and monitor.mode == "RUNNING"
    age = monitor.clock() - float(monitor.chunk["seen"])
    return f"{age:.2f} s old{', starved' if starved else ''}", starved


def interventions(monitor: RobotMonitor) -> dict[str, int]:
    """The ticks in which each safety stage intervened, of those that did; what is usual apart."""
    if monitor.state is None:
        return {}
    pairs = zip(monitor.stages, monitor.state["counts"], strict=True)
    return {name: int(count) for name, count in pairs if count and name not in USUAL}


def rate_limited(monitor: RobotMonitor) -> float:
    """The share of ticks in which the limits of rate shaped the target."""
    if monitor.state is None or SHAPING not in monitor.stages:
        return 0.0
    count = int(monitor.state["counts"][monitor.stages.index(SHAPING)])
    return count / max(int(monitor.state["tick"]), 1)


def tables(monitor: RobotMonitor) -> str:
    """Policy, safety stages, recorder, joints, and what else is measured."""
    state, about = monitor.state, monitor.deployment
    if state is None or about is None:
        return ""
    acted = ", ".join(f"{name} {count}" for name, count in interventions(monitor).items())
    sensed = zip(about.sensed, state["sensed"], strict=True)
    rows = [
        ("policy", str(monitor.status.get("acting", about.policy))),
        ("interventions", acted or "none"),
        ("joints (rad)", " ".join(f"{value:.3f}" for value in state["q"])),
        ("hand", f"{1e3 * float(state['width']):.0f} mm open"),
        *((name, f"{value:.3f}") for name, value in sensed),
    ]
    if "recorder" in monitor.status:
        rows.insert(2, ("recorder", recorder(monitor.status["recorder"])))
    return table(rows)


def recorder(about: dict[str, Any]) -> str:
    trouble = "; ".join(filter(None, (about["died"], about["problem"])))
    text = f"{about['episodes']} of {about['ended']} episodes on disk"
    return f"{text}; NOT the newest: {trouble}" if trouble else text


def notes(monitor: RobotMonitor) -> str:
    """The daemon's newest notes, with their age (s)."""
    rows: list[tuple[str, str]] = []
    for note in monitor.status.get("notes", [])[-NOTES:]:
        when, _, text = note.partition(" ")
        rows.append((f"{monitor.clock() - float(when):.0f} s ago", text))
    return table(reversed(rows))


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, escaped."""
    lines = [f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows]
    return f'<table class="robot">{"".join(lines)}</table>' if lines else ""


def sentence(text: str, bad: bool = False) -> str:
    """A line of its own, escaped; nothing of no text."""
    return f'<div class="robot{" bad" if bad else ""}">{escape(text)}</div>' if text else ""


def plain(text: str) -> str:
    """HTML without its tags."""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))
