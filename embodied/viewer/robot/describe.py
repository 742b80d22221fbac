"""The text of the monitoring page, as Markdown. Text from the deployment is in code blocks, so that
it cannot be interpreted as Markdown."""

from __future__ import annotations

import textwrap
from typing import Any

from embodied.viewer.robot.monitor import RobotMonitor

NOTES = 8
INDENT, WIDTH = 10, 35
"""Characters of a name, and of a line in the panel of a telephone."""


def headline(monitor: RobotMonitor) -> str:
    """The robot, its mode, its fault, and whether this is current."""
    lines: list[str] = []
    about = monitor.deployment
    if about is not None:
        dry = " · dry run: a simulated arm moves" if about.dry else ""
        lines.append(f"**{about.robot}** · **{mode(monitor)}**{dry}")
    if monitor.condition:
        lines.append(code(monitor.condition))
    if (fault := monitor.fault) and not monitor.finished:
        # A process that exits reports its reason in the same field.
        lines += ["**Fault**" if monitor.alive else "**Last message**", code(fault)]
    return "\n\n".join(lines)


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


def figures(monitor: RobotMonitor, rate: float) -> str:
    """Rate (Hz), late ticks, policy, safety, recorder and joints."""
    state, about = monitor.state, monitor.deployment
    if state is None or about is None:
        return ""
    late, worst = 1e3 * float(state["late"]), 1e3 * float(state["worst"])
    lines = [
        row("rate", f"{rate:.1f} of {about.hertz:.0f} Hz"),
        row("late", f"{late:.1f} ms (worst {worst:.1f})"),
        row("ticks", f"{int(state['tick'])}, {int(state['missed'])} missed"),
        row("policy", policy(monitor)),
        row("", str(monitor.status.get("acting", about.policy))),
        row("safety", safety(monitor)),
    ]
    if "recorder" in monitor.status:
        lines.append(row("recorder", recorder(monitor.status["recorder"])))
    lines.append(row("joints", " ".join(f"{value:.3f}" for value in state["q"])))
    lines.append(row("hand", f"{1e3 * float(state['width']):.0f} mm open"))
    sensed = zip(about.sensed, state["sensed"], strict=True)
    lines += [row("sensed", f"{name} {float(value):.3f}") for name, value in sensed]
    return code("\n".join(lines))


def row(name: str, text: str) -> str:
    """`name  text`, in as many lines as are needed."""
    parts = textwrap.wrap(text, WIDTH - INDENT, break_on_hyphens=False) or [""]
    return "\n".join(f"{name if at == 0 else '':<{INDENT}}{part}" for at, part in enumerate(parts))


def policy(monitor: RobotMonitor) -> str:
    """The age of the observation that the newest chunk was computed from."""
    if monitor.state is None or monitor.chunk is None:
        return "no action chunk yet"
    if not monitor.alive:
        return f"chunk {int(monitor.chunk['number'])} (the last)"
    age = monitor.clock() - float(monitor.chunk["seen"])
    starved = ", starved" if bool(monitor.state["starved"]) and monitor.mode == "RUNNING" else ""
    return f"newest observation {age:.2f} s old, chunk {int(monitor.chunk['number'])}{starved}"


def safety(monitor: RobotMonitor) -> str:
    """The safety stages that intervened, with the number of ticks."""
    if monitor.state is None:
        return ""
    pairs = zip(monitor.stages, monitor.state["counts"], strict=True)
    acted = [f"{name} {int(count)}" for name, count in pairs if count]
    return ", ".join(acted) if acted else "no interventions"


def recorder(about: dict[str, Any]) -> str:
    """How many episodes are on disk, and errors."""
    trouble = "; ".join(filter(None, (about["died"], about["problem"])))
    text = f"{about['episodes']} of {about['ended']} episodes on disk"
    return f"{text}; NOT the newest: {trouble}" if trouble else text


def notes(monitor: RobotMonitor) -> str:
    """The daemon's newest notes, with their age (s)."""
    lines: list[str] = []
    for note in monitor.status.get("notes", [])[-NOTES:]:
        when, _, text = note.partition(" ")
        lines.append(f"{monitor.clock() - float(when):4.0f} s ago  {text}")
    return code("\n".join(reversed(lines))) if lines else ""


def code(text: str) -> str:
    """A Markdown code block."""
    return f"```text\n{text.replace('```', chr(39) * 3)}\n```"
