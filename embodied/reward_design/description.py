"""Description of an environment for a reward designer, generated from its Spec.

Two styles: "table" lists the variables of `embodied.rewards.handcrafted.program`; "pythonic"
writes them as a typed class tree (Text2Reward, Xie et al., 2023). Neither says how success is
measured, nor names the simulator.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Literal

from embodied.core.env import VecEnv
from embodied.core.spec import Spec
from embodied.core.wrapper import Wrapper
from embodied.rewards.handcrafted.program import ACTION, Variable, variables

Style = Literal["table", "pythonic"]
SOFTWARE = re.compile(
    r"mujoco|mjcf|gymnasium|\bgym\b|maniskill|sapien|envpool|\bwarp\b|isaac|bullet|minigrid|crafter"
    r"|package|`[\w.]*\.[\w.]*`|random state|\bseed|rows?\b|success",
    re.IGNORECASE,
)
BETWEEN = re.compile(r"(\w+)_from_(\w+)")
LONGEST = 24  # most element names to list


def describe(spec: Spec, sentence: str, style: Style = "table", about: str = "") -> str:
    """The task, the environment's description `about`, and the variables with shapes and units.

    Variables are batched tensors; the leading N is omitted from the shapes, as in the Spec.
    """
    found = variables(spec)
    lines = [f"Task: {sentence}", *([f"World: {about}"] if about else [])]
    lines.append(f"One step lasts {spec.dt:g} s. {ENDS}")
    body = _table(found.values()) if style == "table" else _tree(spec, found)
    return "\n".join([*lines, "", *body])


ENDS = (
    "An episode ends when the task is achieved, or when its time is over; after its end nothing is "
    "paid any more. Positions and lengths are in metres, angles in radians, unless a unit is given."
)


def about(env: VecEnv) -> str:
    """The sentences of an environment's docstring that describe the task rather than software."""
    inner = env
    while isinstance(inner, Wrapper):
        inner = inner.env
    doc = " ".join((inspect.getdoc(type(inner)) or "").split())
    sentences = re.split(r"(?<=[.!?])\s+", doc)
    return " ".join(s for s in sentences if s and not SOFTWARE.search(s))


def _table(found: Iterable[Variable]) -> list[str]:
    head = ["Variables (tensors [N, ...]; `next_NAME` is NAME at the end of the step):"]
    return head + [f"- {v.name}: {v.dtype}{list(v.shape)}{_meaning(v)}" for v in found]


def _tree(spec: Spec, found: dict[str, Variable]) -> list[str]:
    """One class per observation, with typed attributes."""
    lines: list[str] = []
    for leaf in spec.obs:
        own = [v for v in found.values() if v.leaf == leaf]
        lines += [f"class {_title(leaf)}:"]
        lines += [f"    {v.name}: Tensor[{_shape(v)}]  #{_meaning(v) or ' whole'}" for v in own]
        lines.append("")
    act = found[ACTION]
    lines += ["class Step:"]
    lines += [f"    before: {', '.join(map(_title, spec.obs))}"]
    lines += ["    after: the same; in code next_NAME is NAME after the step"]
    lines += [f"    action: Tensor[{_shape(act)}]  #{_meaning(act) or ' whole'}"]
    return lines


def _meaning(variable: Variable) -> str:
    """Elements, unit and bounds of a variable, and what its name says about a difference."""
    words: list[str] = []
    if between := BETWEEN.fullmatch(variable.name):
        words.append(f"vector from {between[2]} to {between[1]}")
    elif variable.is_point:
        words.append("x, y, z in the base frame")
    names = variable.names
    if names and not variable.is_point and len(names) <= LONGEST and variable.shape:
        words.append(f"elements {', '.join(names)}")
    if variable.unit:
        words.append(f"unit {variable.unit}")
    if isinstance(variable.low, int | float) and isinstance(variable.high, int | float):
        words.append(f"in [{variable.low:g}, {variable.high:g}]")
    return f" {'; '.join(words)}" if words else ""


def _shape(variable: Variable) -> str:
    return ", ".join(["N", *map(str, variable.shape)])


def _title(name: str) -> str:
    return "".join(word.capitalize() for word in re.split(r"\W+|_", name)) or "World"
