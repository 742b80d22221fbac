"""Policy: observations and noise in, a chunk of actions out; deterministic given its arguments."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


class Policy(nn.Module):
    """What acts, in training, evaluation, the viewer and on the robot.

    One decision is `observe` and then `act`, both with the same noise:

        noise = policy.draw(n, explore)
        seen, carry = policy.observe(obs, carry, noise)
        actions, carry = policy.act(seen, carry, noise)

    Randomness enters through `noise` only, so that a decision can be replayed, exported or captured
    in a graph. Normalisers are inside: observations come in their own units, uint8 images HWC.
    `carry` (recurrent state, a frozen base's plan) holds [n, ...] tensors, given back at the next
    decision. Its keys below `row/` describe the decision just made and are stored with it;
    `row/action` replaces the executed chunk as the action that a learner sees. `followed` [n]
    (int64), where it is there, is set by who plays the plan: how many of its actions were done.
    """

    spec: Spec
    chunk: int = 1
    of_clone: ClassVar[bool] = False
    """Training starts from a trained policy that it is put around, never from nothing."""
    node: dict[
        str, Any
    ]  # the configuration it was built from; set by `build`, saved in policy.yaml

    def initial(self, n: int) -> Tensors:
        """The carry of `n` rows at the start of an episode."""
        return {}

    def draw(self, n: int, explore: bool = False) -> Tensor:
        """Noise [n, ...] for one decision, from torch's default generator.

        A generative policy is its noise and draws it always; a policy whose noise is only for
        exploration returns zeros unless `explore`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not draw noise")

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        """What the policy adds to the observation (a residual adds its base's action)."""
        return obs, carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """Actions [n, chunk, A] in [-1, 1] (int64 [n, chunk] if discrete), and the next carry."""
        raise NotImplementedError(f"{type(self).__name__} does not act")

    def loss(self, batch: Tensors) -> Tensor:
        """Imitation loss [n] per row of `obs/*`, `action` [n, H, A], `valid` [n, H] (bool)."""
        raise NotImplementedError(f"{type(self).__name__} has no imitation loss")

    def first(self) -> Policy:
        """Who acts while the learner has no data yet: itself, unless it knows a better start."""
        return self

    def deployed(self) -> Policy:
        """Who acts when there is nothing more to explore, and is saved: itself, unless a part of it
        is only for learning. Without exploration both act alike."""
        return self

    def fit(self, rows: Tensors) -> None:
        """Set the normalisers from data (`obs/*`, `action`); keeps identity where not called."""
