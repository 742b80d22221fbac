"""Transformer layers of denoisers and of ACT (Vaswani et al., 2017).

x + MHA(LN(x)), then with a memory m: x + MHA(LN(x), m), then x + W2 gelu(W1 LN(x)); the
normalisation comes first (Xiong et al., 2020), which trains without a warm-up. No dropout: a
decision is a function of its arguments.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from embodied.core.build import ConfigError


class Attention(nn.Module):
    """Queries [n, L, width] look at a memory [n, M, width] through `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width={width} must be a multiple of heads={heads}")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor | None = None) -> Tensor:
        """[n, L, width]; `seen` [n, M] (bool) says which of the memory may be looked at."""
        query = self._split(self.query(x))
        key, value = map(self._split, self.key_value(memory).chunk(2, 2))
        mask = None if seen is None else seen[:, None, None, :]
        found = functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(found.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """One transformer layer: among its own tokens, then (`cross`) to a memory, then each alone."""

    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.norm, self.own = nn.LayerNorm(width), Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads) if cross else None
        self.last_norm = nn.LayerNorm(width)
        self.each = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: Tensor, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """`seen` [n, L] (bool): which of the layer's own tokens may be looked at."""
        own = self.norm(x)
        x = x + self.own(own, own, seen)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.each(self.last_norm(x))
