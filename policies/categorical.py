"""Categorical: policy for actions with choices, sampled from logits with Gumbel noise.

a = argmax_k (logit_k(o) + g_k), g_k = -log(-log u): a is a sample of softmax(logits) (Gumbel, 1954;
Maddison et al., 2014); without noise it is the most likely action. Several choices (MultiDiscrete,
MultiBinary, Tuple, Dict) are independent given the observation, and so are numbers beside them,
which are Gaussian as in diagonal_gaussian: log p(a|o) is the sum over all elements.

The logits of classes that the observation `action_mask` forbids are set to a large negative number,
so that their probability is 0 and no gradient flows through them (Huang and Ontanon, 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import NonNegative, Number
from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import per_row
from embodied.policies.diagonal_gaussian import LOG_2PI, normal_kl
from embodied.policies.encoded import DensityPolicy, MlpConfig

FORBIDDEN = -1e9  # finite: a mask that allows nothing, at the end of an episode, gives no NaN


@dataclass(frozen=True)
class Config(MlpConfig):
    """Settings of the policy; the actions of a chunk are independent given the observation."""

    head: NonNegative | None = None  # gain of the last layer (0: all equally likely; null: torch's)
    sampled: bool = False  # sample in evaluation too, where the most likely action could loop
    log_std: Number = 0.0  # initial log std of numbers beside choices, of half the action range


class Categorical(DensityPolicy):
    """Categorical policy of m choices of at most K classes, and c numbers beside them.

    Noise [n, chunk, m K + c]: standard Gumbel to explore (`sampled`: always), zero for the most
    likely action; then standard normal to explore, zero for the mean.
    """

    def __init__(self, config: Config, spec: Spec) -> None:
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
