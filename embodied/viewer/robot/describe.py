"""What a deployment says of itself, as Markdown. What people or machines wrote is in code blocks,
so that nothing in it is taken for the page's own."""

from __future__ import annotations

from typing import Any

from embodied.viewer.robot.monitor import Deployed

NOTES = 8


def headline(seen: Deployed) -> str:
    """The robot, its mode, its fault, and whether this is still so."""
    lines: list[str] = []
    about = seen.deployment
    if about is not None:
        dry = " · dry: the arm is held, an imaginary one moves" if about.dry else ""
        mode = seen.mode if seen.alive else f"not at work (last: {seen.mode})"
        lines.append(f"**{about.robot}** · **{mode}**{dry}")
    if seen.standing:
        lines.append(code(seen.standing))
    if fault := seen.fault:
        # A process that ends says why in the same place.
        lines += ["**Fault**" if seen.alive else "**It said last**", code(fault)]
    return "\n\n".join(lines)


def figures(seen: Deployed, rate: float) -> str:
    """Rate (Hz), late ticks, policy, safety, recorder and joints."""
    state, about = seen.state, seen.deployment
    if state is None or about is None:
        return ""
    late, worst = 1e3 * float(state["late"]), 1e3 * float(state["worst"])
    lines = [
        f"rate      {rate:.1f} of {about.hertz:.0f} Hz, tick {int(state['tick'])}",
        f"late      {late:.1f} ms (worst {worst:.1f}), {int(state['missed'])} ticks missed",
        f"policy    {policy(seen)}",
        f"          {seen.status.get('acting', about.policy)}",
        f"safety    {safety(seen)}",
    ]
    if "recorder" in seen.status:
        lines.append(f"recorder  {recorder(seen.status['recorder'])}")
    lines.append(f"joints    {' '.join(f'{value:.3f}' for value in state['q'])}")
    lines.append(f"hand      {1e3 * float(state['width']):.0f} mm open")
    sensed = zip(about.sensed, state["sensed"], strict=True)
    lines += [f"sensed    {name} {float(value):.3f}" for name, value in sensed]
    return code("\n".join(lines))


def policy(seen: Deployed) -> str:
    """How old that is which it saw when it last decided."""
    if seen.state is None or seen.chunk is None:
        return "has not spoken yet"
    age = seen.clock() - float(seen.chunk["seen"])
    starved = ", starved" if bool(seen.state["starved"]) and seen.mode == "RUNNING" else ""
    return f"last word {age:.2f} s old, number {int(seen.chunk['number'])}{starved}"


def safety(seen: Deployed) -> str:
    """The stages that have changed something, with the number of ticks."""
    if seen.state is None:
        return ""
    pairs = zip(seen.stages, seen.state["counts"], strict=True)
    acted = [f"{name} {int(count)}" for name, count in pairs if count]
    return ", ".join(acted) if acted else "has changed nothing"


def recorder(about: dict[str, Any]) -> str:
    """How many episodes are on the disk, and what is wrong."""
    trouble = "; ".join(filter(None, (about["died"], about["problem"])))
    text = f"{about['episodes']} of {about['ended']} episodes on disk"
    return f"{text}; NOT the newest: {trouble}" if trouble else text


def notes(seen: Deployed) -> str:
    """The newest that the daemon noted, with how long ago (s) that was."""
    lines: list[str] = []
    for note in seen.status.get("notes", [])[-NOTES:]:
        when, _, text = note.partition(" ")
        lines.append(f"{seen.clock() - float(when):6.0f} s ago  {text}")
    return code("\n".join(reversed(lines))) if lines else ""


def code(text: str) -> str:
    """A block that is shown as it is."""
    return f"```text\n{text.replace('```', chr(39) * 3)}\n```"
