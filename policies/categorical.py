"""Categorical: policy for actions with choices, sampled from logits with Gumbel noise.

a = argmax_k (logit_k(o) + g_k), g_k = -log(-log u): a is a sample of softmax(logits) (Gumbel, 1954;
Maddison et al., 2014); without noise it is the most likely action. Several choices (MultiDiscrete,
MultiBinary, Tuple, Dict) are independent given the observation, and so are numbers beside them,
which are Gaussian as in diagonal_gaussian: log p(a|o) is the sum over all elements.

The logits of classes that the observation `action_mask` forbids are set to a large negative number,
so that their probability is 0 and no gradient flows through them (Huang and Ontanon, 2022).

StagedCategorical: a Q-network of its own for each step of an episode (SQIRL, 2023).

    a_t = argmax_a Q_t(o_t, a)       in the first `trained` steps
    a_t uniform                      in later steps, to explore
    a_t = argmax_a Q_n(o_t, a)       in later steps without exploration, n the last trained step

`learner=sqirl` trains one network after another, beginning with the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, NonNegative, Number
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import Ensemble, affine, per_row
from embodied.policies.encoded import DensityPolicy, EncodedConfig, EncodedPolicy, MlpConfig
from embodied.policies.gaussian import LOG_2PI, normal_kl

FORBIDDEN = -1e9  # finite: a mask that allows nothing, at the end of an episode, gives no NaN


@dataclass(frozen=True)
class CategoricalConfig(MlpConfig):
    """Settings of the policy; the actions of a chunk are independent given the observation."""

    head: NonNegative | None = None  # gain of the last layer (0: all equally likely; null: torch's)
    sampled: bool = False  # sample in evaluation too, where the most likely action could loop
    log_std: Number = 0.0  # initial log std of numbers beside choices, of half the action range


class Categorical(DensityPolicy):
    """Categorical policy of m choices of at most K classes, and c numbers beside them.

    Noise [n, chunk, m K + c]: standard Gumbel to explore (`sampled`: always), zero for the most
    likely action; then standard normal to explore, zero for the mean.
    """

    def __init__(self, config: CategoricalConfig, spec: Spec) -> None:
        if spec.act.is_continuous or not any(spec.act.choices):
            raise ConfigError("this policy needs discrete actions, not continuous ones")
        choices = Choices(spec, config.chunk)
        self.logits = len(choices.counts) * choices.most
        self.width = self.logits + choices.numbers
        super().__init__(config, spec, config.chunk * self.width)
        self.choices = choices
        start = torch.full((config.chunk, choices.numbers), config.log_std)
        self.log_std = nn.Parameter(start) if choices.numbers else None
        if config.head is not None:
            self.begin_orthogonal(config.head)

    def forward(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n, chunk, m, K] of all classes, and means [n, chunk, c]."""
        logits, mean = self._parts(self.net(self.encoder(obs)).view(-1, self.chunk, self.width))
        if self.choices.limited:
            logits = logits.masked_fill(~self.choices.allowed(obs), FORBIDDEN)
        return functional.log_softmax(logits, 3), mean

    def initial(self, n: int) -> Tensors:
        if self.log_std is None:
            return {}
        return {"row/action": torch.zeros(n, self.size, device=self.log_std.device)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.chunk, self.width, device=self.encoder.norm.mean.device)
        if explore or self.config.sampled:
            noise[..., : self.logits].exponential_().log_().neg_()
        if explore:
            noise[..., self.logits :].normal_()
        return noise

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        logs, mean = self(obs)
        gumbel, normal = self._parts(noise)
        choice = (logs + gumbel).argmax(3)
        if self.log_std is None:
            return self.choices.join(choice, mean), carry
        u = torch.addcmul(mean, self.log_std.exp(), normal)
        stored = self.choices.join(choice, u).flatten(1)  # the density is that of u, not clipped
        return self.choices.join(choice, u.clamp(-1, 1)), {**carry, "row/action": stored}

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        """As in DensityPolicy, of actions [n], [n, k] or [n, k A] (the first k of the chunk), whose
        numbers are not clipped."""
        choice, number = self.choices.split(self._steps(action))
        logs, mean = (part[:, : choice.shape[1]] for part in self(obs))
        log_prob = _chosen(logs, choice).sum((1, 2))
        entropy = -(logs.exp() * logs).sum((1, 2, 3))
        if self.log_std is None:
            return log_prob, entropy
        log_std = self.log_std[: choice.shape[1]]
        z = (number - mean) * torch.exp(-log_std)
        total = log_std.sum() + 0.5 * LOG_2PI * log_std.numel()
        normal = -0.5 * z.square().sum((1, 2)) - total
        return log_prob + normal, entropy + total + 0.5 * log_std.numel()

    def kl(self, obs: Tensors, other: Categorical) -> Tensor:
        """KL(self || other) of whole chunks at each observation, [n], in nats."""
        logs, mean = self(obs)
        other_logs, other_mean = other(obs)
        choices = (logs.exp() * (logs - other_logs)).sum((1, 2, 3))
        if self.log_std is None or other.log_std is None:
            return choices
        return choices + normal_kl(mean, self.log_std, other_mean, other.log_std).sum((1, 2))

    def entropy(self, obs: Tensors) -> Tensor:
        """Entropy [n] in nats, summed over the chunk, differentiable."""
        logs, _ = self(obs)
        entropy = -(logs.exp() * logs).sum((1, 2, 3))
        if self.log_std is None:
            return entropy
        return entropy + (self.log_std + 0.5 * LOG_2PI + 0.5).sum()

    def loss(self, batch: Tensors) -> Tensor:
        """Cross-entropy of the choices plus squared error of the numbers, per element, [n]."""
        logs, mean = self(under(batch, "obs"))
        choice, number = self.choices.split(self._steps(batch["action"]))
        error = -_chosen(logs, choice)
        if self.log_std is not None:
            error = torch.cat([error, (mean - number).square()], 2)
        return per_row(error, batch["valid"])

    def warmup_policy(self) -> Policy:
        return self.uniform()

    def _parts(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of numbers [n, chunk, m K + c], those of classes [n, chunk, m, K] and the others."""
        shape = (-1, self.chunk, len(self.choices.counts), self.choices.most)
        return values[..., : self.logits].reshape(shape), values[..., self.logits :]

    def _steps(self, action: Tensor) -> Tensor:
        """Stored actions as steps [n, k, *shape]."""
        return action.reshape(action.shape[0], -1, *self.spec.act.shape)


def _chosen(logs: Tensor, choice: Tensor) -> Tensor:
    """The entries `choice` [n, k, m] of `logs` [n, k, m, K]."""
    return logs.gather(3, choice[..., None]).squeeze(3)


@dataclass(frozen=True)
class StagedCategoricalConfig(EncodedConfig):
    """Settings of a policy with a network for each step."""

    steps: Count = 50  # networks; the last one is used in later steps too
    hidden: tuple[Count, ...] = (64, 64)  # units of the hidden layers
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "relu"  # of the hidden layers


class StagedCategorical(EncodedPolicy):
    """Noise [n, actions]: standard Gumbel to explore, otherwise zero. The carry has the number
    `step` of the decision in its episode; transitions have it too."""

    trained: Tensor

    def __init__(self, config: StagedCategoricalConfig, spec: Spec) -> None:
        choices = Choices(spec)
        if len(choices.counts) != 1 or choices.numbers:
            raise ConfigError("this policy makes one choice per step: it needs discrete actions")
        if config.chunk > 1:
            raise ConfigError(f"this policy decides in every step: chunk=1, not {config.chunk}")
        super().__init__(config, spec)
        self.choices = choices
        self.actions = choices.most
        sizes = (config.steps, self.encoder.size, config.hidden, self.actions)
        self.net = Ensemble(*sizes, activation=config.activation)
        self.register_buffer("trained", torch.zeros((), dtype=torch.int64))

    def initial(self, n: int) -> Tensors:
        start = torch.zeros(n, dtype=torch.int64, device=self.trained.device)
        return {"step": start, "row/step": start}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.actions, device=self.trained.device)
        return noise.exponential_().log_().neg_() if explore else noise

    def values(self, obs: Tensors, step: Tensor) -> Tensor:
        """Q-values [n, actions] of observations in the steps `step` [n] of their episodes."""
        place = torch.minimum(step, (self.trained - 1).clamp(min=0))
        x = self.encoder(obs).unsqueeze(1)
        last = len(self.net.weights) - 1
        for i in range(last + 1):
            parts = (self.net.weights[i], self.net.biases[i])
            x = affine(x, *(part.index_select(0, place) for part in parts))
            x = self.net.activate(x) if i < last else x
        return x.squeeze(1)

    def allowed(self, obs: Tensors) -> Tensor:
        """Which actions may be chosen, [n or 1, actions] (bool)."""
        return self.choices.allowed(obs).reshape(-1, self.actions)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        step = carry["step"]
        explores = noise.abs().sum(1) > 0
        random = explores & (step >= self.trained)
        score = torch.where(random[:, None], noise, self.values(obs, step))
        choice = score.masked_fill(~self.allowed(obs), FORBIDDEN).argmax(1)
        action = self.choices.join(choice[:, None, None], noise.new_zeros(len(noise), 1, 0))
        return action, {**carry, "step": step + 1, "row/step": step}
