"""Residual blocks with batch normalisation and unit-norm weights (SimBa, CrossQ, FlashSAC).

    h <- W_in norm(x);   h <- h + relu(norm(W_2 relu(norm(W_1 h)))), `depth` times;
    out = W_out rms(h) + b

W_1 widens by the factor `expansion` and W_2 narrows back (inverted bottleneck); norm is batch
normalisation before every ReLU; rms divides each sample by its root mean square. `project` rescales
every column of a weight to norm 1, and every scale (with its shift) to the norm of a vector of
ones. Components from SimBa (Lee et al., 2024), CrossQ (Bhatt et al., 2024) and FlashSAC (Kim et
al., 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


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
