"""What a fit to recorded motion found: lines for people, an environment with it, a picture."""

from __future__ import annotations

from pathlib import Path

import yaml

from embodied.envs.fr3.base import QUANTITIES
from embodied.envs.sysid.fit import Identified

LEAST = 0.02  # of the range of a factor: nothing is known better than that
STAYS = 0.5  # of the error, where the fit explains little
SHOWN = {"stiffness": ".0f", "damping": ".1f", "friction": ".2f", "armature": ".3f"}
RANGES = {"gain": "stiffness", "damping": "damping"}
"""What `env.randomize` calls them, factors of all joints together."""


def table(found: Identified) -> list[str]:
    """Lines for people: a joint a line, `?` after what the recording does not determine."""
    heads = [f"{name} ({unit})" for name, unit in QUANTITIES.items()]
    wide = [max(len(head), 18) for head in heads]
    cells = "  ".join(head.rjust(width) for head, width in zip(heads, wide, strict=True))
    lines = [f"joint  {cells}   error, held out (mrad)"]
    for joint in range(len(found.before)):
        values = [_cell(found, name, joint, width) for name, width in zip(SHOWN, wide, strict=True)]
        error = f"{1e3 * found.before[joint]:8.2f} -> {1e3 * found.after[joint]:.2f}"
        lines.append(f"{joint + 1:5d}  {'  '.join(values)}   {error}")
    delay, spread = 1e3 * found.value["delay"][0], 1e3 * found.deviation["delay"][0]
    lines.append(f"delay  {delay:.1f} +-{spread:.1f} ms{'' if found.known['delay'][0] else ' ?'}")
    if not all(each.all() for each in found.known.values()):
        lines.append("?: the recording does not determine it; move those joints more, or faster")
    if (found.after**2).sum() > STAYS**2 * (found.before**2).sum():
        lines.append("most of the error stays: a contact, a load, or another kind of controller?")
    return lines


def _cell(found: Identified, name: str, joint: int, width: int) -> str:
    value, spread = found.value[name][joint], found.deviation[name][joint]
    mark = " " if found.known[name][joint] else "?"
    return f"{value:{SHOWN[name]}} +-{spread:{SHOWN[name]}} {mark}".rjust(width)


def as_yaml(found: Identified, source: str) -> str:
    """An environment (`configs/env/*.yaml`) with the fitted arm, and ranges around it."""
    before, after = (1e3 * float((each**2).mean() ** 0.5) for each in (found.before, found.after))
    delay, dt = float(found.value["delay"][0]), 0.05
    lines = [
        f"# An FR3 that moves like the one of {source}: joint errors over 0.3 s in windows",
        f"# that were not fitted, {before:.2f} mrad before and {after:.2f} after.",
        f"# delay: {delay:.4f} s from what is sent to what moves, {delay / dt:.1f} steps of {dt} s",
        "# (a step or more: wrap it in embodied.envs.wrappers.delays.ActionDelay, as in "
        "fr3_lift_delayed).",
    ]
    unknown = []
    for name, known in found.known.items():
        if not known.all():
            which = [str(i + 1) for i in range(len(known)) if not known[i]]
            unknown.append(name if name == "delay" else f"{name} of joint {' '.join(which)}")
    if unknown:
        lines.append(f"# Not determined by the recording: {', '.join(unknown)}.")
    arm = {name: [round(float(v), 5) for v in found.arm[name]] for name in found.arm}
    ranges = {name: _range(found, key) for name, key in RANGES.items()}
    world = {
        "_target_": "embodied.envs.fr3.env.Fr3",
        "task": "lift",
        "num_envs": 16,
        "reward": "sparse",
    }
    node = {**world, "threads": 2, "arm": arm, "randomize": ranges}
    return "\n".join(lines) + "\n" + yaml.safe_dump(node, sort_keys=False, default_flow_style=None)


def _range(found: Identified, name: str) -> list[float]:
    """A factor within two deviations of the least known joint, from 2% to a half."""
    share = 2 * found.deviation[name] / found.value[name]
    wide = min(0.5, max(LEAST, float(share.max())))
    return [round(1 - wide, 3), round(1 + wide, 3)]


def picture(found: Identified, file: Path) -> str:
    """Errors of both simulations in the windows that were held out; says where it is."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no picture without matplotlib: pip install 'embodied-rl[media]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen, *played = found.example
    figure, panels = pyplot.subplots(7, 1, figsize=(10, 12), sharex=True, constrained_layout=True)
    for joint, panel in enumerate(panels):
        lines = ((seen, "measured", "#111"), (played[0], "before", "#c2410c"))
        for values, label, ink in (*lines, (played[1], "after", "#0b6bcb")):
            panel.plot(values[:, joint], label=label, color=ink, linewidth=1)
        panel.set_ylabel(f"q{joint + 1} (rad)")
    panels[0].legend(loc="upper right", ncols=3)
    panels[-1].set_xlabel("measurement, one window after the other")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return f"{file}: measured, before and after"
