"""ModelGate: judges a policy by a model's roll-outs and a critic, without the environment (AM-Q).

The score of a start state is the mean of Q(s, pi(s)) along a roll-out of the policy's most typical
actions in the model. Starts are fixed, so that two policies are compared in pairs: a better one is
ahead by more than the standard error of the differences. Otherwise the maximum over many policies
would be their noise (as in the published code of Uni-O4, which draws new starts each time).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, length
from embodied.models.dynamics import Dynamics


class ModelGate:
    """Compares policies from the observations `starts` [n, ...], over `horizon` steps of `model`
    (None: at the starts alone). `q` returns the values [n] of observations and actions [n, A]."""

    def __init__(
        self,
        starts: Tensors,
        q: Callable[[Tensors, Tensor], Tensor],
        model: Dynamics | None = None,
        horizon: int = 0,
    ) -> None:
        self.starts = starts
        self.q = q
        self.model = model
        self.horizon = horizon if model is not None else 0

    @torch.no_grad()
    def scores(self, policy: Policy) -> Tensor:
        """The score [n] of each start; a roll-out counts until the model terminates it."""
        obs = self.starts
        n = length(obs)
        total = torch.zeros(n, device=next(iter(obs.values())).device)
        count = torch.zeros_like(total)
        running = torch.ones_like(total, dtype=torch.bool)
        for step in range(self.horizon + 1):
            plan, _ = policy.act(obs, policy.initial(n), policy.sample_noise(n))
            action = plan[:, 0]
            total = total + torch.where(running, self.q(obs, action), 0.0)
            count = count + running
            if self.model is None or step == self.horizon:
                break
            noise = torch.zeros(n, self.model.noise_size, device=running.device)
            made = self.model.step(obs, action, noise)
            obs = made.next_obs
            running = running & ~made.terminated
        return total / count

    def better(self, scores: Tensor, than: Tensor) -> bool:
        """Whether the mean of the paired differences of scores is above their standard error."""
        gain = scores - than
        return bool(gain.mean() > gain.std() / len(gain) ** 0.5)
