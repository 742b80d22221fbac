"""FB: forward-backward representations: offline, every reward at once (Touati and Ollivier, 2021).

The discounted visits M of states s' by the policy pi_z after (s, a) are F(s, a, z) . B(s') times
the density of s' in the data. With m = F . B, m' of the target networks (the smaller of two F), and
the next action a' of pi_z with clipped noise, on a batch of transitions i with their own z_i:

    L_FB = 1/2 mean_{i != j} (F_i . B_j - d_i m'_ij)^2 - mean_i F_i . B_i
    L_B  = mean_{i != j} (B_i . B_j)^2 - 2 mean_i B_i . B_i          (B has identity covariance)
    L_pi = - mean_i min F(s_i, pi_z(s_i), z_i) . z_i

B is of s', the state after the transition. z is drawn on the sphere of radius sqrt(d), or is B of
another state of the batch. Afterwards `embodied prompt` turns a reward, a goal, a demonstration or
frames into z (RL Zero; Sikchi et al., 2024). While it trains, the policy is prompted with the
recordings' own reward, by a moving average over batches.

Differences from the published code: z is drawn anew for every batch, as there are no episodes; the
networks have no separate branches for (s, a) and (s, z).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, NonNegative, PositiveFraction, Units
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.learner import Learner, frozen, soft_update
from embodied.nn.networks import Ensemble
from embodied.nn.optim import Adam
from embodied.policies.networks.encoders import Encoder
from embodied.policies.prompted import Prompted

SLOWNESS = 0.01
"""Step of the moving average of the recordings' reward as a prompt."""


@dataclass(frozen=True)
class Config:
    batch_size: Count = 512  # transitions per update; each is a state that the others may visit
    gamma: Fraction = 0.98  # discount per environment step
    hidden: tuple[Units, ...] = (256, 256)  # units of the hidden layers of F
    layer_norm: bool = False  # layer normalisation in F
    lr: PositiveFraction = 1e-4  # Adam's learning rate of F and B
    actor_lr: PositiveFraction = 1e-4  # Adam's learning rate of the policy
    tau: PositiveFraction = 0.01  # step of the target networks towards the trained ones
    orthonormality: NonNegative = 1.0  # weight of L_B
    noise: NonNegative = 0.2  # std on the policy's actions, in units of half the action range
    noise_clip: NonNegative = 0.3  # largest size of that noise
    from_data: Fraction = 0.5  # share of prompts that are B of a state of the data
    terminations: bool = True  # visits end where the environment terminated; false: they go on


class Forward(nn.Module):
    """Two F [2, N, d] of observations [N, ...], actions [N, size] and prompts [N, d]."""

    def __init__(self, spec: Spec, size: int, dimension: int, config: Config) -> None:
        super().__init__()
        self.encoder = Encoder(spec.obs)
        width = self.encoder.size + size + dimension
        self.net = Ensemble(2, width, config.hidden, dimension, config.layer_norm)

    def forward(self, obs: Tensors, action: Tensor, z: Tensor) -> Tensor:
        return self.net(torch.cat([self.encoder(obs), action, z], 1))


class Fb(Learner):
    """`update` is one step of F and B, and one of the policy, on the same transitions."""

    data = "offline"
    usual_policy = "prompted"
    losses = ("_measure_loss", "_actor_loss")

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        if not isinstance(policy, Prompted):
            raise ConfigError("learner=fb trains a policy of every reward: policy=prompted")
        if config.batch_size < 2:
            raise ConfigError("learner.batch_size should be at least 2: visits of other states")
        super().__init__(config, policy)
        self.visits = Forward(spec, policy.size, policy.dimension, config)
        self.target_visits = copy.deepcopy(self.visits).requires_grad_(False)
        self.target_backward = copy.deepcopy(policy.backward).requires_grad_(False)
        self.online: list[Tensor] = [*self.visits.parameters(), *policy.backward.parameters()]
        self.target: list[Tensor] = [
            *self.target_visits.parameters(),
            *self.target_backward.parameters(),
        ]
        actor = [*policy.encoder.parameters(), *policy.net.parameters()]
        self.optims = {"fb": Adam(self.online, config.lr), "actor": Adam(actor, config.actor_lr)}

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        z = self.prompts(under(batch, "next_obs"))
        measure, orthonormality = self._measure_loss(batch, z)
        self.descend("fb", measure + self.config.orthonormality * orthonormality)
        with frozen(self.online):
            loss = self._actor_loss(batch, z)
            self.descend("actor", loss)
        soft_update(self.target, self.online, self.config.tau)
        with torch.no_grad():
            known = self.policy.embed(under(batch, "next_obs"))
            self.policy.u.lerp_((known * batch["reward"][:, None]).mean(0), SLOWNESS)
        return {
            "measure_loss": measure.detach(),
            "orthonormality_loss": orthonormality.detach(),
            "actor_loss": loss.detach(),
        }

    @torch.no_grad()
    def prompts(self, states: Tensors) -> Tensor:
        """z [N, d]: B of the states in another order, and points of the sphere."""
        known = self.policy.embed(states)
        known = known[torch.randperm(len(known), device=known.device)]
        drawn = functional.normalize(torch.randn_like(known), dim=1) * known.shape[1] ** 0.5
        share = torch.rand(len(known), 1, device=known.device)
        return torch.where(share < self.config.from_data, known, drawn)

    def _measure_loss(self, batch: Tensors, z: Tensor) -> tuple[Tensor, Tensor]:
        """L_FB, summed over both F, and L_B."""
        following, discount = under(batch, "next_obs"), batch["discount"]
        if not self.config.terminations:
            discount = torch.where(discount == 0, self.gamma, discount)
        with torch.no_grad():
            action = self.noisy(self.policy(following, z))
            visits = self.target_visits(following, action, z)
            later = (visits @ self.target_backward(following).T).amin(0)
        known = self.policy.embed(following)
        measure = self.visits(under(batch, "obs"), batch["action"], z) @ known.T
        error = others(measure - discount[:, None] * later) / 2
        measure_loss = (error - measure.diagonal(dim1=1, dim2=2).mean(1)).sum()
        products = known @ known.T
        return measure_loss, others(products) - 2 * products.diagonal().mean()

    def _actor_loss(self, batch: Tensors, z: Tensor) -> Tensor:
        obs = under(batch, "obs")
        action = self.noisy(self.policy(obs, z))
        return -(self.visits(obs, action, z) * z).sum(2).amin(0).mean()

    def noisy(self, action: Tensor) -> Tensor:
        """`action` with clipped noise, in [-1, 1]."""
        limit = self.config.noise_clip
        noise = (self.config.noise * torch.randn_like(action)).clamp(-limit, limit)
        return (action + noise).clamp(-1, 1)

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        self.target_backward.fit(transitions)
        self.visits.encoder.fit(transitions)
        self.target_visits.encoder.fit(transitions)


def others(values: Tensor) -> Tensor:
    """The mean square [...] of the elements [..., N, N] that are not on the diagonal."""
    square, count = values.square(), values.shape[-1]
    own = square.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (square.sum((-2, -1)) - own) / (count * (count - 1))
