"""The log of an experiment that a person reads, `log.md`, and its `library.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied.core.atomic_write import write_json


def write(folder: Path, about: str, events: Sequence[Mapping[str, Any]]) -> None:
    """Write both from the journal's events."""
    lines = ["# Experiment", "", about, ""]
    for event in events:
        lines += PARTS[event["event"]](event)
    (folder / "log.md").write_text("\n".join(lines) + "\n")
    learned = {
        event["skill"]["task"]: {**event["skill"], "run": event["run"]}
        for event in events
        if event["event"] == "result" and event["skill"]["status"] == "mastered"
    }
    write_json(folder / "library.json", learned)


def decided(event: Mapping[str, Any]) -> list[str]:
    """The decision of a round, as Markdown."""
    skill = event["skill"]
    named = event["found"]
    pairs = [f"{task} -> {name}" for task, name in zip(event["subtasks"], named, strict=False)]
    more = "" if len(named) in (0, len(event["subtasks"])) else " (fewer or more than sub-tasks)"
    return [
        f"## Round {event['round'] + 1}: {skill['task']}",
        "",
        f"- chosen by {event['model']}: {event['why']}",
        f"- sub-tasks: {'; '.join(event['subtasks'])}",
        f"- in the library: {'; '.join(pairs) or 'nothing'}{more}",
        f"- training begins from: {skill['start']}, up to {skill['steps']:,} steps",
    ]


def found(event: Mapping[str, Any]) -> list[str]:
    """The result of a round, as Markdown."""
    skill = event["skill"]
    test = event["plateau"]
    opinion = event["opinion"]
    rates = " ".join(f"{rate:.2f}" for _, rate in skill["curve"])
    flat = "flat" if test["flat"] else "still changing"
    if test["flat"] and skill["curve"]:
        flat += f" since step {skill['curve'][test['since']][0]:,}"
    lines = [f"- success rates: {rates or 'none'}"]
    if event["problem"]:
        lines.append(f"- the training failed: {event['problem']}")
    lines.append(f"- plateau test: {flat} (change {test['change']:.2f} +- {test['noise']:.2f})")
    if opinion is not None:
        said = "converged" if opinion["converged"] else "not converged"
        other = "" if opinion["converged"] == test["flat"] else "; the test decides"
        lines.append(f"- the model: {said}, {opinion['why']}{other}")
    parts = ", made of " + "; ".join(skill["parts"]) if len(skill["parts"]) > 1 else ""
    return [*lines, f"- **{skill['status']}**{parts} (`{event['run']}`)", ""]


def silent(event: Mapping[str, Any]) -> list[str]:
    """A round without a usable answer."""
    return [f"## Round {event['round'] + 1}: no usable answer", "", f"- {event['why']}", ""]


PARTS = {"decision": decided, "result": found, "silence": silent}
