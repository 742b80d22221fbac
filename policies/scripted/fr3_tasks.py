"""Scripted demonstrator of the ten language tasks of the FR3 (`env=fr3_tasks`).

It reads the task and the objects from the privileged state. Where a grasp fails or an object is
lost, it starts over; in a share of the episodes the first attempt misses on purpose, so that
demonstrations show how to recover.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Fraction, Positive
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.scripted import fr3
from embodied.policies.scripted.fr3 import CLOSED, OPEN, Plan, Scripted, Seen

ASKED = "privileged/task"
"""The leaf that says which task it is."""
HELD = 0.035
"""A block that is further (m) from the tool point is not in the hand."""
SAFE = 0.17
"""Height (m) at which blocks are carried over everything else."""
AJAR = 0.45
"""Gripper command that lets go of a block without touching what is beside it."""
MISTAKE = 5
MISSED = 0.034
"""The trait that decides about a mistake, and how far (m) the hand then is from the block."""


@dataclass(frozen=True)
class Config:
    """Settings of the demonstrator of the language tasks."""

    quality: Fraction = 0.8  # 1: an expert; 0: poor (tremor, pauses, aiming error)
    mistakes: Fraction = 0.1  # share of episodes whose first grasp misses
    step: Positive = 0.025  # tool motion of an action of 1, m


class ScriptedTasks(Scripted):
    """The demonstrator of whichever task the env has; noise is [n, 16] standard normal numbers."""

    def __init__(self, config: Config, spec: Spec) -> None:
        self.mistakes = config.mistakes
        if ASKED not in spec.obs:
            raise ConfigError("this demonstrator is for env=fr3_tasks only; choose demonstrator=")
        super().__init__(fr3.Config("tabletop", config.quality, 0, config.step), spec)
        self.asked = spec.obs[ASKED].names

    def plans(self) -> Mapping[str, Callable[[Seen], Plan]]:
        return {"tabletop": tabletop}

    def state(self, obs: Tensors) -> dict[str, Tensor]:
        return {**super().state(obs), **dict(zip(self.asked, obs[ASKED].unbind(1), strict=True))}

    def _begin_episode(self, carry: Tensors, noise: Tensor) -> Tensors:
        fresh = ~carry["begun"][:, None]
        carry = super()._begin_episode(carry, noise)
        wrong = fresh & (carry["traits"][:, MISTAKE, None] < self.mistakes)
        side = torch.where(carry["traits"][:, 6] < 0.5, -MISSED, MISSED)
        aside = torch.stack([side, torch.zeros_like(side), torch.zeros_like(side)], 1)
        return {**carry, "miss": torch.where(wrong, aside, carry["miss"])}


def tabletop(seen: Seen) -> Plan:
    """The plan of each env's own task."""
    plans = [plan(seen) for plan in TASKS.values()]
    task = torch.stack([seen.state[f"task_{name}"] for name in TASKS], 1).argmax(1)
    rows = torch.arange(len(task))
    longest = max(plan.close.shape[-1] for plan in plans)

    def own(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, 1)[rows, task]

    return Plan(
        place=own([_longer(plan.place, longest, dim=1) for plan in plans]),
        hand=own([_longer(plan.hand, longest, dim=1) for plan in plans]),
        close=torch.stack([_longer(plan.close, longest) for plan in plans])[task],
        least=torch.stack([_longer(plan.least, longest) for plan in plans])[task],
        most=torch.stack([_longer(plan.most, longest) for plan in plans])[task],
        lost=own([_longer(plan.lost, longest, dim=1) for plan in plans]),
    )


def carry(seen: Seen, block: str, target: Tensor) -> Plan:
    """Grasp `block`, carry it over everything, and let go with its middle at `target` [n, 3]."""
    thing = seen.point(block)
    tool = seen.point("tool")
    aim = thing + seen.miss * seen.miss.new_tensor([1.0, 1.0, 0.2])
    raised = torch.cat([tool[:, :2], torch.full_like(tool[:, :1], SAFE + 0.02)], 1)
    put = target + (tool - thing)  # it is not always in the middle of the hand
    over = torch.cat([put[:, :2], torch.full_like(tool[:, :1], SAFE)], 1)
    up = _up(seen.trait(3, 0.06, 0.09))
    away = torch.cat([target[:, :2], torch.full_like(tool[:, :1], SAFE)], 1)
    dropped = (tool - thing).norm(dim=1) > HELD
    never = torch.zeros_like(dropped)
    return Plan(
        place=torch.stack([aim + 2 * up, aim + up, aim, aim, raised, over, put, put, away], 1),
        hand=_each(tool, [OPEN, OPEN, OPEN, CLOSED, CLOSED, CLOSED, CLOSED, AJAR, OPEN]),
        close=tool.new_tensor([0.05, 0.02, 0.008, 1.0, 0.03, 0.012, 0.006, 1.0, 0.0]),
        least=torch.tensor([0, 0, 0, 5, 0, 0, 2, 5, 0]),
        most=torch.tensor([60, 30, 25, 5, 20, 60, 25, 5, 999]),
        lost=torch.stack([*[never] * 4, *[dropped] * 3, never, seen.clock > 12], 1),
    )


def into_bowl(seen: Seen, block: str) -> Plan:
    return carry(seen, block, _raised(seen.point("bowl"), 0.072))


def onto_plate(seen: Seen, block: str) -> Plan:
    return carry(seen, block, _raised(seen.point("plate"), 0.030))


