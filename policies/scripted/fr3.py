"""Scripted: FR3 demonstrators, state machines over waypoints with human-like variation.

A plan maps the observation to P phases (tool point, gripper opening, tolerance). Each env is in one
of them, and the action is the step towards its tool point. Pauses, aiming errors and tremor are
derived from the noise argument.

DelayedLift: the FR3 lift script for a robot with actuation delay and a slow gripper.

A step covers the fraction `calm` of the remaining distance (an arm with a delay of d steps
oscillates if calm d > pi / 2), and is limited to that fraction of full speed. When to raise depends
on measurements only, so that a BC policy can learn it from its observations:

    holds  <=>  width < 2 half (|cos yaw| + |sin yaw|) + slack,     the width of a rotated cube

ScriptedTasks: scripted demonstrator of the ten language tasks of the FR3 (`env=fr3_tasks`).

It reads the task and the objects from the privileged state. Where a grasp fails or an object is
lost, it starts over; in a share of the episodes the first attempt misses on purpose, so that
demonstrations show how to recover.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from embodied.core.bounds import CountOrZero, Fraction, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError, nearest
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

TRAITS = 8
WORDS = TRAITS + 8
OPEN = 1.0
CLOSED = -1.0


@dataclass(frozen=True)
class Config:
    """Settings of the scripted demonstrator."""

    task: str = "lift"  # which task of the environment
    quality: Fraction = 0.8  # 1: an expert; 0: poor (tremor, pauses, aiming error)
    sides: CountOrZero = 2  # approach directions (0: straight from above)
    hesitation: Fraction = 0.0  # chance per step of going back for 2 to 5 steps, also in pauses
    step: Positive = 0.025  # tool motion of an action of 1, m


class Phase(NamedTuple):
    """One phase of a plan."""

    place: Tensor  # tool points [n, 3], m
    hand: float  # opening of the gripper in [-1, 1]
    close: float  # tolerance, m
    least: int  # smallest number of steps
    most: int  # largest number of steps
    lost: Tensor | None = None  # [n] (bool): who has to start over (None: no env)


class Plan(NamedTuple):
    """The phases of n envs: `place` [n, P, 3], `hand` and `lost` [n, P], the others [P] or [n, P].
    The last phase is held."""

    place: Tensor
    hand: Tensor
    close: Tensor
    least: Tensor
    most: Tensor
    lost: Tensor


def planned(phases: Sequence[Phase]) -> Plan:
    """The plan of these phases, which are the same for all envs."""
    places, hand, close, least, most, lost = zip(*phases, strict=True)
    place = torch.stack(places, 1)
    none = torch.zeros(len(place), dtype=torch.bool)
    return Plan(
        place,
        place.new_tensor(hand).expand(len(place), -1),
        place.new_tensor(close),
        torch.tensor(least),
        torch.tensor(most),
        torch.stack([none if some is None else some for some in lost], 1),
    )


@dataclass(slots=True)
class Seen:
    """The state observation by name, and the random traits of each env's episode."""

    state: Mapping[str, Tensor]
    traits: Tensor
    miss: Tensor
    clock: Tensor
    sides: int

    def point(self, name: str) -> Tensor:
        """The three elements `name_x, name_y, name_z` as [n, 3]."""
        return torch.stack([self.state[f"{name}_{axis}"] for axis in "xyz"], 1)

    def trait(self, index: int, low: float, high: float) -> Tensor:
        """One of the row's traits [n], uniform between `low` and `high`."""
        return low + self.traits[:, index] * (high - low)


