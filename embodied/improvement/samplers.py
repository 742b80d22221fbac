"""How a policy acts best without training: the steps of its sampler and those of each chunk that
are executed, looked for one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.config_fields import complete, settings_of
from embodied.core.policy import Policy
from embodied.improvement.advice import Score
from embodied.policies.wrappers.real_time_chunking import GuidedSampler

STEPS = (1, 4, 16)  # of a sampler, that are tried beside its own


@dataclass(frozen=True)
class Sampler:
    """How a policy acts: the steps of its sampler (None: its own), the steps of each chunk that are
    executed, and whether zeros take the place of its noise."""

    steps: int | None
    execute: int
    zero: bool = False

    def words(self, policy: Policy, own: Sampler) -> tuple[str, ...]:
        """The settings that are not those of `own`, as `embodied eval` takes them."""
        name = ".".join(["policy", *(sampler_in(policy) or ()), "steps"])
        steps = [] if self.steps is None else [f"{name}={self.steps}"]
        return (*steps, *([] if self.execute == own.execute else [f"execute={self.execute}"]))


def best_sampler(
    policy: Policy,
    own: Sampler,
    score: Score,
    measure: Callable[[Sampler], Score],
    zero: bool = False,
    until: float = math.inf,
) -> tuple[Sampler, Score]:
    """The sampler with the highest lower end of its interval, and its score; `own` has `score`.
    `zero`: try zeros in place of the noise too; `until`: the monotonic time (s) after which nothing
    more is measured. A number of steps for which `measure` raises ConfigError is left out."""
    best = own
    place = sampler_in(policy)
    steps = None if place is None else steps_of(policy, place)
    rounds: list[Callable[[], list[Sampler]]] = [
        lambda: [replace(best, steps=k) for k in STEPS if steps not in (None, k)],
        lambda: [
            replace(best, execute=k)
            for k in sorted({1, policy.chunk // 2, policy.chunk} - {0, best.execute})
        ],
        lambda: [replace(best, zero=True)] if zero else [],
    ]
    for others in rounds:
        for other in others():
            if time.monotonic() > until:
                return best, score
            try:
                found = measure(other)
            except ConfigError:  # a number of steps that this sampler cannot make
                continue
            if found.low > score.low:
                best, score = other, found
    return best, score


def sampler_in(policy: Policy) -> tuple[str, ...] | None:
    """Where in the settings of `policy` those of its sampler are; None without one."""
    place: tuple[str, ...] = ()
    part = policy
    while not isinstance(part, GuidedSampler):
        inner = getattr(part, "base", None)
        if not isinstance(inner, Policy):
            return None
        part = inner
        place = (*place, "base")
    known = settings_of(str(part.node["_target_"])) or ()
    return place if any(setting.name == "steps" for setting in known) else None


def steps_of(policy: Policy, place: Sequence[str]) -> int | None:
    """The steps of the sampler at `place`."""
    node = complete(policy.node)
    for name in place:
        node = node[name]
    return node["steps"]


def with_steps(policy: Policy, steps: int) -> Policy:
    """`policy` with another number of steps of its sampler; ConfigError for one that it refuses."""
    node = complete(policy.node)
    inner = node
    for name in sampler_in(policy) or ():
        inner = inner[name]
    inner["steps"] = steps
    device = next((p.device for p in policy.parameters()), torch.device("cpu"))
    return checkpoint.with_settings(policy, node, "this policy").to(device)
