"""Policies for lifetimes of a Bandit: Thompson sampling, and a random one with odds of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


class Thompson(Policy):
    """Thompson sampling (Thompson, 1933) in lifetimes of a Bandit with normal rewards: the arm that
    is best by a sample of the posterior, with the means' prior N(1/2, 1/12), the moments of the
    uniform one, and the rewards' true deviation `noise`. Reads `last_action`, `last_reward`.
    """

    def __init__(self, spec: Spec, noise: float = 0.3) -> None:
        super().__init__()
        self.spec = spec
        self.precision = 1 / noise**2

    def initial(self, n: int) -> Tensors:
        arms = self.spec.act.choices[0]
        return {"pulls": torch.zeros(n, arms), "sums": torch.zeros(n, arms)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.spec.act.choices[0])

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        pulls = carry["pulls"] + obs["last_action"]
        sums = carry["sums"] + obs["last_action"] * obs["last_reward"]
        precision = 12.0 + self.precision * pulls
        mean = (12.0 * 0.5 + self.precision * sums) / precision
        drawn = mean + noise * precision.rsqrt()
        return drawn.argmax(1)[:, None], {"pulls": pulls, "sums": sums}


class Lopsided(Policy):
    """A random policy with odds of its own in each lifetime, for contexts that know much of one
    choice and little of others: (1 - w) p + w e_i with p ~ Dirichlet(1, ..., 1), i and w uniform.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.count = spec.act.choices[0]

    def initial(self, n: int) -> Tensors:
        return {"odds": torch.zeros(n, self.count)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.rand(n, 2 * self.count + 2).clamp(1e-6, 1 - 1e-6)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        lots, (weight, which), draw = (
            noise[:, : self.count],
            noise[:, self.count : self.count + 2].unbind(1),
            noise[:, self.count + 2 :],
        )
        share = -lots.log()
        share = share / share.sum(1, keepdim=True)
        one = functional.one_hot((which * self.count).long(), self.count)
        fresh = torch.lerp(share, one.float(), weight[:, None])
        odds = torch.where(carry["odds"].sum(1, keepdim=True) == 0, fresh, carry["odds"])
        gumbel = -(-draw.log()).log()
        return (odds.log() + gumbel).argmax(1)[:, None], {"odds": odds}
