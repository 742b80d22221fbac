"""BlockGaussian: tanh-squashed Gaussian policy with normalised residual blocks and held noise.

Held noise: one noise sample e is used for k decisions, P(k) proportional to k^-2 for k = 1 ..
`hold` (truncated zeta distribution, as in FlashSAC, Kim et al., 2026; for action repetition, Dabney
et al., 2021). e is held, not the action tanh(mean(o) + std(o) e), which still depends on o.

The blocks have batch normalisation and unit-norm weights:

    h <- W_in norm(x);   h <- h + relu(norm(W_2 relu(norm(W_1 h)))), `depth` times;
    out = W_out rms(h) + b

W_1 widens by the factor `expansion` and W_2 narrows back (inverted bottleneck); norm is batch
normalisation before every ReLU; rms divides each sample by its root mean square. `project` rescales
every column of a weight to norm 1, and every scale (with its shift) to the norm of a vector of
ones. Components from SimBa (Lee et al., 2024), CrossQ (Bhatt et al., 2024) and FlashSAC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Few, Number, Units
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import Feedforward
from embodied.policies.encoded import EncodedConfig, EncodedPolicy, require_continuous
from embodied.policies.gaussian import Gaussian


class Blocks(nn.Module):
    """`n` networks as batched matrix products: [N, size] or [n, N, size] to [n, N, out].

    With `fresh`, normalisation uses the statistics of the batch, and updates the running statistics
    with `momentum`; otherwise it uses the running statistics, so samples are independent.
    """

    def __init__(
        self,
        n: int,
        size: int,
        width: int,
        depth: int,
        out: int,
        expansion: int = 4,
        momentum: float = 0.01,
    ) -> None:
        super().__init__()
        self.n = n
        self.depth = depth
        wide = expansion * width
        norms = [BatchNorm(n, size, momentum)]
        self.weights = nn.ParameterList([_directions(n, size, width)])
        for _ in range(depth):
            self.weights.extend([_directions(n, width, wide), _directions(n, wide, width)])
            norms += [BatchNorm(n, wide, momentum), BatchNorm(n, width, momentum)]
        self.norms = cast(Sequence[BatchNorm], nn.ModuleList(norms))
        self.scale = nn.Parameter(torch.ones(n, 1, width))
        self.head = nn.Parameter(_directions(n, width, out))
        self.bias = nn.Parameter(torch.zeros(n, 1, out))

    def forward(self, x: Tensor, fresh: bool = False) -> Tensor:
        if x.ndim == 2:
            x = x.expand(self.n, *x.shape)
        h = self.norms[0](x, fresh).bmm(self.weights[0])
        for i in range(1, 2 * self.depth, 2):
            inner = torch.relu(self.norms[i](h.bmm(self.weights[i]), fresh))
            h = h + torch.relu(self.norms[i + 1](inner.bmm(self.weights[i + 1]), fresh))
        rms = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return torch.baddbmm(self.bias, h * rms * self.scale, self.head)

    @torch.no_grad()
    def project(self) -> None:
        """Rescale every weight to its initial norm; call after each optimiser step."""
        directions: list[Tensor] = [*self.weights, self.head]
        lengths = [torch.linalg.vector_norm(w, dim=1, keepdim=True) for w in directions]
        torch._foreach_clamp_min_(lengths, 1e-8)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_div_(directions, lengths)  # pyright: ignore[reportPrivateImportUsage]
        self.scale.div_(self.scale.square().mean(-1, keepdim=True).sqrt())
        for norm in self.norms:
            norm.project()


class BatchNorm(nn.Module):
    """Batch normalisation over the N samples of [n, N, size], with scale and shift."""

    mean: Tensor
    var: Tensor

    def __init__(self, n: int, size: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.scale = nn.Parameter(torch.ones(n, 1, size))
        self.shift = nn.Parameter(torch.zeros(n, 1, size))
        self.register_buffer("mean", torch.zeros(n, 1, size))
        self.register_buffer("var", torch.ones(n, 1, size))

    def forward(self, x: Tensor, fresh: bool) -> Tensor:
        n, rows, size = x.shape
        # As one wide layer: torch's batch-norm kernel is three times as fast as var_mean.
        wide = functional.batch_norm(
            x.transpose(0, 1).reshape(rows, n * size),
            self.mean.view(-1),
            self.var.view(-1),
            self.scale.view(-1),
            self.shift.view(-1),
            fresh,
            self.momentum,
        )
        return wide.view(rows, n, size).transpose(0, 1)

    @torch.no_grad()
    def project(self) -> None:
        """Rescale (scale, shift) jointly to the norm of a scale of ones."""
        length = (self.scale.square() + self.shift.square()).mean(-1, keepdim=True).sqrt()
        self.scale.div_(length)
        self.shift.div_(length)


def _directions(n: int, size: int, out: int) -> Tensor:
    """Weights [n, size, out] with unit-norm columns, orthogonal where out <= size."""
    weights = torch.empty(n, size, out)
    for weight in weights:
        nn.init.orthogonal_(weight)
    return functional.normalize(weights, dim=1)


@dataclass(frozen=True)
class Config(EncodedConfig):
    """Settings of the policy; FlashSAC uses `log_std` -10 and 2, which gives less initial noise."""

    width: Units = 128  # units of a residual block
    depth: Few = 2  # residual blocks
    expansion: Count = 4  # a block widens by this factor
    hold: Count = 16  # most decisions with the same noise sample (1: new for each decision)
    log_std: tuple[Number, Number] = (-5.0, 2.0)  # soft bounds of log std
    imitate: Literal["mse", "nll"] = "mse"  # imitation loss; nll also trains the std


class BlockGaussian(Gaussian):
    """Tanh-squashed Gaussian policy on residual blocks. Noise [n, chunk * A + 1] is standard normal
    to explore and zero for the mean action; its last column determines how many decisions the
    sample is held for. Batch normalisation uses batch statistics in training mode while gradients
    are recorded, otherwise the running statistics.

    Held noise is stored in the carry under `explore/`; without a carry every decision uses its own.
    """

    net: Blocks  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Config, spec: Spec) -> None:
        require_continuous(spec)
        EncodedPolicy.__init__(self, config, spec)
        self.net = Blocks(
            1, self.encoder.size, config.width, config.depth, 2 * self.size, config.expansion
        )
        chances = torch.arange(1, config.hold + 1).double().pow(-2)
        self.longer = (chances.cumsum(0) / chances.sum()).tolist()[:-1]  # P(k <= 1), P(k <= 2), ..

    def forward(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and log std, [n, size] each, before squashing."""
        learning = self.training and torch.is_grad_enabled()
        answer = self.net(self.encoder(obs), learning).squeeze(0)
        mean, raw = answer.chunk(2, 1)
        low, high = self.config.log_std
        return mean, low + (high - low) / 2 * (torch.tanh(raw) + 1)

    def initial(self, n: int) -> Tensors:
        if self.config.hold == 1:
            return {}
        device = self.encoder.norm.mean.device
        return {
            "explore/noise": torch.zeros(n, self.size, device=device),
            "explore/left": torch.zeros(n, device=device),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.normal_noise(n, self.size + 1, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        if "explore/noise" in carry:  # a new one where the held noise has expired
            left = carry["explore/left"]
            over = left < 1
            kept = torch.where(over[:, None], noise[:, : self.size], carry["explore/noise"])
            left = torch.where(over, self.lasts(noise[:, self.size]), left) - 1
            carry = {**carry, "explore/noise": kept, "explore/left": left}
        mean, log_std = self(obs)
        used = carry.get("explore/noise", noise[:, : self.size])
        return self.in_steps(self.squash(mean + log_std.exp() * used)), carry

    def lasts(self, e: Tensor) -> Tensor:
        """Number of decisions [n] for which noise is held, from standard normal numbers [n]."""
        chance = torch.special.ndtr(e)
        decisions = torch.ones_like(chance)
        for bound in self.longer:
            decisions = decisions + (chance > bound)
        return decisions

    def sample(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, Tensor]:
        return super().sample(obs, noise[:, : self.size])

    def project(self) -> None:
        """Normalise the weights again; called after each optimiser step."""
        self.net.project()

    def feedforward(self) -> Feedforward:
        raise ConfigError("a network with residual blocks is not a sequence of plain layers")