def onto_block(seen: Seen, block: str, base: str) -> Plan:
    return carry(seen, block, _raised(seen.point(base), 0.043))


def onto_cabinet(seen: Seen, block: str) -> Plan:
    return carry(seen, block, _raised(seen.point("cabinet"), 0.094))


def into_drawer(seen: Seen, block: str) -> Plan:
    """Into the middle of the part of the drawer that is not under the cabinet."""
    middle = _raised(seen.point("cabinet"), 0.085)
    return carry(seen, block, middle - _along_y(0.08 + seen.state["drawer"] / 2))


def slide_drawer(seen: Seen, way: float) -> Plan:
    """Grasp the knob and move it along y (`way` -1: open, 1: close)."""
    tool = seen.point("tool")
    closed = seen.point("cabinet") - _along_y(0.112)
    knob = _raised(closed - _along_y(seen.state["drawer"]), 0.063)
    aim = knob + 0.5 * seen.miss * seen.miss.new_tensor([1.0, 1.0, 0.0])
    slipped = (tool - knob)[:, :2].norm(dim=1) > HELD
    never = torch.zeros_like(slipped)
    pull = knob + _along_y(torch.full_like(tool[:, 0], 0.03 * way))
    return Plan(
        place=torch.stack([_raised(aim, 0.09), aim, aim, pull], 1),
        hand=_each(tool, [OPEN, OPEN, CLOSED, CLOSED]),
        close=tool.new_tensor([0.03, 0.008, 1.0, 0.0]),
        least=torch.tensor([0, 0, 5, 0]),
        most=torch.tensor([60, 25, 5, 999]),
        lost=torch.stack([never, never, never, slipped], 1),
    )


def press(seen: Seen) -> Plan:
    """Over the button with a closed hand, then down."""
    button = seen.point("button")
    tool = seen.point("tool")
    aim = button + seen.miss * seen.miss.new_tensor([1.0, 1.0, 0.0])
    over = _raised(aim, 0.09) + _up(seen.trait(2, 0.0, 0.04))
    return Plan(
        place=torch.stack([over, _raised(aim, 0.015)], 1),
        hand=_each(tool, [CLOSED, CLOSED]),
        close=tool.new_tensor([0.02, 0.0]),
        least=torch.tensor([0, 0]),
        most=torch.tensor([60, 999]),
        lost=torch.stack([torch.zeros(len(tool), dtype=torch.bool), seen.clock > 20], 1),
    )


def push_left(seen: Seen) -> Plan:
    """Down on the right of the plate with a closed hand, then through it to the left."""
    plate = seen.point("plate")
    tool = seen.point("tool")
    behind = plate - _along_y(seen.trait(2, 0.080, 0.095)) + seen.miss
    low = _raised(behind, 0.015 - plate[:, 2])
    # A pushed disc turns away from a push beside its middle: stay more than behind it.
    off = (plate - tool)[:, 0]
    ahead = tool + torch.stack([2.0 * off, torch.full_like(off, 0.02), 0.0 * off], 1)
    through = torch.cat([ahead[:, :2], torch.full_like(tool[:, :1], 0.014)], 1)
    astray = (off.abs() > 0.025) | ((plate - tool)[:, 1] < 0.02)
    never = torch.zeros_like(astray)
    return Plan(
        place=torch.stack([_raised(behind, 0.12), _raised(behind, 0.05), low, through], 1),
        hand=_each(tool, [CLOSED, CLOSED, CLOSED, CLOSED]),
        close=tool.new_tensor([0.03, 0.02, 0.012, 0.0]),
        least=torch.tensor([0, 0, 0, 0]),
        most=torch.tensor([60, 30, 25, 999]),
        lost=torch.stack([never, never, never, astray], 1),
    )


def _longer(values: Tensor, phases: int, dim: int = 0) -> Tensor:
    """The last phase repeated, so that there are `phases`."""
    last = values.narrow(dim, values.shape[dim] - 1, 1)
    return torch.cat([values, *[last] * (phases - values.shape[dim])], dim)


def _raised(point: Tensor, height: Tensor | float) -> Tensor:
    """Points [n, 3], higher by `height` (m)."""
    return point + _up(torch.zeros_like(point[:, 0]) + height)


def _up(height: Tensor) -> Tensor:
    return torch.nn.functional.pad(height[:, None], (2, 0))


def _along_y(distance: Tensor | float) -> Tensor:
    """An offset along y (m): [1, 3] of a number, [n, 3] of numbers [n]."""
    values = torch.as_tensor(distance, dtype=torch.float32).reshape(-1, 1)
    return torch.nn.functional.pad(values, (1, 1))


def _each(like: Tensor, values: list[float]) -> Tensor:
    return like.new_tensor(values).expand(len(like), -1)


TASKS: dict[str, Callable[[Seen], Plan]] = {
    "red_into_bowl": lambda seen: into_bowl(seen, "red"),
    "blue_into_bowl": lambda seen: into_bowl(seen, "blue"),
    "green_onto_plate": lambda seen: onto_plate(seen, "green"),
    "blue_onto_green": lambda seen: onto_block(seen, "blue", "green"),
    "red_into_drawer": lambda seen: into_drawer(seen, "red"),
    "green_onto_cabinet": lambda seen: onto_cabinet(seen, "green"),
    "open_drawer": lambda seen: slide_drawer(seen, -1.0),
    "close_drawer": lambda seen: slide_drawer(seen, 1.0),
    "press_button": press,
    "push_plate_left": push_left,
}