class Scripted(Policy):
    """Scripted demonstrator of an FR3 task; noise is [n, 16] standard normal numbers."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        plans = self.plans()
        if config.task not in plans:
            raise ConfigError(
                f"no scripted demonstrator for task {config.task!r}{nearest(config.task, plans)}"
            )
        self.config = config
        self.spec = spec
        self.chunk = 1
        self.phases = plans[config.task]
        # Demonstrators use the privileged state if policies do not observe the objects.
        self.leaf = next(name for name in ("privileged/state", "state") if name in spec.obs)
        self.names = spec.obs[self.leaf].names
        clumsy = 1 - config.quality
        self.noise = 0.03 + 0.5 * clumsy
        self.pause = 0.08 * clumsy + config.hesitation
        self.miss = 0.001 + 0.014 * clumsy

    def plans(self) -> Mapping[str, Callable[[Seen], Sequence[Phase]]]:
        """The phases by task name."""
        return PLANS

    def plan(self, seen: Seen) -> Plan:
        """The plan of what is seen now."""
        return planned(self.phases(seen))

    def state(self, obs: Tensors) -> dict[str, Tensor]:
        """The elements that plans read, [n] by name."""
        return dict(zip(self.names, obs[self.leaf].unbind(1), strict=True))

    def initial(self, n: int) -> Tensors:
        return {
            "begun": torch.zeros(n, dtype=torch.bool),
            "traits": torch.zeros(n, TRAITS),
            "miss": torch.zeros(n, 3),
            "phase": torch.zeros(n, dtype=torch.int64),
            "clock": torch.zeros(n, dtype=torch.int64),
            "pause": torch.zeros(n, dtype=torch.int64),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, WORDS)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        carry = self._begin_episode(carry, noise)
        traits = carry["traits"]
        seen = Seen(self.state(obs), traits, carry["miss"], carry["clock"], self.config.sides)
        plan = self.plan(seen)
        tool = seen.point("tool")
        carry = self._advanced(plan, tool, carry, noise)
        rows = torch.arange(len(noise))
        aim = plan.place[rows, carry["phase"]]
        # The reference, not the measured tool, is what an action moves.
        move = (aim - tool - seen.point("lead")) / self.config.step
        fastest = seen.trait(0, 0.6, 1.0)[:, None]
        move = move * (fastest / move.norm(dim=1, keepdim=True).clamp(min=1e-9)).clamp(max=1)
        still = (carry["pause"] > 0)[:, None]
        # A hand is the less steady the faster it moves.
        shake = self.noise * (0.15 * fastest + move.norm(dim=1, keepdim=True))
        paused = -move if self.config.hesitation else torch.zeros_like(move)
        move = torch.where(still, paused, move + shake * noise[:, -3:])
        hand = plan.hand[rows, carry["phase"]]
        size = self.spec.act.size
        turning = torch.zeros(len(noise), max(size - 4, 0))
        # An arm without a hand has three numbers.
        action = torch.cat([move, turning, hand[:, None]], 1)[:, :size].clamp(-1, 1)
        return action[:, None], carry

    def _begin_episode(self, carry: Tensors, noise: Tensor) -> Tensors:
        """Draw the traits of rows that begin an episode."""
        fresh = ~carry["begun"][:, None]
        uniform = torch.special.ndtr(noise[:, :TRAITS])
        missed = self.miss * noise[:, TRAITS : TRAITS + 3]
        return {
            **carry,
            "traits": torch.where(fresh, uniform, carry["traits"]),
            "miss": torch.where(fresh, missed, carry["miss"]),
            "begun": torch.ones_like(carry["begun"]),
        }

    def _advanced(self, plan: Plan, tool: Tensor, carry: Tensors, noise: Tensor) -> Tensors:
        """Advance to the next phase, start over, or pause."""
        phase = carry["phase"]
        clock = carry["clock"]
        rows = torch.arange(len(phase))
        close, least, most = (
            limit.expand(len(phase), -1)[rows, phase]
            for limit in (plan.close, plan.least, plan.most)
        )
        there = (plan.place[rows, phase] - tool).norm(dim=1) < close
        done = (there & (clock >= least)) | (clock >= most)
        done &= phase < plan.close.shape[-1] - 1
        lost = plan.lost[rows, phase]
        moved = torch.where(lost, 0, torch.where(done, phase + 1, phase))
        hesitates = torch.special.ndtr(noise[:, -4]) < self.pause
        length = (2 + 4 * torch.special.ndtr(noise[:, -5])).long()
        pause = torch.where(hesitates, length, (carry["pause"] - 1).clamp(min=0))
        # Retries have half the aiming error of the first attempt.
        again = 0.5 * self.miss * noise[:, TRAITS : TRAITS + 3]
        return {
            **carry,
            "phase": moved,
            "clock": torch.where(moved == phase, clock + 1, 0),
            "pause": pause,
            "miss": torch.where(lost[:, None], again, carry["miss"]),
        }


def lift(seen: Seen) -> list[Phase]:
    """From a side, above the cube, down, close, up; over again while it is not in hand."""
    cube = seen.point("cube")
    tool = seen.point("tool")
    side = _side(seen, 0.09) + _up(seen.trait(2, 0.10, 0.17))
    above = _up(seen.trait(3, 0.05, 0.08))
    depth = seen.miss * seen.miss.new_tensor([1.0, 1.0, 0.3])
    raised = tool.clone()
    raised[:, 2] = cube[:, 2].clamp(min=0.02) + 0.25
    dropped = (tool - cube).norm(dim=1) > 0.035
    return [
        Phase(cube + side, OPEN, 0.03, 0, 40),
        Phase(cube + above + depth, OPEN, 0.02, 0, 30),
        Phase(cube + depth, OPEN, 0.008, 0, 25),
        Phase(cube + depth, CLOSED, 1.0, 5, 5),
        Phase(raised, CLOSED, 0.0, 0, 999, dropped),
    ]


def detour(seen: Seen) -> list[Phase]:
    """Around the cans on one side, closed, then as in `lift` from above."""
    first, *rest = lift(seen)
    beside = first.place.new_tensor([0.50, 0.0, 0.09]) + _side(seen, 0.09)
    return [first._replace(place=beside, hand=CLOSED), *rest]


def slalom(seen: Seen) -> list[Phase]:
    """Closed and low past each wall at a random y, whatever stands there, then as in `lift`."""
    low = seen.trait(2, 0.025, 0.035)
    ways = [(0.46, seen.trait(4, -0.09, 0.09)), (0.56, seen.trait(5, -0.09, 0.09))]
    past = [torch.stack([torch.full_like(y, x), y, low], 1) for x, y in ways]
    return [*(Phase(place, CLOSED, 0.015, 0, 40) for place in past), *lift(seen)[1:]]


def reach(seen: Seen) -> list[Phase]:
    """The tool goes to the goal by way of a point beside it."""
    goal = seen.point("goal")
    aside = _side(seen, 0.08) + _up(seen.trait(2, 0.0, 0.05))
    return [
        Phase(goal + aside, CLOSED, 0.05, 0, 25),
        Phase(goal + seen.miss, CLOSED, 0.0, 0, 999),
    ]


def push(seen: Seen) -> list[Phase]:
    """Over and down behind the cube, then through it towards the goal; again when it slips by."""
    cube = seen.point("cube")
    goal = seen.point("goal")
    tool = seen.point("tool")
    far = (goal - cube)[:, :2].norm(dim=1, keepdim=True).clamp(min=1e-6)
    way = (goal - cube) / far
    way = torch.cat([way[:, :2], torch.zeros_like(far)], 1)
    behind = cube - seen.trait(2, 0.065, 0.085)[:, None] * way + seen.miss
    low = torch.cat([behind[:, :2], torch.full_like(far, 0.02)], 1)
    contact = cube - 0.03 * way
    # Stay on the line through cube and goal: steer back what the tool is off it.
    ahead = contact + (far + 0.02).clamp(max=0.05) * way
    off = (tool - contact) - ((tool - contact) * way).sum(1, keepdim=True) * way
    through = ahead - 1.5 * off
    through = torch.cat([through[:, :2], torch.full_like(far, 0.02)], 1)
    astray = (off[:, :2].norm(dim=1) > 0.025) | (((tool - cube) * way).sum(1) > -0.01)
    return [
        Phase(behind + _up(seen.trait(3, 0.07, 0.10)), CLOSED, 0.02, 0, 40),
        Phase(low, CLOSED, 0.012, 0, 25),
        Phase(through, CLOSED, 0.0, 0, 999, astray),
    ]


def insert(seen: Seen) -> list[Phase]:
    """Above where the hole seems to be, down to its rim, then press and correct by what is felt."""
    tool = seen.point("tool")
    tip = seen.point("tip_from_hole")
    held = seen.point("peg_from_tool")
    length = held.new_tensor([0.0, 0.0, 0.055])
    ready = seen.point("hole_seen") - held + length + seen.miss
    side = _side(seen, 0.02) + _up(seen.trait(2, 0.015, 0.03))
    flat = torch.cat([tip[:, :2], torch.zeros_like(tip[:, :1])], 1)
    # Press lightly on the rim, more once the tip is in, and let go a little now and then: a wedged
    # peg needs it.
    press = torch.where(tip[:, 2] < -0.006, 0.010, 0.003)
    press = torch.where((seen.clock % 6 == 5) & (tip[:, 2] > -0.012), -0.002, press)
    # Sideways the reference is moved, not the tool: the push grows until the tip gives way.
    gain = seen.trait(3, 0.3, 0.6)[:, None]
    down = tool + seen.point("lead") * held.new_tensor([1.0, 1.0, 0.0]) - gain * flat - _up(press)
    return [
        Phase(ready + side, CLOSED, 0.012, 0, 30),
        Phase(ready + _up(seen.trait(4, 0.003, 0.006)), CLOSED, 0.003, 0, 25),
        Phase(down, CLOSED, 0.0, 0, 999),
    ]


def _side(seen: Seen, distance: float) -> Tensor:
    """A horizontal offset [n, 3] towards one of the row's approach sides."""
    if not seen.sides:
        return torch.zeros_like(seen.miss)
    which = (seen.traits[:, 1] * seen.sides).floor()
    angle = torch.pi / 2 + which * 2 * torch.pi / seen.sides
    return distance * torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle)], 1)


