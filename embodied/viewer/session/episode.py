"""One episode, every step of it kept, so that any moment can be shown again and gone on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.viewer.scene.types import Shape
from embodied.viewer.session.snapshot import Packed, Sight

CURVES = 8
"""Elements of an action or observation in a plot: more cannot be told apart."""
TERM = "term/"
"""Begins the names of numbers that are parts of a reward."""
SAFETY = "safety/"
"""Begins the names of safety's stages: the ticks of a step in which each changed something."""
MOVED = "moved/"
"""Begins the names of how far a target was moved on its way to the robot."""
LONGEST = 20_000
"""Moments that are kept; of a longer episode the oldest tenth is forgotten."""


@dataclass(frozen=True, slots=True)
class Mind:
    """Where `who` acts was in its plan, and torch's generator (its noise)."""

    who: str
    actor: Tensors
    luck: Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """The world after `step` control steps, and the `action` that led there (None: the start).

    `shown` are the observations of row 0, `obs` what is acted on next (another episode's start
    where this one ended), `plan` [H, A] the chunk that the action is element `place` of, `fresh`
    whether it was decided for this step. `state` goes on from here (None: the world cannot), with
    the same `mind` if the same one acts. `numbers` are what else is known of the step, by name,
    `photo` what the reward looked at beside the observations, `noise` [D] what a policy that
    chooses the noise of another one chose for the running decision.
    """

    step: int
    sight: Sight
    shown: Tensors
    obs: Tensors
    state: Tensors | None = None
    action: list[float] | None = None
    reward: float = 0.0
    success: bool | None = None
    plan: Tensor | None = None
    place: int = 0
    fresh: bool = False
    end: str = ""
    mind: Mind | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    photo: Packed | None = None
    noise: Tensor | None = None


@dataclass(slots=True)
class Episode:
    """What has happened since the start that `seed` gives, moment by moment, the start first.

    `who` acted; `shapes` are what its bodies look like.
    """

    seed: int
    moments: list[Moment] = field(default_factory=list)
    who: str = ""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, moment: Moment) -> int:
        """Keep one more; returns how many of the oldest were forgotten for it."""
        self.moments.append(moment)
        over = LONGEST // 10 if len(self.moments) > LONGEST else 0
        del self.moments[:over]
        return over

    @property
    def steps(self) -> int:
        return self.moments[-1].step if self.moments else 0

    @property
    def end(self) -> str:
        """How it ended, if it did."""
        return self.moments[-1].end if self.moments else ""

    @property
    def taken(self) -> list[Moment]:
        """The moments that an action led to."""
        return [moment for moment in self.moments if moment.action is not None]

    @property
    def rewards(self) -> list[float]:
        return [moment.reward for moment in self.taken]

    @property
    def actions(self) -> list[list[float]]:
        return [moment.action for moment in self.moments if moment.action is not None]

    @property
    def success(self) -> bool | None:
        """Whether the task was achieved at any time; None where the world does not say."""
        return success_by(self.moments)

    @property
    def wins(self) -> list[int]:
        """The steps at which it was achieved anew."""
        flags = [(moment.step, bool(moment.success)) for moment in self.moments]
        return [
            step for i, (step, won) in enumerate(flags) if won and (i == 0 or not flags[i - 1][1])
        ]

    @property
    def told(self) -> list[str]:
        """The names of the numbers of its steps, but for stages of safety that never acted."""
        said = [moment.numbers for moment in self.moments]
        names = sorted({name for numbers in said for name in numbers})
        return [
            name
            for name in names
            if not name.startswith(SAFETY) or any(numbers.get(name) for numbers in said)
        ]

    @property
    def interventions(self) -> list[tuple[int, str]]:
        """The steps at which a stage of safety began to act, and its name."""
        began: list[tuple[int, str]] = []
        before: set[str] = set()
        for moment in self.taken:
            acted = {
                name.removeprefix(SAFETY)
                for name, ticks in moment.numbers.items()
                if name.startswith(SAFETY) and ticks
            }
            began += [(moment.step, name) for name in sorted(acted - before)]
            before = acted
        return began

    def seen(self, name: str) -> list[list[float]]:
        """The first elements of one observation, after each action."""
        return [firsts(moment.shown[name]) for moment in self.taken]


def success_by(moments: list[Moment]) -> bool | None:
    """Whether one of `moments` is a success; None where none of them knows."""
    known = [moment.success for moment in moments if moment.success is not None]
    return any(known) if known else None


def firsts(value: Tensor) -> list[float]:
    """The first elements of row 0."""
    return value[0].reshape(-1)[:CURVES].float().tolist()
