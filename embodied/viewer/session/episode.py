"""Episode: one episode with every step stored, so that any step can be displayed and continued
from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from embodied.core.tensors import Tensors
from embodied.viewer.scene.types import Shape
from embodied.viewer.session.snapshot import CompressedImage, EnvSnapshot

CURVES = 8
"""How many elements of an action or observation are plotted."""
TERM = "term/"
"""Prefix of the names of reward components."""
SAFETY = "safety/"
"""Prefix of the names of safety stages: in how many control ticks of a step each changed the
target."""
MOVED = "moved/"
"""Prefix of the names of target changes: how far a joint target was moved between two stages."""
LONGEST = 20_000
"""Steps that are stored; of a longer episode the oldest tenth is discarded."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The state of policy `name` after a step: its actor's state (chunk, memory) and torch's RNG
    state."""

    name: str
    actor: Tensors
    rng_state: Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after `step` control steps, and the `action` that led to it (None: the initial
    state).

    `next_obs` are the observations that the step led to, `obs` the ones that the next action is
    computed from (of the next episode if this one ended). `plan` [H, A] is the action chunk of
    which the action is element `chunk_index`; `is_decision` says whether the chunk was computed for
    this step. `state` is the saved environment state to continue from (None: it cannot be saved),
    `policy_state` that of the policy. `numbers` are further quantities of the step by name,
    `reward_image` is the image that the reward was computed from, and `noise` [D] the latent noise
    that a steering policy chose for the running chunk.
    """

    step: int
    frame: EnvSnapshot
    next_obs: Tensors
    obs: Tensors
    state: Tensors | None = None
    action: list[float] | None = None
    reward: float = 0.0
    success: bool | None = None
    plan: Tensor | None = None
    chunk_index: int = 0
    is_decision: bool = False
    end: str = ""
    policy_state: PolicyState | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    reward_image: CompressedImage | None = None
    noise: Tensor | None = None


@dataclass(slots=True)
class Episode:
    """The steps since the initial state of `seed`, the initial state first.

    `policy_name` is the policy that acted, `shapes` are the shapes of the scene.
    """

    seed: int
    moments: list[Moment] = field(default_factory=list)
    policy_name: str = ""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, moment: Moment) -> int:
        """Store one more step; returns how many of the oldest were discarded for it."""
        self.moments.append(moment)
        over = LONGEST // 10 if len(self.moments) > LONGEST else 0
        del self.moments[:over]
        return over

    @property
    def steps(self) -> int:
        return self.moments[-1].step if self.moments else 0

    @property
    def end(self) -> str:
        """How the episode ended; empty while it runs."""
        return self.moments[-1].end if self.moments else ""

    @property
    def actions_taken(self) -> list[Moment]:
        """The stored steps without the initial state."""
        return [moment for moment in self.moments if moment.action is not None]

    @property
    def rewards(self) -> list[float]:
        return [moment.reward for moment in self.actions_taken]

    @property
    def actions(self) -> list[list[float]]:
        return [moment.action for moment in self.moments if moment.action is not None]

    @property
    def success(self) -> bool | None:
        """Whether the task succeeded at any step; None if success is not reported."""
        return success_by(self.moments)

    @property
    def success_steps(self) -> list[int]:
        """The steps at which success began."""
        flags = [(moment.step, bool(moment.success)) for moment in self.moments]
        return [
            step for i, (step, won) in enumerate(flags) if won and (i == 0 or not flags[i - 1][1])
        ]

    @property
    def number_names(self) -> list[str]:
        """The names of all `numbers`, without safety stages that never acted."""
        said = [moment.numbers for moment in self.moments]
        names = sorted({name for numbers in said for name in numbers})
        return [
            name
            for name in names
            if not name.startswith(SAFETY) or any(numbers.get(name) for numbers in said)
        ]

    @property
    def interventions(self) -> list[tuple[int, str]]:
        """The steps at which a safety stage began to act, with its name."""
        began: list[tuple[int, str]] = []
        before: set[str] = set()
        for moment in self.actions_taken:
            acted = {
                name.removeprefix(SAFETY)
                for name, ticks in moment.numbers.items()
                if name.startswith(SAFETY) and ticks
            }
            began += [(moment.step, name) for name in sorted(acted - before)]
            before = acted
        return began

    def obs_curve(self, name: str) -> list[list[float]]:
        """The first elements of one observation after each action."""
        return [firsts(moment.next_obs[name]) for moment in self.actions_taken]


def success_by(moments: list[Moment]) -> bool | None:
    """Whether one of `moments` is a success; None if success is not reported."""
    known = [moment.success for moment in moments if moment.success is not None]
    return any(known) if known else None


def firsts(value: Tensor) -> list[float]:
    """The first elements of parallel env 0."""
    return value[0].reshape(-1)[:CURVES].float().tolist()
