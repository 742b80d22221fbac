"""BARFI: a blend of the task's reward and a designer's heuristic, aligned with the task's reward.

    r_phi(s, a, s') = phi_1(s, a) + phi_2(s, a) r_p(s, a, s') + phi_3(s, a) r_aux(s, a, s')
    max over phi, gamma_v of  J_p(theta*(phi, gamma_v)) - w gamma_v

Gupta, Chandak, Jordan, Thomas and da Silva, "Behavior Alignment via Reward Function Optimization"
(2023). r_p: the environment's reward. J_p: its discounted return. theta*: what the learner's policy
gradient on r_phi with the discount gamma_v leads to, of which

    Delta(theta) = mean over recorded steps of  grad log pi_theta(a|s) (G_phi - b)

is taken to be 0; G_phi is the sum of the rest of the episode's r_phi. The gradient in phi and
gamma_v is that of `embodied.nn.implicit_gradient`. The recorded steps are the newest batches, most
of them of older policies; dJ_p/dtheta is estimated by the newest batch.

b is the lowest G_phi, so that no step's weight is negative and Delta has a maximum where
log-probabilities are concave; its derivative is that of the mean, which changes no expectation.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core import tensors as tt
from embodied.core.bounds import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Units,
)
from embodied.core.build import ConfigError, Node
from embodied.core.choices import Choices
from embodied.core.device import forked
from embodied.core.policy import Policy
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.implicit_gradient import conjugate_gradient, implicit_gradient
from embodied.nn.networks import mlp
from embodied.nn.optim import Adam, gradient_step
from embodied.policies.abilities import HasLogProb
from embodied.rewards.bilevel.ascent import centred, objective, require_log_prob, returns
from embodied.rewards.handcrafted.factors import Factor
from embodied.rewards.intrinsic.features import ObservationFeatures

START = (0.0, 1.0, 1.0)  # phi_1, phi_2, phi_3 before training
NEAR_ONE = 0.99  # gamma_v / gamma before training


@dataclass(frozen=True)
class Config:
    """Settings of BARFI."""

    heuristic: Node  # r_aux: a factor, see `handcrafted.factors`
    leaves: tuple[str, ...] | None = None  # observations that phi sees; null: all of the policy's
    hidden: tuple[Units, ...] = (64,)  # units of phi's hidden layers
    limit: Positive = 1.0  # largest distance of a phi from where it begins: 0, 1 and 1
    lr: PositiveFraction = 3e-3  # Adam's learning rate of phi
    warmup: CountOrZero = 5  # updates of the learner before the first one of phi
    every: Count = 1  # updates of the learner between two of phi
    history: Count = 4  # newest batches that Delta is a mean of
    solver_steps: Count = 5  # steps of conjugate gradients
    damping: NonNegative = 0.01  # added to the eigenvalues of -H
    discount_lr: Fraction = 0.0  # Adam's learning rate of the logit of gamma_v; 0: the learner's
    discount_weight: NonNegative = 0.0  # w, in units of returns


class Barfi(Remembered, SummedReward):
    """For on-policy learners, whose batch it gets in the order of time. The reward of a batch is
    that of phi before the batch."""

    frozen = False
    remembered = ("nets", "adam", "discount_adam", "features", "rollouts", "count", "metrics")

    def __init__(
        self, config: Config, spec: Spec, gamma: float, device: torch.device, seed: int
    ) -> None:
        if not 0 < gamma < 1 and config.discount_lr:
            raise ConfigError("reward.discount_lr needs a learner with gamma between 0 and 1")
        self.config = config
        self.gamma = gamma
        self.device = device
        self.act = spec.act
        self.heuristic = Factor(config.heuristic, spec)
        self.features = ObservationFeatures(spec.obs, config.leaves, device)
        self.choices = Choices(spec).to(device)
        with forked(seed):
            phi = mlp(self.features.size + self.choices.width, config.hidden, len(START), "tanh")
        head = phi[-1]
        assert isinstance(head, nn.Linear)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        start = torch.tensor([math.log(NEAR_ONE / (1 - NEAR_ONE))])
        self.logit = nn.Parameter(start)  # of gamma_v / gamma
        parts = {"phi": phi, "discount": nn.ParameterList([self.logit])}
        self.nets = nn.ModuleDict(parts).to(device)
        (self.logit,) = self.nets["discount"].parameters()
        self.adam = Adam(phi.parameters(), config.lr, local=True)
        self.discount_adam = Adam([self.logit], config.discount_lr, local=True)
        self.rollouts: deque[Tensors] = deque(maxlen=config.history)
        self.count = 0
        self.metrics: dict[str, Tensor] = {}
        self.policy: HasLogProb | None = None

    def follow(self, policy: Policy) -> None:
        self.policy = require_log_prob(policy, "barfi")

    @torch.no_grad()
    def components(self, transitions: Tensors) -> Tensors:
        bias, primary, auxiliary = self.phi(transitions).unbind(1)
        return {
            "bias": bias,
            "primary": primary * transitions["reward"],
            "auxiliary": auxiliary * self.heuristic(transitions),
        }

    def phi(self, transitions: Tensors) -> Tensor:
        """phi_1, phi_2 and phi_3 [N, 3] of transitions."""
        action = transitions["action"].reshape(-1, *self.act.shape)
        inputs = [self.features(transitions, "obs"), self.choices.one_hot(action)]
        # Only the ratios of the phis matter to the policy: without a limit they grow for ever.
        moved = (self.nets["phi"](torch.cat(inputs, 1)) / self.config.limit).tanh()
        return torch.tensor(START, device=moved.device) + self.config.limit * moved

    @property
    def discount(self) -> Tensor:
        """gamma_v, a scalar, differentiable."""
        if not self.config.discount_lr:
            return torch.full_like(self.logit[0], self.gamma)
        return self.gamma * self.logit[0].sigmoid()

    @torch.no_grad()
    def discounts(self, rollout: Tensors) -> Tensor:
        return self._discounts(rollout).detach()

    def _discounts(self, rollout: Tensors) -> Tensor:
        return torch.where(rollout["discount"] > 0, self.discount, 0.0)

    def update_rollout(self, rollout: Tensors) -> dict[str, Tensor]:
        wanted = ("action", "reward", "discount", "ended", "valid")
        rollout = {k: v.clone() for k, v in rollout.items() if k in wanted or "obs/" in k}
        self.features.update(tt.each(rollout, lambda leaf: leaf.flatten(0, 1)), "obs")
        self.rollouts.append(rollout)
        self.count += 1
        late = self.count - self.config.warmup
        if late > 0 and late % self.config.every == 0:
            self.metrics = self._learn(rollout)
        return self.metrics

    def _learn(self, rollout: Tensors) -> dict[str, Tensor]:
        """One step of phi and gamma_v."""
        assert self.policy is not None, "a reward on two levels was not given its policy"
        theta = [p for p in self.policy.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(self.task(rollout), theta, materialize_grads=True)
        phi = [*self.nets["phi"].parameters(), self.logit]
        solve = conjugate_gradient(self.config.solver_steps)
        gains = implicit_gradient(self.inner(), slopes, theta, phi, solve, self.config.damping)
        self._ascend(gains)
        flat = tt.each(rollout, lambda leaf: leaf.flatten(0, 1))
        with torch.no_grad():
            means = self.phi(flat).mean(0)
        shown = dict(zip(("phi_1", "phi_2", "phi_3"), means, strict=True))
        size = torch.stack([gain.square().sum() for gain in gains]).sum().sqrt()
        return {**shown, "gradient": size, "discount": self.discount.detach()}

    def _ascend(self, gains: list[Tensor]) -> None:
        *_, pull = gains
        linear = [(g * p).sum() for g, p in zip(gains, self.nets["phi"].parameters(), strict=False)]
        gradient_step(self.adam, -torch.stack(linear).sum())
        if self.config.discount_lr:
            cost = self.config.discount_weight * self.discount
            gradient_step(self.discount_adam, cost - (pull * self.logit).sum())

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for number, rollout in enumerate(self.rollouts):
            self.rollouts[number] = tt.to(rollout, self.device)

    def task(self, rollout: Tensors) -> Tensor:
        """A scalar whose gradient in the policy is an estimate of that of J_p."""
        gain = returns(rollout["reward"], rollout["discount"], rollout["ended"])
        assert self.policy is not None
        return objective(self.policy, rollout, centred(gain, rollout["valid"]))

    def inner(self) -> Tensor:
        """A scalar whose gradient in the policy is Delta, differentiable in phi and gamma_v."""
        length = min(len(each["reward"]) for each in self.rollouts)
        parts = [tt.each(each, lambda leaf: leaf[:length]) for each in self.rollouts]
        recent = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
        flat = tt.each(recent, lambda leaf: leaf.flatten(0, 1))
        bias, primary, auxiliary = self.phi(flat).unbind(1)
        blend = bias + primary * flat["reward"] + auxiliary * self.heuristic(flat)
        reward = blend.view(recent["reward"].shape) * recent["valid"]
        gain = returns(reward, self._discounts(recent), recent["ended"])
        lowest = gain.detach() - gain.detach().amin()
        moved = centred(gain, recent["valid"])
        assert self.policy is not None
        return objective(self.policy, recent, lowest + moved - moved.detach())
