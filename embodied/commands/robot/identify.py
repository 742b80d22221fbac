"""What makes the simulation move like the arm of a recording, as a world of your own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from embodied.commands import add_overrides, take
from embodied.core.build import ConfigError, nearest

if TYPE_CHECKING:
    from embodied.envs.sysid.fit import Identified

LEAST = 0.02  # of the range of a factor: nothing is known better than that
STAYS = 0.5  # of the error, where the fit explains little
SHOWN = {"stiffness": ".0f", "damping": ".1f", "friction": ".2f", "armature": ".3f"}


def add(kinds: Any) -> None:
    own = kinds.add_parser("identify", help="fit gains, friction and delay to a recording")
    add_overrides(own, "RECORDING robot=NAME [out=FILE]: a dataset's folder, or a black box (.npz)")


def run(args: argparse.Namespace) -> None:
    from embodied.compose import options, search_folders
    from embodied.envs.sysid.fit import Config, identify, read_traces

    robot, words = take(args.words, "robot")
    out, words = take(words, "out")
    if robot is None or len(words) != 1:
        raise ConfigError(
            "say which recording of which arm: embodied robot identify PATH robot=NAME"
        )
    known = options("robot", search_folders(args.config_dir))
    if robot not in known:
        raise ConfigError(f'there is no robot "{robot}"{nearest(robot, known)}')
    kind = yaml.safe_load(known[robot].read_text()).get("robot")
    if kind != "fr3":
        raise ConfigError(f"robot={robot} is of the kind {kind}; only the FR3 is simulated")
    file = Path(out if out is not None else f"outputs/identify/env/{robot}_like.yaml")
    if file.suffix != ".yaml":
        raise ConfigError(f"out={file} should end in .yaml")
    traces = read_traces(Path(words[0]))
    seconds = sum(float(each.t[-1] - each.t[0]) for each in traces)
    print(f"{words[0]}: {seconds:.1f} s of motion; fitting takes seconds to a minute", flush=True)
    found = identify(Config(), traces)
    print("\n".join(table(found)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_yaml(found, words[0]))
    print(f"\n{file}: a world with this arm; {_picture(found, file.with_suffix('.png'))}")
    if file.parent.name == "env":
        print(f"next: embodied train --config-dir {file.parent.parent} env={file.stem} ...")


def table(found: Identified) -> list[str]:
    """Lines for people: a joint a line, `?` after what the recording does not determine."""
    from embodied.envs.fr3.base import QUANTITIES

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
    """A world (`configs/env/*.yaml`) with the fitted arm, and ranges around it."""
    before, after = (1e3 * float((each**2).mean() ** 0.5) for each in (found.before, found.after))
    delay, dt = float(found.value["delay"][0]), 0.05
    lines = [
        f"# An FR3 that moves like the one of {source}: joint errors over 0.3 s in windows",
        f"# that were not fitted, {before:.2f} mrad before and {after:.2f} after.",
        f"# delay: {delay:.4f} s from what is sent to what moves, {delay / dt:.1f} steps of {dt} s",
        "# (a step or more: wrap it in embodied.envs.wrappers.delays.ActionDelay, as in "
        "fr3_lift_delayed).",
    ]
    if unknown := _unknown(found):
        lines.append(f"# Not determined by the recording: {unknown}.")
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


RANGES = {"gain": "stiffness", "damping": "damping"}
"""What `env.randomize` calls them, factors of all joints together."""


def _range(found: Identified, name: str) -> list[float]:
    """A factor within two deviations of the least known joint, from 2% to a half."""
    share = 2 * found.deviation[name] / found.value[name]
    wide = min(0.5, max(LEAST, float(share.max())))
    return [round(1 - wide, 3), round(1 + wide, 3)]


def _unknown(found: Identified) -> str:
    parts = []
    for name, known in found.known.items():
        if not known.all():
            which = [str(i + 1) for i in range(len(known)) if not known[i]]
            parts.append(name if name == "delay" else f"{name} of joint {' '.join(which)}")
    return ", ".join(parts)


def _picture(found: Identified, file: Path) -> str:
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
