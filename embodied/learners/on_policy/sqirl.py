"""SQIRL: shallow Q-iteration via reinforcement learning (Laidlaw et al., 2023).

Random exploration and k - 1 backups often suffice. In stage t the policy is greedy in the steps
before t, which are trained, and random from t on. On the decisions of these random steps,

    Q^1(s, a) = E[ return to go ],   Q^{j+1}(s, a) = E[ r + d max_a' Q^j(s', a') ],   j < k

are regressed as k heads of one network; argmax_a Q^k is then the policy of step t for good. With
k = 1 it is one step of policy improvement on random behaviour in each stage. How long it takes is
told by the effective horizon (`embodied env horizon`).

Returns end with the episode, at a time limit too. Differences from the published code: the
decisions of former stages are dropped; several passes over those of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Count, Fraction, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, nest, take, under
from embodied.learners.learner import Learner
from embodied.learners.on_policy.ppo_parts import clip_norm
from embodied.nn.networks import Ensemble
from embodied.nn.optim import Adam, Optimizer
from embodied.policies.categorical import FORBIDDEN
from embodied.policies.staged_categorical import StagedCategorical


@dataclass(frozen=True)
class Config:
    """Settings of SQIRL. A stage is `horizon` decisions of every parallel environment."""

    horizon: Count = 512  # decisions of each parallel environment per stage
    depth: Count = 1  # k: heads, of which k - 1 are backed up from another one
    epochs: Count = 10  # passes over the decisions of a stage
    batch_size: Count = 256  # decisions per minibatch
    gamma: Fraction = 0.99  # discount per environment step
    lr: PositiveFraction = 1e-3  # Adam's learning rate
    grad_clip: Positive = 10.0  # largest norm of the gradient
    normalize: bool = True  # standardise observations by the decisions of the first stage


class Sqirl(Learner):
    """`update` trains on the decisions of a stage and freezes the network of its step; after the
    last step of `policy.steps` the policy stays as it is."""

    data = "on_policy"
    policy: StagedCategorical

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__()
        if not isinstance(policy, StagedCategorical):
            raise ConfigError("SQIRL needs discrete actions and policy=staged_categorical")
        if any(True for _ in policy.encoder.parameters()):
            raise ConfigError(
                "SQIRL freezes one network after another, and pictures and points would share one "
                "encoder: choose vectors and symbols"
            )
        self.config = config
        self.policy = policy
        self.horizon = config.horizon
        self.batch_size = config.batch_size
        self.gamma = config.gamma
        hidden, kind = policy.config.hidden, policy.config.activation
        size, out = policy.encoder.size, config.depth * policy.actions
        self.net = Ensemble(1, size, hidden, out, activation=kind)
        self.params = list(self.net.parameters())
        self.optim = Adam(self.params, config.lr)

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {"values": self.optim}

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        policy = self.policy
        stage = int(policy.trained)
        if stage == policy.config.steps:
            return {"stage": policy.trained.float()}
        if stage == 0 and self.config.normalize:
            seen = nest(under(batch, "obs"), "obs")
            policy.fit({key: leaf.flatten(0, 1) for key, leaf in seen.items()})
            distributed.broadcast(policy)
        data = decisions(batch, self.gamma, stage)
        losses = self._regress(data)
        self._freeze(stage)
        metrics = {"stage": policy.trained.float()}
        if losses:
            metrics["loss"] = torch.stack(losses).mean()
        return metrics

    def _regress(self, data: Tensors) -> list[Tensor]:
        """Gradient steps on the decisions of a stage; their losses."""
        count = distributed.all_min(len(data["togo"]))
        size = min(self.config.batch_size, count)
        losses: list[Tensor] = []
        for _ in range(self.config.epochs if count else 0):
            order = torch.randperm(count, device=data["togo"].device)
            for at in range(0, count - size + 1, size):
                loss = self.loss(take(data, order[at : at + size]))
                loss.backward()
                clip_norm([weight.grad for weight in self.params], self.config.grad_clip)  # pyright: ignore[reportArgumentType]
                self.optim.step()
                losses.append(loss.detach())
        return losses

    def loss(self, data: Tensors) -> Tensor:
        """Mean squared error of all heads on decisions [N]: `obs/*`, `action`, `reward`,
        `discount`, `next_obs/*`, `togo` (the return from there)."""
        action = self.policy.choices.split(data["action"])[0]
        with torch.no_grad():
            best = self._heads(under(data, "next_obs"))[:, :-1].amax(2)
        backup = data["reward"][:, None] + data["discount"][:, None] * best
        target = torch.cat([data["togo"][:, None], backup], 1)
        q = self._heads(under(data, "obs"))
        index = action[:, None].expand(-1, self.config.depth, 1)
        return (q.gather(2, index).squeeze(2) - target).square().mean()

    def _heads(self, obs: Tensors) -> Tensor:
        """Q^1 to Q^k of allowed actions, [N, k, actions]."""
        out = self.net(self.policy.encoder(obs))[0]
        heads = out.unflatten(1, (self.config.depth, self.policy.actions))
        return heads.masked_fill(~self.policy.allowed(obs)[:, None], FORBIDDEN)

    @torch.no_grad()
    def _freeze(self, stage: int) -> None:
        """Copy the last head to the policy's network of step `stage`."""
        kept = list(self.policy.net.weights), list(self.policy.net.biases)
        for own, place in zip((self.net.weights, self.net.biases), kept, strict=True):
            for i, weight in enumerate(own):
                place[i][stage] = weight[0][..., -place[i].shape[2] :]
        self.policy.trained += 1


def decisions(batch: Tensors, gamma: float, stage: int) -> Tensors:
    """The decisions [N] of a batch [T, B] in the steps from `stage` on, of episodes that end in it:
    with the return `togo`, and the `discount` 0 where the episode ends."""
    ended, togo, whole = batch["ended"], batch["reward"].clone(), batch["ended"].clone()
    for t in range(len(togo) - 2, -1, -1):
        togo[t] += gamma * ~ended[t] * togo[t + 1]
        whole[t] |= whole[t + 1]
    used = whole & batch["valid"] & (batch["step"] >= stage)
    index = used.flatten().nonzero().flatten()
    kept = {key: leaf for key, leaf in batch.items() if key.startswith(("obs/", "next_obs/"))}
    kept |= {"action": batch["action"], "reward": batch["reward"], "togo": togo}
    kept["discount"] = gamma * (~ended).float()
    return take({key: leaf.flatten(0, 1) for key, leaf in kept.items()}, index)