def _up(height: Tensor) -> Tensor:
    """Offsets [n, 3] upwards by `height` [n]."""
    zero = torch.zeros_like(height)
    return torch.stack([zero, zero, height], 1)


PLANS: dict[str, Callable[[Seen], list[Phase]]] = {
    "detour": detour,
    "insert": insert,
    "lift": lift,
    "push": push,
    "reach": reach,
    "slalom": slalom,
}


@dataclass(frozen=True)
class DelayedConfig(Config):
    """Settings as in `embodied.policies.scripted.fr3`, and those of the delay."""

    task: str = "lift"  # which task of the environment
    calm: PositiveFraction = 0.5  # share of the remaining distance that a step covers
    slack: NonNegative = 0.006  # of the width that counts as closed on the cube, m


class DelayedLift(Scripted):
    """From above, down, close until it holds, up; over again when the cube is not in the hand."""

    def __init__(self, config: DelayedConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.calm = config.calm
        self.slack = config.slack

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions, carry = super().act(obs, carry, noise)
        calmed = torch.cat([self.calm * actions[..., :-1], actions[..., -1:]], -1)
        return calmed, carry

    def plan(self, seen: Seen) -> Plan:
        *grasp, closed, raised = lift(seen)
        state = seen.state
        yaw = torch.atan2(state["cube_sin_4yaw"], state["cube_cos_4yaw"]) / 4
        wide = 2 * state["cube_half"] * (yaw.cos() + yaw.sin().abs())
        holds = (state["width"] < wide + self.slack)[:, None]
        place = torch.where(holds, raised.place, closed.place)
        return planned([*grasp, closed, raised._replace(place=place)])


ASKED = "privileged/task"  # the leaf that says which task it is
HELD = 0.035  # m: a block that is further from the tool point is not in the hand
SAFE = 0.17  # m: height at which blocks are carried over everything else
AJAR = 0.45  # gripper command that lets go of a block without touching what is beside it
MISTAKE = 5  # the trait that decides about a mistake
MISSED = 0.034  # m: how far the hand then is from the block


@dataclass(frozen=True)
class TasksConfig:
    """Settings of the demonstrator of the language tasks."""

    quality: Fraction = 0.8  # 1: an expert; 0: poor (tremor, pauses, aiming error)
    mistakes: Fraction = 0.1  # share of episodes whose first grasp misses
    step: Positive = 0.025  # tool motion of an action of 1, m


class ScriptedTasks(Scripted):
    """The demonstrator of whichever task the env has; noise is [n, 16] standard normal numbers."""

    def __init__(self, config: TasksConfig, spec: Spec) -> None:
        self.mistakes = config.mistakes
        if ASKED not in spec.obs:
            raise ConfigError("this demonstrator is for env=fr3_tasks only; choose demonstrator=")
        super().__init__(Config("tabletop", config.quality, sides=0, step=config.step), spec)
        self.asked = spec.obs[ASKED].names

    def plans(self) -> Mapping[str, Callable[[Seen], Sequence[Phase]]]:
        return {"tabletop": press}  # `plan` chooses among all tasks

    def plan(self, seen: Seen) -> Plan:
        """The plan of each env's own task; the last phase of shorter ones is repeated."""
        phases = [task(seen) for task in TASKS.values()]
        longest = max(map(len, phases))
        plans = [planned([*each, *each[-1:] * (longest - len(each))]) for each in phases]
        task = torch.stack([seen.state[f"task_{name}"] for name in TASKS], 1).argmax(1)
        rows = torch.arange(len(task))
        place, hand, close, least, most, lost = zip(*plans, strict=True)
        return Plan(
            torch.stack(place, 1)[rows, task],
            torch.stack(hand, 1)[rows, task],
            torch.stack(close)[task],
            torch.stack(least)[task],
            torch.stack(most)[task],
            torch.stack(lost, 1)[rows, task],
        )

    def state(self, obs: Tensors) -> dict[str, Tensor]:
        return {**super().state(obs), **dict(zip(self.asked, obs[ASKED].unbind(1), strict=True))}

    def _begin_episode(self, carry: Tensors, noise: Tensor) -> Tensors:
        fresh = ~carry["begun"][:, None]
        carry = super()._begin_episode(carry, noise)
        wrong = fresh & (carry["traits"][:, MISTAKE, None] < self.mistakes)
        side = torch.where(carry["traits"][:, 6] < 0.5, -MISSED, MISSED)
        aside = torch.stack([side, torch.zeros_like(side), torch.zeros_like(side)], 1)
        return {**carry, "miss": torch.where(wrong, aside, carry["miss"])}


def carry(seen: Seen, block: str, target: Tensor) -> list[Phase]:
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
    return [
        Phase(aim + 2 * up, OPEN, 0.05, 0, 60),
        Phase(aim + up, OPEN, 0.02, 0, 30),
        Phase(aim, OPEN, 0.008, 0, 25),
        Phase(aim, CLOSED, 1.0, 5, 5),
        Phase(raised, CLOSED, 0.03, 0, 20, dropped),
        Phase(over, CLOSED, 0.012, 0, 60, dropped),
        Phase(put, CLOSED, 0.006, 2, 25, dropped),
        Phase(put, AJAR, 1.0, 5, 5),
        Phase(away, OPEN, 0.0, 0, 999, seen.clock > 12),
    ]


def onto(seen: Seen, block: str, base: str, height: float) -> list[Phase]:
    """Put `block` down with its middle `height` (m) above the point of `base`."""
    return carry(seen, block, _raised(seen.point(base), height))


def into_drawer(seen: Seen, block: str) -> list[Phase]:
    """Into the middle of the part of the drawer that is not under the cabinet."""
    middle = _raised(seen.point("cabinet"), 0.085)
    return carry(seen, block, middle - _along_y(0.08 + seen.state["drawer"] / 2))


def slide_drawer(seen: Seen, way: float) -> list[Phase]:
    """Grasp the knob and move it along y (`way` -1: open, 1: close)."""
    tool = seen.point("tool")
    closed = seen.point("cabinet") - _along_y(0.112)
    knob = _raised(closed - _along_y(seen.state["drawer"]), 0.063)
    aim = knob + 0.5 * seen.miss * seen.miss.new_tensor([1.0, 1.0, 0.0])
    slipped = (tool - knob)[:, :2].norm(dim=1) > HELD
    pull = knob + _along_y(torch.full_like(tool[:, 0], 0.03 * way))
    return [
        Phase(_raised(aim, 0.09), OPEN, 0.03, 0, 60),
        Phase(aim, OPEN, 0.008, 0, 25),
        Phase(aim, CLOSED, 1.0, 5, 5),
        Phase(pull, CLOSED, 0.0, 0, 999, slipped),
    ]


def press(seen: Seen) -> list[Phase]:
    """Over the button with a closed hand, then down."""
    aim = seen.point("button") + seen.miss * seen.miss.new_tensor([1.0, 1.0, 0.0])
    over = _raised(aim, 0.09) + _up(seen.trait(2, 0.0, 0.04))
    return [
        Phase(over, CLOSED, 0.02, 0, 60),
        Phase(_raised(aim, 0.015), CLOSED, 0.0, 0, 999, seen.clock > 20),
    ]


def push_left(seen: Seen) -> list[Phase]:
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
    return [
        Phase(_raised(behind, 0.12), CLOSED, 0.03, 0, 60),
        Phase(_raised(behind, 0.05), CLOSED, 0.02, 0, 30),
        Phase(low, CLOSED, 0.012, 0, 25),
        Phase(through, CLOSED, 0.0, 0, 999, astray),
    ]


def _raised(point: Tensor, height: Tensor | float) -> Tensor:
    """Points [n, 3], higher by `height` (m)."""
    return point + _up(torch.zeros_like(point[:, 0]) + height)


def _along_y(distance: Tensor | float) -> Tensor:
    """An offset along y (m): [1, 3] of a number, [n, 3] of numbers [n]."""
    values = torch.as_tensor(distance, dtype=torch.float32).reshape(-1, 1)
    return torch.nn.functional.pad(values, (1, 1))


TASKS: dict[str, Callable[[Seen], list[Phase]]] = {
    "red_into_bowl": lambda seen: onto(seen, "red", "bowl", 0.072),
    "blue_into_bowl": lambda seen: onto(seen, "blue", "bowl", 0.072),
    "green_onto_plate": lambda seen: onto(seen, "green", "plate", 0.030),
    "blue_onto_green": lambda seen: onto(seen, "blue", "green", 0.043),
    "red_into_drawer": lambda seen: into_drawer(seen, "red"),
    "green_onto_cabinet": lambda seen: onto(seen, "green", "cabinet", 0.094),
    "open_drawer": lambda seen: slide_drawer(seen, -1.0),
    "close_drawer": lambda seen: slide_drawer(seen, 1.0),
    "press_button": press,
    "push_plate_left": push_left,
}
