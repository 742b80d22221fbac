"""DiagonalGaussian: Gaussian policy with a state-independent standard deviation.

The policy of PPO (Schulman et al., 2017): u ~ N(mean(o), diag(exp(2 log_std))); the environment
gets clip(u, -1, 1). The density and the learner's stored action are those of u, before clipping.
Orthogonal weights with a small last layer give a mean near 0 (Andrychowicz et al., 2021).

Gaussian: tanh-squashed diagonal Gaussian policy (SAC; Haarnoja et al., 2018).

a = tanh(u), u ~ N(mean(o), std(o)^2);  log p(a) = log N(u) - sum log(1 - tanh(u)^2).

Deterministic: deterministic policy with additive exploration noise (TD3; Fujimoto, 2018).

a = clip(mu(o) + std e, -1, 1),  mu = tanh(net(o)),  e ~ N(0, 1) to explore and 0 to act.

With `std_range` the std is sampled per episode, uniform in that range, so that parallel
environments explore with different amounts of noise (FastTD3, Seo et al., 2025).

DiagonalBeta: a Beta distribution over each bounded action element (Chou et al., 2017).

    a = 2 x - 1,  x ~ Beta(alpha, beta),  alpha, beta = 1 + softplus(net(o)) > 1
    log p(a) = (alpha - 1) log x + (beta - 1) log(1 - x) - log B(alpha, beta) - log 2

Unlike a clipped Gaussian it has no mass outside the bounds. In evaluation the action is the mean
alpha / (alpha + beta), not the mode, as in CaRL (Jaeger et al., 2025).

x = g / (g + h) with Gamma variables g, h that are computed from normal and uniform noise by
rejection (Marsaglia and Tsang, 2000). The noise holds `TRIES` proposals of each; one is accepted
with a probability above 95%, so that none is once in 10^8 variables, and the last one is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, NonNegative, Number
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import Feedforward, per_row
from embodied.policies.encoded import DensityPolicy, MlpConfig, MlpPolicy, require_continuous

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class DiagonalGaussianConfig(MlpConfig):
    """Settings of a Gaussian policy whose std does not depend on the observation."""

    hidden: tuple[Count, ...] = (64, 64)  # units of each hidden layer
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "tanh"  # of the hidden layers
    log_std: Number = 0.0  # initial log std of all elements, of half the action range
    learn_std: bool = True  # train the std
    head: NonNegative = 0.01  # gain of the last layer
    zero_head: bool = False  # the initial mean is exactly 0


class DiagonalGaussian(DensityPolicy):
    """Noise [n, chunk * A] is standard normal to explore, zero for the mean action."""

    def __init__(self, config: DiagonalGaussianConfig, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec, config.chunk * spec.act.size)
        self.begin_orthogonal(0.0 if config.zero_head else config.head)
        start = torch.full((self.size,), config.log_std)
        self.log_std = nn.Parameter(start, requires_grad=config.learn_std)

    def forward(self, obs: Tensors) -> Tensor:
        """Mean [n, size], not clipped."""
        return self.net(self.encoder(obs))

    def initial(self, n: int) -> Tensors:
        return {"row/action": torch.zeros(n, self.size, device=self.log_std.device)}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        u = torch.addcmul(self(obs), self.log_std.exp(), noise)
        return self.in_steps(self.spec.act.bounded(u)), {**carry, "row/action": u}

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        """As in DensityPolicy, of unclipped actions."""
        mean, log_std = self(obs), self.log_std
        if (played := action.shape[1]) < self.size:
            mean, log_std = mean[:, :played], log_std[:played]
        z = (action - mean) * torch.exp(-log_std)
        total = log_std.sum() + 0.5 * LOG_2PI * action.shape[1]
        entropy = total + 0.5 * action.shape[1]
        return -0.5 * z.square().sum(1) - total, entropy.expand(len(action))

    def kl(self, obs: Tensors, other: DiagonalGaussian) -> Tensor:
        """KL(self || other) of whole chunks at each observation, [n], in nats."""
        return normal_kl(self(obs), self.log_std, other(obs), other.log_std).sum(1)

    def entropy(self, obs: Tensors) -> Tensor:
        """Entropy [n] in nats, the same for every observation."""
        n = next(iter(obs.values())).shape[0]
        return (self.log_std.sum() + 0.5 * self.size * (LOG_2PI + 1)).expand(n)


def normal_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(other mean, other std^2)), elementwise, in nats."""
    log_ratio = log_std - other_log_std
    z = (mean - other_mean) * torch.exp(-other_log_std)
    return 0.5 * ((2 * log_ratio).exp() + z.square() - 1) - log_ratio


@dataclass(frozen=True)
class GaussianConfig(MlpConfig):
    """Settings of a squashed Gaussian policy."""

    log_std: tuple[Number, Number] = (-5.0, 2.0)  # bounds of log std
    soft: bool = True  # soft bounds, std starts in their middle (false: clamped, std starts at 1)
    zero_head: bool = False  # the initial mean is exactly 0
    imitate: Literal["mse", "nll"] = "mse"  # imitation loss; nll also trains the std


