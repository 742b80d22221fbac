"""DiagonalBeta: a Beta distribution over each bounded action element (Chou et al., 2017).

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
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import NonNegative, Units
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import per_row
from embodied.policies.encoded import DensityPolicy, MlpConfig, require_continuous

TRIES = 6
EDGE = 1e-6  # least distance of x to 0 and 1 at which densities are evaluated


@dataclass(frozen=True)
class Config(MlpConfig):
    """Settings of a Beta policy."""

    hidden: tuple[Units, ...] = (64, 64)  # units of each hidden layer
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "tanh"  # of the hidden layers
    head: NonNegative = 0.01  # gain of the last layer; small: near alpha = beta = 1.69, a wide hump


class DiagonalBeta(DensityPolicy):
    """Beta policy. Noise [n, chunk * A, 2, TRIES, 2]: of both Gamma variables the proposals, each a
    normal and a uniform number; zero for the mean action."""

    def __init__(self, config: Config, spec: Spec) -> None:
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
