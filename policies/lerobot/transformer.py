"""The transformer of LeRobot's ACT policy, with its tensor names (Zhao et al., 2023).

It differs from that of `embodied.policies.generative.act`: tokens of feature-map pixels, positions
that are added to queries and keys of every layer, and normalisation after each part (or before it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count


@dataclass(frozen=True)
class TransformerConfig:
    """Settings of LeRobot's Transformer."""

    width: Count = 512  # units of a token
    heads: Count = 8  # attention heads of a layer
    feedforward: Count = 3200  # units of the hidden layer
    activation: Literal["relu", "gelu"] = "relu"  # of the hidden layer
    encoder: Count = 4  # layers of the encoder
    decoder: Count = 1  # layers of the decoder
    before: bool = False  # normalise before a part, not after it


class Encoder(nn.Module):
    """Self-attention over tokens [T, n, width] with positions [T, 1, width]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder))
        self.norm = nn.LayerNorm(config.width) if config.before else nn.Identity()

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, places)
        return self.norm(x)


class Part(nn.Module):
    """Base class of both kinds of layers: the residual parts and their normalisation."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.self_attn = nn.MultiheadAttention(width, config.heads)
        self.linear1 = nn.Linear(width, config.feedforward)
        self.linear2 = nn.Linear(config.feedforward, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.before = config.before
        self.activation = functional.relu if config.activation == "relu" else functional.gelu

    def _attend_to_itself(self, x: Tensor, places: Tensor) -> Tensor:
        h = self.norm1(x) if self.before else x
        at = h + places
        x = x + attention(self.self_attn, at, at, h)
        return x if self.before else self.norm1(x)

    def _feed(self, x: Tensor, norm: nn.Module) -> Tensor:
        h = norm(x) if self.before else x
        x = x + self.linear2(self.activation(self.linear1(h)))
        return x if self.before else norm(x)


class EncoderLayer(Part):
    """Self-attention and a feed-forward part."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self._feed(self._attend_to_itself(x, places), self.norm2)


class Decoder(nn.Module):
    """Attention of queries [H, n, width] to themselves and to encoded tokens [T, n, width]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, seen: Tensor, places: Tensor, seen_places: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, seen, places, seen_places)
        return self.norm(x)


class DecoderLayer(Part):
    """Self-attention, attention to the encoder's tokens, and a feed-forward part."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.multihead_attn = nn.MultiheadAttention(config.width, config.heads)
        self.norm3 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, seen: Tensor, places: Tensor, seen_places: Tensor) -> Tensor:
        x = self._attend_to_itself(x, places)
        h = self.norm2(x) if self.before else x
        x = x + attention(self.multihead_attn, h + places, seen + seen_places, seen)
        x = x if self.before else self.norm2(x)
        return self._feed(x, self.norm3)


class Places2d(nn.Module):
    """Sines and cosines [1, width, H, W] of the places in a feature map [n, C, H, W]."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.size = half

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        index = torch.arange(self.size, dtype=torch.float32, device=x.device)
        frequency = 10000 ** (2 * (index // 2) / self.size)
        rows = self._waves(height, frequency)[:, None].expand(-1, width, -1)
        columns = self._waves(width, frequency)[None].expand(height, -1, -1)
        return torch.cat([rows, columns], 2).permute(2, 0, 1)[None]

    def _waves(self, count: int, frequency: Tensor) -> Tensor:
        """Interleaved sines and cosines [count, half] of 2 pi i / count, i = 1 .. count."""
        place = torch.arange(1, count + 1, dtype=torch.float32, device=frequency.device)
        place = place / (count + 1e-6) * (2 * math.pi)
        angle = place[:, None] / frequency
        return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], -1).flatten(1)


def attention(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output [T, n, width] of a multi-head attention."""
    return cast(Tensor, layer(query, key, value, need_weights=False)[0])
