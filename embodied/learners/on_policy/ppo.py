"""PPO: proximal policy optimisation (Schulman et al., 2017), for policies with log-probabilities.

    L = E[ -min(rho A, clip(rho, 1 - eps, 1 + eps) A) ] + c_v E[ (V(s) - R)^2 ] / 2 - c_h E[ H(pi) ]

rho = pi(a|s) / pi_old(a|s); A and R = A + V_old are computed by GAE (ppo_parts.py), which
bootstraps from the true next observation at a time limit. Each batch is used for several epochs of
shuffled minibatches. Recurrent policies are evaluated on whole sequences, with minibatches of
parallel environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embodied.core import distributed
from embodied.core.bounds import Count, Fraction, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, nest, take, under
from embodied.learners.acceleration import Acceleration
from embodied.learners.critics import RecurrentValue, Value, ValueConfig
from embodied.learners.learner import Learner, RunPlan
from embodied.learners.on_policy.ppo_parts import (
    LearningRates,
    ObservationStats,
    RecurrentPolicy,
    RewardScaler,
    Schedule,
    StochasticPolicy,
    clip_loss,
    clip_norm,
    gae,
    normalized,
    value_loss,
    variance,
)
from embodied.nn.networks import mlp, orthogonal
from embodied.nn.optim import Adam
from embodied.policies.networks.encoders import Encoder

PIECE = 8192  # decisions evaluated at once
LEAST = 0.25  # share of a minibatch's decisions below which a batch is not learned from
EPS = 1e-5  # of Adam, as usual for PPO
Before = tuple[Tensor, Tensor, Tensor, Tensors]


@dataclass(frozen=True)
class OnPolicyConfig(Acceleration):
    """What PPO and MDPO have. A batch has `horizon` decisions of every parallel environment."""

    horizon: Count = 2048  # decisions of each parallel environment per update
    epochs: Count = 10  # passes over a batch
    batch_size: Count = 64  # decisions per minibatch; recurrent: of whole sequences, about so many
    gamma: Fraction = 0.99  # discount per environment step
    lam: Fraction = 0.95  # lambda of generalised advantage estimation
    entropy: NonNegative = 0.0  # weight of the entropy bonus
    lr: PositiveFraction = 3e-4  # Adam's learning rate of the policy
    critic_lr: Fraction = 0.0  # Adam's learning rate of the value function; 0: as the policy's
    schedule: Schedule = "constant"  # of the learning rates; "adaptive": KL near `target_kl`
    grad_clip: NonNegative = 0.5  # largest norm of the gradient; 0: no limit
    advantage: Literal["minibatch", "batch", "raw"] = "minibatch"  # where it is normalised
    normalize: bool = True  # normalise observations by running statistics
    scale_rewards: bool = False  # divide rewards by the running std of the discounted return
    reward_clip: Positive = 10.0  # largest size of a scaled reward
    value: ValueConfig = field(default_factory=ValueConfig)  # the value function


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    clip: Positive = 0.2  # eps: largest change of the probability ratio that is rewarded
    value_weight: NonNegative = 0.5  # weight of the value function's loss
    target_kl: Positive = 0.01  # KL divergence of an update, for schedule=adaptive
    stop_kl: NonNegative = 0.0  # KL divergence above which no more epochs follow; 0: all epochs


class Ppo(Learner):
    """PPO: `update` makes `epochs` passes over a batch [T, B] of the current policy's decisions."""

    data = "on_policy"
    usual_policy = "diagonal_gaussian"
    takes_memory: ClassVar[bool] = True
    separate: ClassVar[bool] = False  # optimisers of policy and value, though their rates are equal
    value: Any  # of states: Value, or RecurrentValue with a policy that has a memory

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, StochasticPolicy | RecurrentPolicy):
            raise ConfigError(
                "this learner needs a policy with log-probabilities: policy=diagonal_gaussian or "
                "policy=categorical"
            )
        self.recurrent = isinstance(policy, RecurrentPolicy)
        if self.recurrent and not self.takes_memory:
            raise ConfigError("this learner needs a policy without memory")
        if config.schedule in ("linear", "cosine") and not run.decisions:
            raise ConfigError(f"schedule={config.schedule} needs the length of the run")
        self.total = run.decisions
        self.done = 0
        # Steps of a chunk beyond `execute` are not executed and do not affect the reward.
        self.played = None if run.execute is None else run.execute * spec.act.size
        self.value = self._critic(spec)
        self.actor_stats = ObservationStats(self.policy.encoder)
        self.critic_stats = ObservationStats(self.value.encoder)
        self.returns = RewardScaler(config.reward_clip)
        self.estimates: Tensors | None = None if config.scale_rewards else {}
        self.memory = torch.empty(0)  # hidden state of the critic before the next batch, [B, width]
        rates = (config.lr, config.critic_lr or config.lr)
        self.lr = LearningRates(rates, config.schedule)
        actor = [p for p in policy.parameters() if p.requires_grad]
        critic = list(self.value.parameters())
        self.optims = {"both": Adam([*actor, *critic], rates[0], eps=EPS)}  # one kernel for both
        if self.separate or rates[0] != rates[1]:
            pairs = (("actor", actor, rates[0]), ("critic", critic, rates[1]))
            self.optims = {name: Adam(group, rate, eps=EPS) for name, group, rate in pairs}

    def _critic(self, spec: Spec) -> Any:
        if isinstance(self.policy, RecurrentPolicy):
            return RecurrentValue(self.config.value, spec, self.policy.width)
        return Value(self.config.value, spec)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        carry = under(batch, "carry")
        batch = {key: value for key, value in batch.items() if not key.startswith("carry/")}
        if self.played is not None and batch["action"].ndim > 2:
            batch["action"] = batch["action"][..., : self.played]
        new = self.done == 0 and not self.actor_stats.given
        if new:  # a new policy's output hardly depends on observations: ratios stay near 1
            self._observe(batch)
        self._set_rates()
        table, metrics = self._table(batch, carry)
        steps, envs = batch["valid"].shape
        size = min(self.batch_size, self.horizon * envs)  # of a minibatch: decisions, or envs
        if self.recurrent:
            size = min(max(self.batch_size // steps, 1), envs)
        metrics |= self._learn(table, size)
        if not new:
            self._observe(batch)
        self.done += batch["valid"].numel()
        return metrics

    @torch.no_grad()
    def _table(self, batch: Tensors, carry: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
        """The data for minibatches: decisions [N, ...], or sequences [B, T, ...] if recurrent."""
        table = {**nest(under(batch, "obs"), "obs"), "action": batch["action"]}
        before = self._evaluate_recurrent if self.recurrent else self._evaluate
        old, value, following, kept = before(batch, carry)
        reward = batch["reward"]
        discount = batch["discount"]
        valid = batch["valid"]
        if self.config.scale_rewards:
            reward = self.returns.scale(reward, discount, batch["ended"], valid)
        trace = (batch["ended"], valid, value, following, self.config.lam)
        advantage = gae(reward, discount, *trace)
        if self.estimates is not None:
            self.estimates = {"advantage": advantage, "value": value}
        target = advantage + value
        learn = valid & batch["learn"] if "learn" in batch else valid
        if "learn" in batch and learn.sum() < LEAST * min(self.batch_size, learn.numel()):
            # Few decisions, most of them of the longest episodes, would count as a whole minibatch.
            learn = torch.zeros_like(learn)
        share = learn / learn.sum().clamp(min=1)
        residual, spread = variance(advantage, share), variance(target, share)
        metrics = {"explained": 1 - residual / spread.clamp(min=1e-8)}
        if self.config.advantage == "batch":
            advantage = normalized(advantage, share)
        table |= {"old": old, "value": value, "target": target, "advantage": advantage}
        if self.recurrent:
            table |= {"first": batch["first"], "valid": learn}
            sequences = each(table, lambda leaf: leaf.transpose(0, 1)) | kept
            if "learn" in batch:  # leave out sequences without a decision to learn from
                sequences = take(sequences, learn.any(0).nonzero().flatten())
            return sequences, metrics
        flat = each(table, lambda leaf: leaf.flatten(0, 1))
        if not bool(learn.all()):
            flat = take(flat, learn.flatten().nonzero().flatten())
        return flat, metrics

    def _evaluate(self, batch: Tensors, carry: Tensors) -> Before:
        """Log-probabilities, values and next values, by the parameters that acted."""
        flat = each(batch, lambda leaf: leaf.flatten(0, 1))
        parts: list[tuple[Tensor, ...]] = []
        for at in range(0, len(flat["reward"]), PIECE):
            decisions = each(flat, partial(piece, at, PIECE))
            following = self.value(under(decisions, "next_obs"))
            parts.append((self._old(decisions), self._values(decisions), following))
        shape = batch["reward"].shape
        old, value, after = (torch.cat(part).view(shape) for part in zip(*parts, strict=True))
        return old, value, after, {}

    def _old(self, decisions: Tensors) -> Tensor:
        """Log-probabilities [N] by the parameters that acted."""
        return self._evaluate_actions(decisions)[0]

    def _evaluate_recurrent(self, batch: Tensors, carry: Tensors) -> Before:
        """`_evaluate` for recurrent policies; also the initial hidden states of the sequences."""
        first = batch["first"]
        envs = first.shape[1]
        if len(self.memory) != envs:
            self.memory = self.value.memory.initial(envs)
        kept = {**nest(carry, "carry"), "memory": self.memory}
        obs = under(batch, "obs")
        old, _ = self.policy.evaluate_sequence(obs, batch["action"], carry, first)
        value, memory = self.value(obs, self.memory, first)
        following = self.value.after(under(batch, "next_obs"), memory)
        last = batch["valid"].sum(0).sub(1).clamp(min=0)
        ahead = memory[last, torch.arange(envs, device=last.device)]
        self.memory = torch.where(batch["valid"].any(0)[:, None], ahead, self.memory)
        return old, value, following, kept

    def _learn(self, table: Tensors, size: int) -> dict[str, Tensor]:
        """Epochs of shuffled minibatches of exactly `size`; returns mean metrics."""
        count = distributed.all_min(len(table["old"]))  # the same for all processes
        if not count:
            return {}
        seen: list[Tensors] = []  # of each epoch: metrics [minibatches]
        device = table["old"].device
        epoch = self._epochs(table)
        for _ in range(self.config.epochs):
            seen.append(epoch(shuffled(count, size, device), size))
            if self.config.stop_kl:
                kl = seen[-1]["kl"].mean()
                distributed.average([kl])
                if kl > self.config.stop_kl:
                    break
        return {key: torch.cat([metrics[key] for metrics in seen]).mean() for key in seen[0]}

    def _epochs(self, table: Tensors) -> Callable[[Tensor, int], Tensors]:
        """A function that trains on the minibatches of one epoch, of an order and a size."""
        return partial(self._epoch, table)

    def _epoch(self, table: Tensors, order: Tensor, size: int) -> Tensors:
        """The steps of one epoch; returns the metrics of each minibatch, [count]."""
        in_order = take(table, order)
        places = range(0, len(order) - size + 1, size)
        seen = [self._step(each(in_order, partial(piece, at, size))) for at in places]
        return {key: torch.stack([metrics[key] for metrics in seen]) for key in seen[0]}

    def _step(self, minibatch: Tensors) -> dict[str, Tensor]:
        loss, metrics = self._loss(minibatch)
        loss.backward()
        weights = [p for adam in self.optims.values() for p in adam.param_groups[0]["params"]]
        if self.config.grad_clip:
            distributed.average_gradients(weights)
            metrics["grad_norm"] = clip_norm([p.grad for p in weights], self.config.grad_clip)
        if self.config.schedule == "adaptive":
            distributed.average([metrics["kl"]])
            self.lr.adapt(metrics["kl"], self.config.target_kl)
            self.lr.write(self.optims.values())
        for adam in self.optims.values():
            adam.step()
        return metrics

    def _loss(self, minibatch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a minibatch, and the metrics."""
        config = self.config
        advantage = minibatch["advantage"]
        log_prob, entropy, value = self._evaluate_minibatch(minibatch)
        weight = torch.full_like(advantage, 1 / advantage.numel())
        if "valid" in minibatch:
            weight = minibatch["valid"] / minibatch["valid"].sum().clamp(min=1)
        if config.advantage == "minibatch":
            advantage = normalized(advantage, weight)
        policy_loss, log_ratio = clip_loss(log_prob, minibatch["old"], advantage, config.clip)
        error = value_loss(value, minibatch["target"])
        ratio = log_ratio.detach().exp()
        parts = {
            "policy_loss": policy_loss,
            "value_loss": error,
            "entropy": entropy,
            "kl": ratio - 1 - log_ratio.detach(),  # Schulman's third estimator
            "clipped": ((ratio - 1).abs() > config.clip).float(),
        }
        means = {name: (part * weight).sum() for name, part in parts.items()}
        return self._total(means), {name: value.detach() for name, value in means.items()}

    def _total(self, parts: dict[str, Tensor]) -> Tensor:
        """The weighted sum of the losses."""
        config = self.config
        loss = parts["policy_loss"] + config.value_weight * parts["value_loss"]
        return loss - config.entropy * parts["entropy"] if config.entropy else loss

    def _evaluate_minibatch(self, minibatch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values of stored decisions."""
        return *self._evaluate_actions(minibatch), self._values(minibatch)

    def _evaluate_actions(self, minibatch: Tensors) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of stored actions, [N] or [B, T] if recurrent."""
        obs = under(minibatch, "obs")
        if not self.recurrent:
            return self.policy.evaluate_actions(obs, minibatch["action"])
        obs = each(obs, lambda leaf: leaf.transpose(0, 1))
        action = minibatch["action"].transpose(0, 1)
        first = minibatch["first"].mT
        carry = under(minibatch, "carry")
        log_prob, entropy = self.policy.evaluate_sequence(obs, action, carry, first)
        return log_prob.mT, entropy.mT

    def _values(self, minibatch: Tensors) -> Tensor:
        obs = under(minibatch, "obs")
        if not self.recurrent:
            return self.value(obs)
        obs = each(obs, lambda leaf: leaf.transpose(0, 1))
        return self.value(obs, minibatch["memory"], minibatch["first"].mT)[0].mT

    def state_values(self, obs: Tensors) -> Tensor:
        """V [N] of observations [N, ...] at the start of episodes."""
        if isinstance(self.value, Value):
            return self.value(obs)
        leaf = next(iter(obs.values()))
        first = torch.ones(1, len(leaf), dtype=torch.bool, device=leaf.device)
        begun = self.value.memory.initial(len(leaf))
        return self.value(each(obs, lambda leaf: leaf[None]), begun, first)[0][0]

    def _observe(self, batch: Tensors) -> None:
        """Update the running statistics of observations from a batch."""
        if self.config.normalize:
            obs = each(under(batch, "obs"), lambda leaf: leaf.flatten(0, 1))
            valid = batch["valid"].flatten()
            self.actor_stats.follow(self.policy.encoder, obs, valid)
            self.critic_stats.follow(self.value.encoder, obs, valid)

    def _set_rates(self) -> None:
        """The learning rates of this update."""
        self.lr.schedule(self.done / self.total if self.total else 0.0)
        self.lr.write(self.optims.values())

    def fit(self, transitions: Tensors) -> None:
        self.policy.fit(transitions)
        self.value.encoder.fit(transitions)

    def get_state(self) -> dict[str, Any]:
        own = {"done": self.done, "memory": self.memory, "returns": self.returns.running}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.done = state["done"]
        self.memory = state["memory"]
        self.returns.running = state["returns"]


class SharedValue(nn.Module):
    """V [...] of a policy's hidden states [..., width]. `memory` makes them, and has a `width` and
    an `encoder`, which is not a part of this module."""

    def __init__(self, config: ValueConfig, memory: Any) -> None:
        super().__init__()
        self.net = mlp(memory.width, config.hidden, 1, config.activation, config.layer_norm)
        orthogonal(self.net, config.head)
        self._encoders = (memory.encoder,)

    @property
    def encoder(self) -> Encoder:
        return self._encoders[0]

    def forward(self, memory: Tensor) -> Tensor:
        return self.net(memory).squeeze(-1)


class PpoShared(Ppo):
    """PPO for recurrent policies whose critic shares the policy's GRU: one network for both.

    The critic is an MLP on the policy's hidden state, V(h), as in studies of partially observed
    mazes (Jiang et al., 2021); that of `Ppo` has a GRU of its own, which costs as much again. The
    GRU is trained by both losses, so `value_weight` matters; the critic has no observations that
    the policy has not.
    """

    usual_policy = "recurrent"

    def _critic(self, spec: Spec) -> SharedValue:
        if not hasattr(self.policy, "evaluate_memory"):
            raise ConfigError("learner=ppo_shared needs a recurrent policy: policy=recurrent")
        if self.config.value.obs is not None:
            raise ConfigError("value.obs has no effect with learner=ppo_shared: leave it out")
        return SharedValue(self.config.value, self.policy.memory)

    def _evaluate_recurrent(self, batch: Tensors, carry: Tensors) -> Before:
        h = self.policy.memory.along(under(batch, "obs"), carry["h"], batch["first"])
        flat = each(under(batch, "next_obs"), lambda leaf: leaf.flatten(0, 1))
        after = self.policy.memory(flat, h.flatten(0, 1)).view_as(h)
        old, _ = self.policy.evaluate_memory(h, under(batch, "obs"), batch["action"])
        return old, self.value(h), self.value(after), nest(carry, "carry")

    def _evaluate_minibatch(self, minibatch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        obs = each(under(minibatch, "obs"), lambda leaf: leaf.transpose(0, 1))
        h = self.policy.memory.along(obs, minibatch["carry/h"], minibatch["first"].mT)
        action = minibatch["action"].transpose(0, 1)
        log_prob, entropy = self.policy.evaluate_memory(h, obs, action)
        return log_prob.mT, entropy.mT, self.value(h).mT

    def state_values(self, obs: Tensors) -> Tensor:
        begun = self.policy.memory.initial(len(next(iter(obs.values()))))
        return self.value(self.policy.memory(obs, begun)[None])[0]


def shuffled(count: int, size: int, device: torch.device) -> Tensor:
    """The numbers below `count` in random order; some twice, if they are fewer than `size`."""
    order = torch.randperm(count, device=device)
    if count < size:  # keep the shape of a minibatch
        order = torch.cat([order, torch.randint(count, (size - count,), device=device)])
    return order


def piece(at: int, size: int, leaf: Tensor) -> Tensor:
    return leaf[at : at + size]
