"""DSAC-T: soft actor-critic whose critics learn the normal distribution of the return.

Duan et al., "DSAC-T: distributional soft actor-critic with three refinements" (2023). Each critic
predicts a mean Q and a standard deviation sigma. With j the target critic of the smaller mean at
(s', a'), a' from the target policy, l' = log pi'(a'|s'), e ~ N(0, 1) clipped to +-3:

    y_q = r + d (Q'_j - alpha l')                        target of the means
    y_z = r + d (Q'_j + sigma'_j e - alpha l')           sample, used for sigma only
    y_b = Q_i + clip(y_z - Q_i, -b_i, b_i),   b_i = 3 S_i
    L_i = E w_i [ H(Q_i - y_q) + sigma_i (sigma_i^2 - H(Q_i - y_b)) / (sigma_i + 0.1) ]
    w_i = clip(S_i^2 / (sigma_i^2 + 0.1), 0.1, 10),   S_i a running mean of sigma_i

where only Q_i in the first term and the factor sigma_i of the second have gradients, and H is the
Huber loss with threshold 50. This follows the authors' later code; as H(x) = x^2 / 2, sigma
converges to about 0.68 of the true value. form="squares" is the equation of the paper:

    L_i = S_i^2 E [ (Q_i - y_q)^2 / 2 / (sigma_i^2 + 0.1)
                    + sigma_i (sigma_i^2 - (Q_i - y_b)^2) / (sigma_i^3 + 0.1) ]

The policy, the temperature and all targets are updated every `delay` (2) updates.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, Number, Positive, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import DelayedActorCritic, SoftConfig, actor_loss, draw
from embodied.learners.critics import Critic
from embodied.learners.learner import soft_update
from embodied.policies.gaussian import Gaussian

EPS = 0.1  # keeps the divisions by sigma finite
DELTA = 50.0  # threshold of the Huber loss
NEAR = 3.0  # samples are clipped to so many standard deviations


@dataclass(frozen=True)
class Config(SoftConfig):
    """Settings of DSAC-T. Each of the three refinements has a switch: `expected`, `twin`, `adjust`;
    without `adjust` the bound is `bound` and w_i = 1 / (sigma_i^2 + 0.1)."""

    hidden: tuple[Units, ...] = (256, 256)  # units of the critics' hidden layers
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"  # of the critics
    initial_temperature: Positive = 0.2  # alpha at the start, in units of the reward
    target_entropy: Number = -1.0  # entropy that alpha is tuned to, per action element
    delay: Count = 2  # updates per step of the policy, the temperature and the targets
    form: Literal["huber", "squares"] = "huber"  # the authors' later loss, or that of the paper
    expected: bool = True  # train the means on y_q; false: on the sample y_z
    twin: bool = True  # the smaller of two critics; false: one critic
    adjust: bool = True  # S_i in the bound and in the weight; false: `bound`
    bound: Positive = 10.0  # largest |y_z - Q| without `adjust`, as a return
    scale_tau: PositiveFraction = 0.005  # step of the running means S_i of sigma


class DsacT(DelayedActorCritic):
    """`update` is one critic step and, every `delay` updates, one step of the policy, the
    temperature and the targets on the same transitions."""

    data = "off_policy"
    usual_policy = "gaussian"
    scale: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if not isinstance(policy, Gaussian):
            raise ConfigError("this learner needs a policy with log-probabilities: policy=gaussian")
        critics = 2 if config.twin else 1
        activation = config.activation
        critic = Critic(spec, policy.size, critics, config.hidden, activation=activation, out=2)
        entropy = config.target_entropy * policy.size
        super().__init__(config, policy, critic, policy.parameters(), entropy)
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        self.register_buffer("scale", torch.zeros(critics))  # S; 0 until the first batch
        self.online_params: list[Tensor] = [*self.critic_params, *self.actor_params]
        self.target_params: list[Tensor] = [
            *self.target.parameters(),
            *self.target_policy.parameters(),
        ]

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.updates += 1
        return self.with_last_actor(self._step(self.is_due(self.config.delay), batch))

    def _step(self, act: bool, batch: Tensors) -> dict[str, Tensor]:
        loss, q, sigma, clipped = self._critic_loss(batch)
        self.descend("critic", loss)
        metrics = {
            "critic_loss": loss.detach(),
            "q_mean": q,
            "sigma": sigma,
            "weight_clipped": clipped,
        }
        if act:
            metrics |= self.soft_actor_step(batch)
            soft_update(self.target_params, self.online_params, self.config.tau)
            for own, other in zip(self.target_policy.buffers(), self.policy.buffers(), strict=True):
                own.copy_(other)  # statistics of batch normalisation
        return metrics

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, ...]:
        q, sigma = distribution(self.critic(under(batch, "obs"), batch["action"]))
        mean, sample = self._backup(batch["reward"], batch["discount"], under(batch, "next_obs"))
        if not self.config.expected:
            mean = sample
        bound, weight = self._adjustment(sigma.detach())
        loss = value_loss(q, sigma, mean, sample, bound, weight, self.config.form)
        loss = loss + self.critic_terms(batch, q)
        at_rim = (weight >= RIM[1]).float().mean()  # 1 if all sigma have collapsed
        return loss, q.detach().mean(), sigma.detach().mean(), at_rim

    @torch.no_grad()
    def _backup(
        self, reward: Tensor, discount: Tensor, following: Tensors
    ) -> tuple[Tensor, Tensor]:
        """y_q and y_z, [N] each."""
        action, log_prob = draw(self.target_policy, following)
        q, sigma = distribution(self.target(following, action))
        value, least = q.min(0)
        sigma = sigma.gather(0, least[None]).squeeze(0)
        e = torch.randn_like(value).clamp_(-NEAR, NEAR)
        value = value - self.log_alpha.exp() * log_prob
        return reward + discount * value, reward + discount * (value + sigma * e)

    @torch.no_grad()
    def _adjustment(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """The bound b [E, 1] of y_b around Q, and the weight [E, N] of the losses."""
        if not self.config.adjust:
            one = torch.ones_like(self.scale)[:, None]
            return self.config.bound * one, loss_weights(sigma, one, self.config.form, clip=False)
        now = sigma.mean(1)
        moved = self.scale.lerp(now, self.config.scale_tau)
        self.scale.copy_(torch.where(self.scale == 0, now, moved))
        scale = self.scale[:, None]
        return NEAR * scale, loss_weights(sigma, scale, self.config.form)

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        obs = under(batch, "obs")
        action, log_prob = draw(self.policy, obs)
        q = distribution(self.critic(obs, action))[0].amin(0)
        return actor_loss(q, log_prob, self.alpha), log_prob.detach()


RIM = (0.1, 10.0)  # bounds of the weights w_i in the Huber form


def distribution(answer: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [E, N] from the critics' outputs [E, N, 2]."""
    q, raw = answer.unbind(-1)
    return q, functional.softplus(raw)


