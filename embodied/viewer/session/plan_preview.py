"""Foresight: where a plan leads, by playing it in a second world that begins where this one is.

The chunk that was chosen, and what other draws of the policy's noise would have been, become paths
of the tool; how far they part says how sure the policy is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.env import NotSavable, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.viewer.scene.types import Array
from embodied.viewer.session.episode import Moment

DRAWS = 8
AXES = ("_x", "_y", "_z")


class Foresight:
    """`make(n)` gives another world of n rows; it is made when it is first needed.

    There is nothing to foresee (`tip` is None) where no observation names a place (`tool_x`,
    `tool_y`, `tool_z`).
    """

    def __init__(self, spec: Spec, make: Callable[[int], VecEnv]) -> None:
        self.tip, self.make = tip_of(spec), make
        self._world: VecEnv | None = None

    def paths(self, before: Moment, after: Moment, acts: object) -> list[Array]:
        """The path [H + 1, 3] (m) of the plan that was decided at `before` and first seen at
        `after`, then those of other draws; none where the world or the policy has none to show."""
        plan = after.plan
        if self.tip is None or plan is None or len(plan) < 2 or not isinstance(acts, Actor):
            return []
        if before.state is None or plan.ndim < 2:
            return []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(before.step)
            plans = torch.cat([plan[None], drawn(acts.policy, before, after, DRAWS - 1)])
        return self._rolled(before, plans)

    def trail(self, moments: list[Moment]) -> Array | None:
        """Where the tool was at every moment, [T, 3]; None where it is not observed."""
        if self.tip is None or len(moments) < 2:
            return None
        return np.concatenate([place_of(moment.shown, self.tip) for moment in moments])

    def close(self) -> None:
        if self._world is not None:
            self._world.close()

    @torch.no_grad()
    def _rolled(self, before: Moment, plans: Tensor) -> list[Array]:
        assert before.state is not None and self.tip is not None
        world = self._other()
        same = torch.zeros(len(plans), dtype=torch.int64)
        try:
            obs = world.set_state(tt.take(before.state, same))
        except NotSavable:
            return []
        places = [place_of(obs, self.tip)]
        going = torch.ones(len(plans), dtype=torch.bool)
        until = torch.full((len(plans),), plans.shape[1] + 1)
        for t in range(plans.shape[1]):
            step = world.step(plans[:, t])
            places.append(place_of(step.next_obs, self.tip))
            until = torch.where(going & step.ended, t + 2, until)
            going &= ~step.ended
        paths = np.stack(places, 1)
        return [path[: int(end)] for path, end in zip(paths, until, strict=True)]

    def _other(self) -> VecEnv:
        if self._world is None:
            self._world = self.make(DRAWS)
            self._world.reset(0)
        return self._world


@torch.no_grad()
def drawn(policy: Policy, before: Moment, after: Moment, count: int) -> Tensor:
    """Chunks [count, H, A] that `policy`, who led to `after`, might have chosen at `before`, with
    other noise."""
    same = torch.zeros(count, dtype=torch.int64)
    device = next((p.device for p in policy.parameters()), torch.device("cpu"))
    obs = tt.to(tt.take(before.obs, same), device)
    carry = carried(policy, before, after, same)
    noise = policy.sample_noise(count, True)
    seen, carry = policy.observe(obs, carry, noise)
    return policy.act(seen, carry, noise)[0].cpu()


def carried(policy: Policy, before: Moment, after: Moment, rows: Tensor) -> Tensors:
    """What `policy`, who led from `before` to `after`, carried into that decision, for as many
    `rows` [n] (zeros)."""
    old, new = before.mind, after.mind
    if old is None or new is None or old.who != new.who or before.step == 0:
        return policy.initial(len(rows))
    return tt.take(tt.under(old.actor, "carry"), rows)


def tip_of(spec: Spec) -> tuple[str, int] | None:
    """The observation, and the place in it, whose next three numbers are a place in space: the
    first three names that end in _x, _y and _z and begin the same."""
    for name, leaf in spec.obs.items():
        for at, word in enumerate(leaf.names[:-2]):
            stem = word.removesuffix("_x")
            if stem != word and leaf.names[at : at + 3] == tuple(stem + axis for axis in AXES):
                return name, at
    return None


def place_of(obs: Tensors, tip: tuple[str, int]) -> Array:
    name, at = tip
    return obs[name][:, at : at + 3].double().cpu().numpy()
