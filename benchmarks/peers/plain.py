"""SAC and TD3 in plain PyTorch: a module per network, torch's Adam, no optimisations.

A reference for the learners beside Stable-Baselines3: the same arithmetic without batched critics,
fused optimizer steps or preallocated buffers.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.tensors import Tensors
from embodied.nn.networks import mlp

GAMMA, TAU, LR = 0.99, 0.005, 3e-4
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Plain:
    """Twin critics with targets; `update` is one critic step and one policy step."""

    def __init__(
        self, obs: int, act: int, hidden: tuple[int, ...], heads: int, device: str
    ) -> None:
        sizes = (obs + act, hidden, 1)
        self.policy = mlp(obs, hidden, heads * act).to(device)
        self.critics = nn.ModuleList(mlp(*sizes) for _ in range(2)).to(device)
        self.target = copy.deepcopy(self.critics)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), LR)
        self.policy_adam = torch.optim.Adam(self.policy.parameters(), LR)
        self.act = act

    def values(self, critics: nn.ModuleList, obs: Tensor, action: Tensor) -> list[Tensor]:
        return [critic(torch.cat([obs, action], 1)).squeeze(1) for critic in critics]

    def learn(self, batch: Batch, backup: Tensor) -> None:
        obs, action = batch[0], batch[1]
        values = self.values(self.critics, obs, action)
        loss = sum(((q - backup).square().mean() for q in values), torch.zeros(()).to(backup))
        self.critic_adam.zero_grad()
        loss.backward()
        self.critic_adam.step()

    def follow(self, target: nn.Module, source: nn.Module) -> None:
        with torch.no_grad():
            for old, new in zip(target.parameters(), source.parameters(), strict=True):
                old.mul_(1 - TAU).add_(new, alpha=TAU)

    def climb(self, loss: Tensor) -> None:
        self.policy_adam.zero_grad()
        loss.backward()
        self.policy_adam.step()


class PlainSac(Plain):
    """Tanh-squashed Gaussian policy, learned temperature."""

    def __init__(self, obs: int, act: int, hidden: tuple[int, ...], device: str) -> None:
        super().__init__(obs, act, hidden, 2, device)
        self.log_alpha = torch.zeros((), requires_grad=True, device=device)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], LR)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.policy(obs).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        u = normal.rsample()
        squash = 2 * (math.log(2) - u - functional.softplus(-2 * u))
        return torch.tanh(u), (normal.log_prob(u) - squash).sum(1)

    def update(self, rows: Tensors) -> None:
        obs, _, reward, discount, following = batch = unpack(rows)
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_action, log_prob = self.sample(following)
            values = torch.stack(self.values(self.target, following, next_action))
            backup = reward + discount * (values.amin(0) - alpha * log_prob)
        self.learn(batch, backup)
        new, log_prob = self.sample(obs)
        values = torch.stack(self.values(self.critics, obs, new))
        self.climb((alpha * log_prob - values.amin(0)).mean())
        loss = -self.log_alpha * (log_prob.detach() - self.act).mean()
        self.alpha_adam.zero_grad()
        loss.backward()
        self.alpha_adam.step()
        self.follow(self.target, self.critics)


class PlainTd3(Plain):
    """Deterministic policy, updated with the targets every second update."""

    def __init__(self, obs: int, act: int, hidden: tuple[int, ...], device: str) -> None:
        super().__init__(obs, act, hidden, 1, device)
        self.target_policy = copy.deepcopy(self.policy)
        self.updates = 0

    def update(self, rows: Tensors) -> None:
        obs, _, reward, discount, following = batch = unpack(rows)
        self.updates += 1
        with torch.no_grad():
            action = torch.tanh(self.target_policy(following))
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            values = self.values(self.target, following, (action + noise).clamp(-1, 1))
            backup = reward + discount * torch.min(*values)
        self.learn(batch, backup)
        if self.updates % 2 == 0:
            action = torch.tanh(self.policy(obs))
            self.climb(-self.values(self.critics, obs, action)[0].mean())
            self.follow(self.target, self.critics)
            self.follow(self.target_policy, self.policy)


def unpack(rows: Tensors) -> Batch:
    names = ("obs/state", "action", "reward", "discount", "next_obs/state")
    obs, action, reward, discount, following = (rows[name] for name in names)
    return obs, action, reward, discount, following
