"""A daemon's status in words, for the terminal of an operator."""

from __future__ import annotations

from typing import Any


def status_lines(status: dict[str, Any]) -> list[str]:
    control, policy = status["control"], status["policy"]
    lines = [f"{status['robot']} is {status['mode']}{' (dry)' if status['dry'] else ''}"]
    if status["fault"]:
        then = "" if control["silent"] else "; look, then: embodied robot reset"
        lines.append(f"  fault     {status['fault']}{then}")
    late = f"late {1e3 * control['late']:.1f} ms (worst {1e3 * control['worst']:.1f})"
    lines.append(
        f"  control   {_process(control)}, {control['rate']:.1f} Hz, {late}, "
        f"{control['missed']} ticks missed"
    )
    lines.append(f"  policy    {_process(policy)}, spoke {policy['age']:.2f} s ago")
    lines.append(f"            {status['acting']}")
    if status["intervened"]:
        lines.append("            a person has taken over")
    acted = [f"{name} {each['count']}" for name, each in status["stages"].items() if each["count"]]
    lines.append(f"  safety    {', '.join(acted) if acted else 'has changed nothing'}")
    if "recorder" in status:
        about = status["recorder"]
        problem = f"; NOT the newest: {about['problem']}" if about["problem"] else ""
        saved = f"{about['episodes']} of {about['ended']} episodes on disk{problem}"
        lines.append(f"  recorder  {_process(about)}, {saved}")
    for name, camera in status.get("cameras", {}).items():
        lines.append(f"  camera    {name}: {_process(camera)}")
    joints = ["?" if value is None else f"{value:.3f}" for value in status["q"]]
    lines.append(f"  joints    {', '.join(joints)}")
    return [*lines, *(f"  note      {note}" for note in status["notes"][-5:])]


def _process(about: dict[str, Any]) -> str:
    return f"process {about['pid']}" if about["pid"] else about["died"] or "not there"