class Gaussian(MlpPolicy):
    """Noise [n, chunk * A] is standard normal to explore, zero for the mean action."""

    def __init__(self, config: GaussianConfig, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec, 2 * config.chunk * spec.act.size)
        if config.zero_head:
            head = self.net[-1]
            assert isinstance(head, torch.nn.Linear)
            torch.nn.init.zeros_(head.weight)
            torch.nn.init.zeros_(head.bias)

    def forward(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and log std, [n, size] each, before squashing."""
        mean, raw = self.net(self.encoder(obs)).chunk(2, 1)
        low, high = self.config.log_std
        if not self.config.soft:
            return mean, raw.clamp(low, high)
        return mean, low + (high - low) / 2 * (torch.tanh(raw) + 1)

    def squash(self, u: Tensor) -> Tensor:
        """tanh(u); `u` itself where a wrapper normalises actions, some of which are beyond 1."""
        return torch.tanh(u) if self.squashes else u

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        mean, log_std = self(obs)
        return self.in_steps(self.squash(mean + log_std.exp() * noise)), carry

    def feedforward(self) -> Feedforward:
        """The mean action as plain layers; ConfigError if an observation is no vector."""
        require_squashed(self.spec.act)
        *body, head = self.layers()
        assert isinstance(head, torch.nn.Linear)
        mean = torch.nn.Linear(head.in_features, self.size, device="meta")
        mean.weight = torch.nn.Parameter(head.weight[: self.size])
        mean.bias = torch.nn.Parameter(head.bias[: self.size])
        net = torch.nn.Sequential(*body, mean)
        return Feedforward(self.encoder.only_vectors(), self.encoder.norm, net)

    def sample(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Action [n, size] and its log-probability [n], both differentiable."""
        mean, log_std = self(obs)
        u = mean + log_std.exp() * noise
        return self.squash(u), self._density(u, noise, log_std).sum(1)

    def kl(self, obs: Tensors, other: Gaussian) -> Tensor:
        """KL(self || other) of whole chunks, [n], in nats; squashing both does not change it."""
        return normal_kl(*self(obs), *other(obs)).sum(1)

    def log_prob(self, obs: Tensors, action: Tensor) -> Tensor:
        """Log-probability [n] of actions [n, size], clipped to [-1 + 1e-5, 1 - 1e-5]."""
        mean, log_std = self(obs)
        return self._log_prob(mean, log_std, action).sum(1)

    def _log_prob(self, mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
        if self.squashes:
            action = torch.atanh(action.clamp(-1 + 1e-5, 1 - 1e-5))
        return self._density(action, (action - mean) * torch.exp(-log_std), log_std)

    def _density(self, u: Tensor, z: Tensor, log_std: Tensor) -> Tensor:
        """log p of each action element, of `u` that is z standard deviations from its mean."""
        normal = 0.5 * z.square() + log_std + 0.5 * LOG_2PI
        if not self.squashes:
            return -normal
        # log d tanh(u) / du = log(1 - tanh(u)^2); written so, it does not underflow.
        return -(normal + 2 * (math.log(2) - u - functional.softplus(-2 * u)))

    def loss(self, batch: Tensors) -> Tensor:
        """Imitation loss (`imitate`) per action element, averaged over the valid steps, [n]."""
        mean, log_std = self(under(batch, "obs"))
        action = batch["action"].flatten(1)
        if self.config.imitate == "nll":
            error = -self._log_prob(mean, log_std, action)
        else:
            error = (self.squash(mean) - action).square()
        return per_row(error.view_as(batch["action"]), batch["valid"])

    def warmup_policy(self) -> Policy:
        return self.uniform()


def require_squashed(act: Leaf) -> None:
    """ConfigError for an action that a wrapper normalises: it is not squashed by tanh."""
    if act.is_normalized:
        raise ConfigError("plain layers end in tanh, and normalised actions do not")


@dataclass(frozen=True)
class DeterministicConfig(MlpConfig):
    """Settings of a deterministic policy; std in units of half the action range.

    `warmup`: before training starts, the untrained policy acts with its noise, or uniform noise.
    """

    std: NonNegative = 0.1  # std of the exploration noise
    std_range: tuple[NonNegative, NonNegative] | None = None  # of the std per episode (null: `std`)
    warmup: Literal["self", "uniform"] = "uniform"  # who acts before training starts


class Deterministic(MlpPolicy):
    """Deterministic policy. Noise [n, chunk * A] is standard normal to explore, otherwise zero.

    With `std_range` noise has one more column, from which the std is set in the first decision of
    an episode; the carry keeps it in `explore/std`. Without a carry every decision sets its own.
    """

    def __init__(self, config: DeterministicConfig, spec: Spec) -> None:
        require_continuous(spec)
        super().__init__(config, spec, config.chunk * spec.act.size)

    def forward(self, obs: Tensors) -> Tensor:
        """The action [n, size] without noise; differentiable."""
        raw = self.net(self.encoder(obs))
        return torch.tanh(raw) if self.squashes else raw

    def initial(self, n: int) -> Tensors:
        if self.config.std_range is None:
            return {}
        return {"explore/std": torch.full((n, 1), -1.0, device=self.encoder.norm.mean.device)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.normal_noise(n, self.size + (self.config.std_range is not None), explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        if self.config.std_range is None:
            action = torch.add(self(obs), noise, alpha=self.config.std)
        else:
            low, high = self.config.std_range
            std = low + (high - low) * torch.special.ndtr(noise[:, self.size :])
            if "explore/std" in carry:
                std = torch.where(carry["explore/std"] < 0, std, carry["explore/std"])
                carry = {**carry, "explore/std": std}
            action = torch.addcmul(self(obs), noise[:, : self.size], std)
        return self.in_steps(self.spec.act.bounded(action)), carry

    def feedforward(self) -> Feedforward:
        """The action without noise as plain layers; ConfigError if an observation is no vector."""
        require_squashed(self.spec.act)
        return Feedforward(self.encoder.only_vectors(), self.encoder.norm, self.layers())

    def warmup_policy(self) -> Policy:
        """A policy with uniform actions, or this policy, as `warmup` says."""
        return self if self.config.warmup == "self" else self.uniform()


TRIES = 6
EDGE = 1e-6  # least distance of x to 0 and 1 at which densities are evaluated


@dataclass(frozen=True)
class DiagonalBetaConfig(MlpConfig):
    """Settings of a Beta policy."""

    hidden: tuple[Count, ...] = (64, 64)  # units of each hidden layer
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "tanh"  # of the hidden layers
    head: NonNegative = 0.01  # gain of the last layer; small: near alpha = beta = 1.69, a wide hump


class DiagonalBeta(DensityPolicy):
    """Beta policy. Noise [n, chunk * A, 2, TRIES, 2]: of both Gamma variables the proposals, each a
    normal and a uniform number; zero for the mean action."""

    def __init__(self, config: DiagonalBetaConfig, spec: Spec) -> None:
        require_continuous(spec)
        if spec.act.is_normalized:
            raise ConfigError(
                "this policy's actions have bounds, and normalised ones do not: "
                "policy=diagonal_gaussian"
            )
        super().__init__(config, spec, 2 * config.chunk * spec.act.size)
        self.begin_orthogonal(config.head)

    def forward(self, obs: Tensors) -> Tensor:
        """Return alpha and beta of each action element, [n, size, 2]."""
        raw = self.net(self.encoder(obs))
        return 1 + functional.softplus(raw).unflatten(1, (self.size, 2))

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.size, 2, TRIES, 2, device=self.encoder.norm.mean.device)
        if explore:
            noise[..., 0].normal_()
            noise[..., 1].uniform_().neg_().add_(1)  # in (0, 1]
        return noise

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        both = self(obs)
        drawn = torch.where(noise[..., 0, 1] > 0, gamma(both, noise), both)
        x = drawn[..., 0] / drawn.sum(2)
        return self.in_steps(2 * x - 1), carry

    def evaluate_actions(self, obs: Tensors, action: Tensor) -> tuple[Tensor, Tensor]:
        both = self(obs)[:, : action.shape[1]]
        total = both.sum(2)
        x = ((action + 1) / 2).clamp(EDGE, 1 - EDGE)
        logs = torch.stack([x.log(), (1 - x).log()], 2)
        scale = both.lgamma().sum(2) - total.lgamma() + math.log(2)
        log_prob = ((both - 1) * logs).sum(2) - scale
        mean_logs = both.digamma() - total.digamma()[..., None]
        entropy = scale - ((both - 1) * mean_logs).sum(2)
        return log_prob.sum(1), entropy.sum(1)

    def loss(self, batch: Tensors) -> Tensor:
        """Squared error of the mean per action element, averaged over the valid steps, [n]."""
        both = self(under(batch, "obs"))
        mean = 2 * both[..., 0] / both.sum(2) - 1
        return per_row((mean.view_as(batch["action"]) - batch["action"]).square(), batch["valid"])


def gamma(shape: Tensor, noise: Tensor) -> Tensor:
    """Samples of Gamma(shape, 1), shape >= 1, [...], from proposals `noise` [..., TRIES, 2]."""
    d = (shape - 1 / 3)[..., None]
    normal, uniform = noise.unbind(-1)
    cube = (1 + normal / (9 * d).sqrt()).clamp(min=1e-4) ** 3
    accepted = uniform.log() < 0.5 * normal.square() + d * (1 - cube + cube.log())
    first = torch.where(accepted.any(-1), accepted.int().argmax(-1), TRIES - 1)
    return (d * cube).gather(-1, first[..., None]).squeeze(-1)
