"""Plan preview: the tool's path under an action chunk, rolled out in a copy of the environment.

The chosen chunk and chunks for other noise samples become paths of the tool; their spread shows how
certain the policy is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.device import forked
from embodied.core.env import NotSavable, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.viewer.scene.types import Array
from embodied.viewer.session.episode import Moment

DRAWS = 8
AXES = ("_x", "_y", "_z")


class PlanPreview:
    """Rolls out chunks in an environment that `make(n)` makes with n parallel envs, when first
    needed.

    `tip` is None, and there is nothing to preview, if no observation names a position (`tool_x`,
    `tool_y`, `tool_z`).
    """

    def __init__(self, spec: Spec, make: Callable[[int], VecEnv]) -> None:
        self.tip, self.make = tip_of(spec), make
        self._copy: VecEnv | None = None

    def paths(self, before: Moment, after: Moment, acts: object) -> list[Array]:
        """Paths [H + 1, 3] (m) of the chunk that was decided at `before` and first executed at
        `after`, then of chunks for other noise samples. Empty if the environment's state cannot be
        restored or the policy has no chunks."""
        plan = after.plan
        if self.tip is None or plan is None or len(plan) < 2 or not isinstance(acts, Actor):
            return []
        if before.state is None or plan.ndim < 2:
            return []
        with forked(before.step):
            plans = torch.cat([plan[None], sampled(acts.policy, before, after, DRAWS - 1)])
        return self._rolled(before, plans)

    def trail(self, moments: list[Moment]) -> Array | None:
        """The tool's position at every step, [T, 3]; None if it is not observed."""
        if self.tip is None or len(moments) < 2:
            return None
        return np.concatenate([place_of(moment.next_obs, self.tip) for moment in moments])

    def close(self) -> None:
        """Close the copy of the environment."""
        if self._copy is not None:
            self._copy.close()

    @torch.no_grad()
    def _rolled(self, before: Moment, plans: Tensor) -> list[Array]:
        assert before.state is not None and self.tip is not None
        if self._copy is None:
            self._copy = self.make(DRAWS)
            self._copy.reset(0)
        copy = self._copy
        same = torch.zeros(len(plans), dtype=torch.int64)
        try:
            obs = copy.set_state(tt.take(before.state, same))
        except NotSavable:
            return []
        places = [place_of(obs, self.tip)]
        running = torch.ones(len(plans), dtype=torch.bool)
        ends = torch.full((len(plans),), plans.shape[1] + 1)
        for t in range(plans.shape[1]):
            step = copy.step(plans[:, t])
            places.append(place_of(step.next_obs, self.tip))
            ends = torch.where(running & step.ended, t + 2, ends)
            running &= ~step.ended
        paths = np.stack(places, 1)
        return [path[: int(end)] for path, end in zip(paths, ends, strict=True)]


@torch.no_grad()
def sampled(policy: Policy, before: Moment, after: Moment, count: int) -> Tensor:
    """Chunks [count, H, A] of `policy` for other noise samples at `before`, the decision that led
    to `after`."""
    same = torch.zeros(count, dtype=torch.int64)
    device = next((p.device for p in policy.parameters()), torch.device("cpu"))
    obs = tt.to(tt.take(before.obs, same), device)
    carry = carried(policy, before, after, same)
    noise = policy.sample_noise(count, True)
    seen, carry = policy.observe(obs, carry, noise)
    return policy.act(seen, carry, noise)[0].cpu()


def carried(policy: Policy, before: Moment, after: Moment, rows: Tensor) -> Tensors:
    """The recurrent state of `policy` at the decision between `before` and `after`, repeated for
    each of `rows` [n] (zeros)."""
    old, new = before.policy_state, after.policy_state
    if old is None or new is None or old.name != new.name or before.step == 0:
        return policy.initial(len(rows))
    return tt.take(tt.under(old.actor, "carry"), rows)


def tip_of(spec: Spec) -> tuple[str, int] | None:
    """The observation and index of the first three elements named NAME_x, NAME_y and NAME_z; None
    if there are none."""
    for name, leaf in spec.obs.items():
        for at, word in enumerate(leaf.names[:-2]):
            stem = word.removesuffix("_x")
            if stem != word and leaf.names[at : at + 3] == tuple(stem + axis for axis in AXES):
                return name, at
    return None


def place_of(obs: Tensors, tip: tuple[str, int]) -> Array:
    name, at = tip
    return obs[name][:, at : at + 3].double().cpu().numpy()
