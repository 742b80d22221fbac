"""PPO: proximal policy optimisation (Schulman et al., 2017), for any policy with a density.

    L = E[ -min(rho A, clip(rho, 1 - eps, 1 + eps) A) ] + c_v E[ (V(s) - R)^2 ] / 2 - c_h E[ H(pi) ]

rho = pi(a|s) / pi_old(a|s); A and R = A + V_old by generalised advantage estimation (advantage.py),
bootstrapped from the true successor at a time limit. Several epochs of shuffled minibatches are
made of each batch. A policy with memory is evaluated along whole rows of time again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, nest, take, under
from embodied.learners.critics import RecurrentValue, Value, ValueConfig
from embodied.learners.gradient_learner import GradientLearner
from embodied.learners.on_policy.gae import clip_loss, gae, normalized, value_loss, variance
from embodied.learners.on_policy.running_stats import ObservationStats, RewardScaler
from embodied.nn.optim import Adam
from policies.networks.encoders import Encoder

PIECE = 8192  # decisions that are evaluated at once before learning
EPS = 1e-5  # of Adam: gradients that are next to nothing should move next to nothing
Before = tuple[Tensor, Tensor, Tensor, Tensors]


@runtime_checkable
class StochasticPolicy(Protocol):
    """A policy that can say how likely its actions were; `encoder` holds its normaliser."""

    encoder: Encoder

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class RecurrentPolicy(Protocol):
    """A policy with memory that can live through rows of time again."""

    encoder: Encoder
    width: int

    def evaluate_sequence(
        self, obs: Tensors, action: Tensor, carry: Tensors, first: Tensor
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Config:
    """`horizon` decisions of every row make a batch; each of `epochs` takes it in minibatches of
    `batch_size` decisions (with memory, of whole rows of about as many).

    `lam`: of the advantage; `value_clip`: largest move of a value from its old one, 0: any;
    `entropy`: weight of the bonus. `schedule` of the learning rates over the run: "adaptive" keeps
    the divergence of an update near `target_kl` (Rudin et al., 2022). `stop_kl`: no more epochs of
    a batch once the divergence is above it (0: all epochs). `normalize`: observations by running
    statistics, taken up between updates; `scale_rewards` by the deviation of returns, cut off at
    `reward_clip`. `critic_lr` 0: the policy's. `compile` and `cuda_graph` change speed only and are
    for GPUs.
    """

    horizon: int = 2048
    epochs: int = 10
    batch_size: int = 64
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.0
    value_weight: float = 0.5
    entropy: float = 0.0
    lr: float = 3e-4
    critic_lr: float = 0.0
    schedule: Literal["constant", "linear", "cosine", "adaptive"] = "constant"
    target_kl: float = 0.01
    stop_kl: float = 0.0
    grad_clip: float = 0.5
    advantage: Literal["minibatch", "batch", "raw"] = "minibatch"
    normalize: bool = True
    scale_rewards: bool = False
    reward_clip: float = 10.0
    value: ValueConfig = field(default_factory=ValueConfig)
    compile: bool = False
    cuda_graph: bool = False


class Ppo(GradientLearner):
    """`update` makes `epochs` passes over one batch [T, B] of the newest decisions."""

    data = "on_policy"
    rates: Tensor
    pace: Tensor

    def __init__(
        self,
        config: Config,
        policy: Policy,
        spec: Spec,
        total_decisions: int = 0,
        execute: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(policy, StochasticPolicy | RecurrentPolicy):
            raise ConfigError(
                "this learner needs a policy with log-probabilities: policy=diagonal_gaussian or "
                "policy=categorical"
            )
        if config.schedule in ("linear", "cosine") and not total_decisions:
            raise ConfigError(f"schedule={config.schedule} needs to know the length of the run")
        self.config, self.policy = config, policy
        self.horizon, self.batch_size = config.horizon, config.batch_size
        self.gamma = config.gamma
        self.total, self.done = total_decisions, 0
        # The rest of a chunk is not played, and says nothing about what was rewarded.
        self.played = None if execute is None else execute * spec.act.size
        self.remembers = isinstance(policy, RecurrentPolicy)
        self.value = self._critic(spec)
        self.actor_seen, self.critic_seen = (
            ObservationStats(policy.encoder),
            ObservationStats(self.value.encoder),
        )
        self.returns = RewardScaler(config.reward_clip)
        self.estimates = None if config.scale_rewards else {}
        self.memory = torch.empty(0)  # the critic's, [B, width], before the next batch
        rates = (config.lr, config.critic_lr or config.lr)
        self.register_buffer("rates", torch.tensor(rates))  # of actor and critic
        self.register_buffer("pace", torch.tensor(1.0))  # what both are multiplied by
        actor = [p for p in policy.parameters() if p.requires_grad]
        critic = list(self.value.parameters())
        self.optims = {"both": Adam([*actor, *critic], rates[0], eps=EPS)}  # one kernel, one rate
        if rates[0] != rates[1]:
            pairs = (("actor", actor, rates[0]), ("critic", critic, rates[1]))
            self.optims = {name: Adam(group, rate, eps=EPS) for name, group, rate in pairs}
        # The one place where the same code becomes faster code.
        self._loss_fn = self.compiled(self._loss)
        self.step = self.recorded(self._step)

    def _critic(self, spec: Spec) -> Value | RecurrentValue:
        if isinstance(self.policy, RecurrentPolicy):
            return RecurrentValue(self.config.value, spec, self.policy.width)
        return Value(self.config.value, spec)

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        carry = under(batch, "carry")
        batch = {key: value for key, value in batch.items() if not key.startswith("carry/")}
        if self.played is not None and batch["action"].ndim > 2:
            batch["action"] = batch["action"][..., : self.played]
        new = self.done == 0 and not self.actor_seen.given
        if new:  # a new policy hardly looks at what it sees: its densities stay what they were
            self._observe(batch)
        self._set_rates()
        table, metrics = self._table(batch, carry)
        metrics |= self._learn(table, self._size(batch))
        if not new:
            self._observe(batch)
        self.done += batch["valid"].numel()
        return metrics

    def _size(self, batch: Tensors) -> int:
        """Of a minibatch: decisions, or rows; never more than there normally are."""
        steps, rows = batch["valid"].shape
        if self.remembers:
            return min(max(self.batch_size // steps, 1), rows)
        return min(self.batch_size, self.horizon * rows)

    @torch.no_grad()
    def _table(self, batch: Tensors, carry: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
        """What minibatches are drawn from: decisions [N, ...], or with memory rows [B, T, ...]."""
        table = {**nest(under(batch, "obs"), "obs"), "action": batch["action"]}
        before = self._look_back if self.remembers else self._look
        old, value, following, kept = before(batch, carry)
        reward, discount, valid = batch["reward"], batch["discount"], batch["valid"]
        if self.config.scale_rewards:
            reward = self.returns.scale(reward, discount, batch["ended"], valid)
        trace = (batch["ended"], valid, value, following, self.config.lam)
        advantage = gae(reward, discount, *trace)
        if self.estimates is not None:
            self.estimates = {"advantage": advantage, "value": value}
        target = advantage + value
        learn = valid & batch["learn"] if "learn" in batch else valid
        share = learn / learn.sum().clamp(min=1)
        missed, spread = variance(advantage, share), variance(target, share)
        metrics = {"explained": 1 - missed / spread.clamp(min=1e-8)}
        if self.config.advantage == "batch":
            advantage = normalized(advantage, share)
        table |= {"old": old, "value": value, "target": target, "advantage": advantage}
        if self.remembers:
            table |= {"first": batch["first"], "valid": learn}
            lives = each(table, lambda leaf: leaf.transpose(0, 1)) | kept
            if "learn" in batch:  # rows with nothing to learn from make no minibatches
                lives = take(lives, learn.any(0).nonzero().flatten())
            return lives, metrics
        flat = each(table, lambda leaf: leaf.flatten(0, 1))
        if not bool(learn.all()):
            flat = take(flat, learn.flatten().nonzero().flatten())
        return flat, metrics

    def _look(self, batch: Tensors, carry: Tensors) -> Before:
        """Densities, values and values of the successors under the parameters that acted."""
        flat = each(batch, lambda leaf: leaf.flatten(0, 1))
        parts: list[tuple[Tensor, ...]] = []
        for at in range(0, len(flat["reward"]), PIECE):
            rows = each(flat, partial(piece, at, PIECE))
            following = self.value(under(rows, "next_obs"))
            parts.append((self._evaluate_actions(rows)[0], self._values(rows), following))
        shape = batch["reward"].shape
        old, value, after = (torch.cat(part).view(shape) for part in zip(*parts, strict=True))
        return old, value, after, {}

    def _look_back(self, batch: Tensors, carry: Tensors) -> Before:
        """The same for policies with memory, and the memories to begin minibatches with."""
        first, rows = batch["first"], batch["first"].shape[1]
        critic = cast(RecurrentValue, self.value)
        if len(self.memory) != rows:
            self.memory = critic.memory.initial(rows)
        kept = {**nest(carry, "carry"), "memory": self.memory}
        policy = cast(RecurrentPolicy, self.policy)
        old, _ = policy.evaluate_sequence(under(batch, "obs"), batch["action"], carry, first)
        value, memory = critic(under(batch, "obs"), self.memory, first)
        following = critic.after(under(batch, "next_obs"), memory)
        last = batch["valid"].sum(0).sub(1).clamp(min=0)
        ahead = memory[last, torch.arange(rows, device=last.device)]
        self.memory = torch.where(batch["valid"].any(0)[:, None], ahead, self.memory)
        return old, value, following, kept

    def _learn(self, table: Tensors, size: int) -> dict[str, Tensor]:
        """Epochs of shuffled minibatches of exactly `size`; means over them."""
        count = distributed.all_min(len(table["old"]))  # processes make the same steps
        if not count:
            return {}
        seen: list[Tensors] = []
        device = table["old"].device
        for _ in range(self.config.epochs):
            order = torch.randperm(count, device=device)
            if count < size:  # shapes stay what they are
                order = torch.cat([order, torch.randint(count, (size - count,), device=device)])
            shuffled = take(table, order)
            begun = len(seen)
            places = range(0, len(order) - size + 1, size)
            seen += [self.step(each(shuffled, partial(piece, at, size))) for at in places]
            if self.config.stop_kl:
                kl = mean(seen[begun:], "kl")
                distributed.average([kl])
                if kl > self.config.stop_kl:
                    break
        return {key: mean(seen, key) for key in seen[0]}

    def _step(self, rows: Tensors) -> dict[str, Tensor]:
        loss, metrics = self._loss_fn(rows)
        loss.backward()
        weights = [p for adam in self.optims.values() for p in adam.param_groups[0]["params"]]
        if self.config.grad_clip:
            distributed.average_gradients(weights)
            metrics["grad_norm"] = clip_norm([p.grad for p in weights], self.config.grad_clip)
        if self.config.schedule == "adaptive":
            distributed.average([metrics["kl"]])
            self._adapt(metrics["kl"])
        for adam in self.optims.values():
            adam.step()
        return metrics

    def _loss(self, rows: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a minibatch, and the metrics."""
        config, advantage = self.config, rows["advantage"]
        log_prob, entropy = self._evaluate_actions(rows)
        value = self._values(rows)
        weight = torch.full_like(advantage, 1 / advantage.numel())
        if "valid" in rows:
            weight = rows["valid"] / rows["valid"].sum().clamp(min=1)
        if config.advantage == "minibatch":
            advantage = normalized(advantage, weight)
        policy_loss, log_ratio = clip_loss(log_prob, rows["old"], advantage, config.clip)
        error = value_loss(value, rows["value"], rows["target"], config.value_clip)
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

    def _evaluate_actions(self, rows: Tensors) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a table's rows, [N] or with memory [B, T]."""
        obs = under(rows, "obs")
        if not self.remembers:
            return cast(StochasticPolicy, self.policy).evaluate_actions(obs, rows["action"])
        obs = each(obs, lambda leaf: leaf.transpose(0, 1))
        action, first = rows["action"].transpose(0, 1), rows["first"].mT
        policy = cast(RecurrentPolicy, self.policy)
        log_prob, entropy = policy.evaluate_sequence(obs, action, under(rows, "carry"), first)
        return log_prob.mT, entropy.mT

    def _values(self, rows: Tensors) -> Tensor:
        obs = under(rows, "obs")
        if not self.remembers:
            return self.value(obs)
        obs = each(obs, lambda leaf: leaf.transpose(0, 1))
        return self.value(obs, rows["memory"], rows["first"].mT)[0].mT

    def state_values(self, obs: Tensors) -> Tensor:
        """V [N] of observations [N, ...] with which episodes begin."""
        if isinstance(self.value, Value):
            return self.value(obs)
        leaf = next(iter(obs.values()))
        first = torch.ones(1, len(leaf), dtype=torch.bool, device=leaf.device)
        begun = self.value.memory.initial(len(leaf))
        return self.value(each(obs, lambda leaf: leaf[None]), begun, first)[0][0]

    def _observe(self, batch: Tensors) -> None:
        """Let the normalisers take up a batch."""
        if self.config.normalize:
            obs = each(under(batch, "obs"), lambda leaf: leaf.flatten(0, 1))
            valid = batch["valid"].flatten()
            self.actor_seen.follow(cast(StochasticPolicy, self.policy).encoder, obs, valid)
            self.critic_seen.follow(self.value.encoder, obs, valid)

    def _set_rates(self) -> None:
        """Learning rates of this update, as tensors that a step may change on the device."""
        left = 1 - min(self.done / self.total, 1.0) if self.total else 1.0
        if self.config.schedule == "linear":
            self.pace.fill_(left)
        elif self.config.schedule == "cosine":
            self.pace.fill_(0.5 - 0.5 * math.cos(math.pi * left))
        self._pace()

    def _adapt(self, kl: Tensor) -> None:
        """Half as fast again where the policy hardly moved, slower where it moved too far."""
        target, pace = self.config.target_kl, self.pace
        slower = torch.where(kl > 2 * target, pace / 1.5, pace)
        pace.copy_(torch.where(kl < target / 2, pace * 1.5, slower))
        pace.copy_((pace * self.rates[0]).clamp(1e-5, 1e-2) / self.rates[0])
        self._pace()

    def _pace(self) -> None:
        for adam, rate in zip(self.optims.values(), self.rates, strict=False):
            group = adam.param_groups[0]
            if not isinstance(group["lr"], Tensor) or group["lr"].device != rate.device:
                group["lr"] = torch.empty_like(rate)
            torch.mul(self.pace, rate, out=group["lr"])

    def fit(self, rows: Tensors) -> None:
        self.policy.fit(rows)
        self.value.encoder.fit(rows)

    def get_state(self) -> dict[str, Any]:
        own = {"done": self.done, "memory": self.memory, "returns": self.returns.running}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.done, self.memory = state["done"], state["memory"]
        self.returns.running = state["returns"]


def clip_norm(grads: list[Tensor], most: float) -> Tensor:
    """The norm of all gradients together, which is then at most `most`; waits for nothing."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def piece(at: int, size: int, leaf: Tensor) -> Tensor:
    return leaf[at : at + size]


def mean(seen: list[Tensors], key: str) -> Tensor:
    return torch.stack([metrics[key] for metrics in seen]).mean()
