"""DSRL-NA: SAC in the latent noise of a frozen base policy, trained from executed actions.

The noise-aliased variant of DSRL (Wagenmaker et al., 2025). f(s, w) is the frozen sampler, b the
noise bound; no gradient passes through f; w' = b u', u' ~ pi(.|s'):

    y    = r + d (min_i QA'_i(s', f(s', w')) - alpha log pi(u'|s'))
    L_A  = sum_i E (QA_i(s, a) - y)^2
    L_W  = sum_i E 1/2 (QW_i(s, z) - QA_i(s, f(s, z)))^2,   z ~ N(0, I), or from the actor
    L_pi = E (alpha log pi(u|s) - min_i QW_i(s, b u))

The published method samples every z from a normal distribution, so QW extrapolates where the actor
chooses noise near the corners of its box. Here a share of z (`actor_share`) comes from the actor.

GR-RL (ByteDance Seed, 2025) is this with `atoms` and `shell_weight` = c (gr_rl.yaml): QA and QW are
categorical, QW learns QA's distribution by cross entropy, and the actor's noise w is free within a
shell, |w|^2 / size <= `shell`, and penalised beyond:

    L_pi = E (alpha log pi(u|s) - min_i QW_i(s, b u) + c max(|w|^2 / size - shell, 0))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import CountOrZero, Fraction, NonNegative, Number, Positive
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, each, under
from embodied.learners.actor_critic import ActorCritic, SoftConfig, actor_loss, draw
from embodied.learners.critics import CriticConfig, cross_entropy, ensemble, support_of
from embodied.learners.learner import UNPLANNED, RunPlan
from embodied.nn.optim import Adam
from embodied.policies.gaussian import Gaussian
from embodied.policies.steering import dsrl_na

STEERABLE = 1e-3  # minimum std of the base's actions over its noise, in units of half their range


@dataclass(frozen=True)
class Config(SoftConfig, CriticConfig):
    """Settings of DSRL-NA. With sparse rewards, start the temperature far below the reward or leave
    `entropy_in_backup` false."""

    layer_norm: bool = True  # layer normalisation in the critics
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "tanh"  # of the critics
    initial_temperature: Positive = 0.01  # alpha at the start, in units of the reward
    target_entropy: Number = 0.0  # entropy that alpha is tuned to, per element of the noise
    entropy_in_backup: bool = False  # whether the critics' target has the entropy bonus
    actor_share: Fraction = 0.5  # of their noise samples, from the actor; the rest are normal
    atoms: CountOrZero = 0  # atoms of categorical critics, 2 or more; 0: one number
    values: tuple[Number, Number] = (0.0, 1.0)  # lowest and highest atom, as a return
    shell_weight: NonNegative = 0.0  # of the penalty of noise beyond the shell, in rewards
    shell: Positive = 1.0  # mean square of the noise's elements up to which there is none


class DsrlNa(ActorCritic):
    """Each update: one step of the action critics, of the noise critics and of the actor.
    Transitions hold the executed chunk [n, execute * A] as `action`, from any behaviour policy."""

    data = "off_policy"
    losses = ("_critic_loss", "_actor_loss", "_distil_loss")

    def __init__(self, config: Config, policy: Policy, run: RunPlan = UNPLANNED) -> None:
        if not isinstance(policy, dsrl_na.DsrlNa) or not isinstance(policy.inner, Gaussian):
            raise ConfigError("this learner needs finetune=dsrl_na with policy=gaussian")
        execute = policy.chunk if run.execute is None else run.execute
        actor = policy.inner
        size = execute * policy.spec.act.size
        out = max(config.atoms, 1)
        critic = ensemble(config, actor.spec, size, config.activation, out)
        entropy = config.target_entropy * actor.size
        super().__init__(config, policy, critic, actor.parameters(), entropy)
        self.execute = execute
        self.support = support_of(config)
        self.noise_critic = ensemble(config, actor.spec, actor.size, config.activation, out)
        self.noise_critic_params: list[Tensor] = list(self.noise_critic.parameters())
        self.optims["noise_critic"] = Adam(self.noise_critic_params, config.critic_lr)

    @property
    def actor(self) -> Gaussian:
        """The trainable inner policy."""
        return self.policy.inner

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = self.critic_step(batch, self.config.tau)
        obs = under(batch, "obs")
        distilled = self._distil_loss(obs)
        self.descend("noise_critic", distilled)
        metrics["distil"] = distilled.detach()
        return metrics | self.soft_actor_step(obs, fixed=self.noise_critic_params)

    @torch.no_grad()
    def _backup(self, reward: Tensor, discount: Tensor, following: Tensors) -> Tensor:
        u, log_prob = draw(self.actor, following)
        value = self.target(following, self._executed(following, u))
        bonus = self.log_alpha.exp() * log_prob if self.config.entropy_in_backup else 0.0
        if self.support is None:
            return reward + discount * (value.amin(0) - bonus)
        return self.support.back_up(self.support.lowest(value), reward - discount * bonus, discount)

    def _executed(self, obs: Tensors, u: Tensor) -> Tensor:
        """The executed actions [n, execute * A] of the base policy at noise `u`."""
        return self.policy.play(obs, u)[:, : self.execute].flatten(1)

    def _distil_loss(self, obs: Tensors) -> Tensor:
        with torch.no_grad():
            u = self._noises(obs)
            target = self.critic(obs, self._executed(obs, u))
        if self.support is None:
            return distil_loss(self.noise_critic(obs, u), target)
        return cross_entropy(self.noise_critic(obs, u), target.softmax(-1))

    def _noises(self, obs: Tensors) -> Tensor:
        """Noise [n, size] in units of the bound: first samples of the actor, then normal ones."""
        n = len(next(iter(obs.values())))
        own = round(self.config.actor_share * n)
        z = self.actor.sample_noise(n, True)
        if not own:
            return z / self.policy.bound
        u, _ = self.actor.sample(each(obs, lambda v: v[:own]), z[:own])
        return torch.cat([u, z[own:] / self.policy.bound])

    def _actor_loss(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        u, log_prob = draw(self.actor, obs)
        value = self.values(self.noise_critic(obs, u)).amin(0)
        loss = actor_loss(value, log_prob, self.alpha)
        if self.config.shell_weight:
            loss = loss + self.config.shell_weight * self.beyond_shell(u).mean()
        return loss, log_prob.detach()

    def beyond_shell(self, u: Tensor) -> Tensor:
        """max(|w|^2 / size - shell, 0) [n] of noise `u` [n, size] in units of the bound."""
        square = (self.policy.bound * u).square().mean(1)
        return (square - self.config.shell).clamp(min=0)

    def fit(self, transitions: Tensors) -> None:
        """Set the normalisers; ConfigError if the base's actions hardly depend on its noise."""
        self.actor.fit(transitions)
        for critic in (self.critic, self.target, self.noise_critic):
            critic.encoder.fit(transitions)
        spread = self.spread(each(under(transitions, "obs"), lambda v: v[:64]))
        if spread < STEERABLE:
            raise ConfigError(
                f"the base policy's actions do not depend on its noise (std {spread:.1e}): "
                "there is nothing to steer; train the base on more varied demonstrations"
            )

    @torch.no_grad()
    def spread(self, obs: Tensors, draws: int = 8) -> float:
        """Standard deviation of the base's actions over its noise, averaged over observations and
        action elements; `draws`: noise samples per observation."""
        size = (draws, len(next(iter(obs.values()))), self.actor.size)
        device = self.log_alpha.device
        noises = torch.randn(size, device=device) / self.policy.bound
        plans = [self._executed(each(obs, lambda v: v.to(device)), u) for u in noises]
        return torch.stack(plans).std(0).mean().item()


def distil_loss(q: Tensor, target: Tensor) -> Tensor:
    """Half the mean squared error to the target of the same ensemble member, summed over the E
    members; both [E, N]."""
    return 0.5 * (q - target).square().mean(1).sum()