def loss_weights(sigma: Tensor, scale: Tensor, form: str, clip: bool = True) -> Tensor:
    """S^2 / (sigma^2 + 0.1), clipped to RIM in the Huber form; `sigma` [E, N], `scale` [E, 1]."""
    weight = scale.square() / (sigma.square() + EPS)
    return weight.clamp(*RIM) if clip and form == "huber" else weight


def value_loss(
    q: Tensor, sigma: Tensor, mean: Tensor, sample: Tensor, bound: Tensor, weight: Tensor, form: str
) -> Tensor:
    """Sum over critics of the mean of L_i; `q`, `sigma`, `weight` [E, N], `mean`, `sample` [N],
    `bound` [E, 1]. `weight` multiplies the loss of the mean."""
    error = q - mean
    fixed = sigma.detach()
    near = (sample - q.detach()).clamp(-bound, bound)
    if form == "squares":
        # S^2 from weight = S^2 / (sigma^2 + eps)
        turn = weight * (fixed.square() + EPS) / (fixed.pow(3) + EPS)
        spread = turn * sigma * (fixed.square() - near.square())
        return (weight * error.square() / 2 + spread).mean(1).sum()
    spread = sigma * (fixed.square() - huber(near)) / (fixed + EPS)
    return (weight * (huber(error) + spread)).mean(1).sum()


def huber(error: Tensor) -> Tensor:
    """Huber loss: x^2 / 2, linear beyond DELTA."""
    return functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=DELTA)
