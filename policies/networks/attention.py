"""Transformer layers of denoisers and of ACT (Vaswani et al., 2017).

x + MHA(LN(x)), then with a memory m: x + MHA(LN(x), m), then x + W2 gelu(W1 LN(x)). Pre-layer
normalisation (Xiong et al., 2020) trains without learning-rate warm-up. No dropout: decisions are
deterministic.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from embodied.core.build import ConfigError


class Attention(nn.Module):
    """Multi-head attention of queries [n, L, width] over a memory [n, M, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} must be a multiple of heads={heads}")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor | None = None) -> Tensor:
        """Returns [n, L, width]; `seen` [n, M] (bool): which tokens of the memory are attended
        to."""
        query = self._split(self.query(x))
        key, value = map(self._split, self.key_value(memory).chunk(2, 2))
        mask = None if seen is None else seen[:, None, None, :]
        found = functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(found.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """One transformer layer: self-attention, (if `cross`) cross-attention to a memory, MLP."""

    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own = Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads) if cross else None
        self.last_norm = nn.LayerNorm(width)
        self.each = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: Tensor, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """`seen` [n, L] (bool): which of the layer's own tokens are attended to."""
        own = self.norm(x)
        x = x + self.own(own, own, seen)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.each(self.last_norm(x))
