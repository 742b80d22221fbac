"""Transformer: a causal transformer over the past, with an inner policy on its output.

The carry holds keys and values of the last `window` steps, so that a decision costs one step of
attention. The output is the observation `memory` of the inner policy, as in
embodied.policies.recurrent, and the same learners train it. Keys that were cached before a batch
are constants in it, as the first hidden state of a recurrent policy is.

A step attends to itself and to at most `window` - 1 steps before it in the same episode (Vaswani et
al., 2017). A learned bias per head and age takes the place of position embeddings, so keys do not
depend on where in a sequence they stand:

    weight(t, s) = softmax_s(q_t k_s / sqrt(d) + bias[t - s]),   0 <= t - s < window.

With `sink`, each head has one more key and value that it learns, for a step that finds nothing of
use in its past (ReLIC; Elawady et al., 2024).

A step with the cache and a whole sequence are the same function to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Chunk, Count, Few, Units
from embodied.core.build import Node
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each
from embodied.policies.networks import blocks
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig
from embodied.policies.recurrent import build_inner, evaluate_inner, inner_obs

KEYS = "keys"
VALUES = "values"
KNOWN = "known"


class CausalAttention(blocks.Attention):
    """Multi-head attention of T steps to the `window` steps before them and to themselves; with
    `sink`, also to one learned key and value."""

    def __init__(self, width: int, heads: int, window: int, sink: bool = False) -> None:
        super().__init__(width, heads)
        self.bias = nn.Parameter(torch.zeros(heads, window))
        self.sink = nn.Parameter(torch.zeros(2, heads, 1, width // heads)) if sink else None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, keys: Tensor, values: Tensor, age: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output [B, T, width], and the keys and values [B, W + T, width] with those of `x`.

        `x` [B, T, width]: inputs; `keys`, `values` [B, W, width]: of the steps before; `age`
        [T, W + T] (int64): how many steps ago; `seen` [B, T, W + T] (bool): what is attended to.
        """
        new_keys, new_values = self.key_value(x).chunk(2, 2)
        keys = torch.cat([keys, new_keys], 1)
        values = torch.cat([values, new_values], 1)
        bias = self.bias[:, age.clamp(0, self.bias.shape[1] - 1)]
        mask = bias.masked_fill(~seen[:, None], -torch.inf)
        k, v = self._split(keys), self._split(values)
        if self.sink is not None:
            sink = self.sink[:, None].expand(-1, len(x), -1, -1, -1)
            k, v = torch.cat([sink[0], k], 2), torch.cat([sink[1], v], 2)
            mask = functional.pad(mask, (1, 0))
        found = functional.scaled_dot_product_attention(self._split(self.query(x)), k, v, mask)
        return self.out(found.transpose(1, 2).flatten(2)), keys, values


class CausalLayer(nn.Module):
    """One pre-norm layer: causal attention, then an MLP on each step."""

    def __init__(self, width: int, heads: int, window: int, sink: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, window, sink)
        self.last_norm = nn.LayerNorm(width)
        self.each = blocks.feedforward(width)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, age: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `CausalAttention`, with the residual connections."""
        found, keys, values = self.attention(self.norm(x), keys, values, age, seen)
        x = x + found
        return x + self.each(self.last_norm(x)), keys, values


class CausalTransformer(nn.Module):
    """Layers over time. The cache has leaves `keys` and `values` [B, layers, window, width] and
    `known` [B, window] (bool), oldest step first."""

    def __init__(
        self, width: int, heads: int, layers: int, window: int, sink: bool = False
    ) -> None:
        super().__init__()
        self.width = width
        self.window = window
        self.layers = nn.ModuleList(CausalLayer(width, heads, window, sink) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def empty(self, n: int) -> Tensors:
        """The cache of `n` episodes that begin."""
        like = self.norm.weight
        shape = (n, len(self.layers), self.window, self.width)
        known = torch.zeros(n, self.window, dtype=torch.bool, device=like.device)
        return {KEYS: like.new_zeros(shape), VALUES: like.new_zeros(shape), KNOWN: known}

    def forward(self, x: Tensor, cache: Tensors, first: Tensor) -> tuple[Tensor, Tensors]:
        """Outputs [B, T, width] of inputs `x` [B, T, width], and the cache after the last one.

        `first` [B, T] (bool): the steps that begin an episode, which see nothing before them.
        """
        steps = x.shape[1]
        at = torch.arange(self.window + steps, device=x.device)
        age = at[self.window :, None] - at
        # The number of episodes that began before a step; steps of the cache are of number 0.
        number = first.long().cumsum(1)
        past = torch.zeros(len(x), self.window, dtype=torch.int64, device=x.device)
        of = torch.cat([past, number], 1)
        known = torch.cat([cache[KNOWN], torch.ones_like(first)], 1)
        near = (age >= 0) & (age < self.window)
        seen = near & known[:, None] & (of[:, None] == number[:, :, None])
        kept: dict[str, list[Tensor]] = {KEYS: [], VALUES: []}
        for i, layer in enumerate(self.layers):
            x, keys, values = layer(x, cache[KEYS][:, i], cache[VALUES][:, i], age, seen)
            kept[KEYS].append(keys[:, steps:])
            kept[VALUES].append(values[:, steps:])
        ended = known & (of == number[:, -1:])
        after = {key: torch.stack(parts, 1) for key, parts in kept.items()}
        return self.norm(x), {**after, KNOWN: ended[:, steps:]}

    def step(self, x: Tensor, cache: Tensors) -> tuple[Tensor, Tensors]:
        """The output [B, width] of one step `x` [B, width], and the next cache."""
        first = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
        found, cache = self(x[:, None], cache, first)
        return found[:, 0], each(cache, Tensor.detach)


@dataclass(frozen=True)
class Config:
    """Settings of a policy with a transformer over time."""

    inner: Node  # node of the policy on the transformer's output, built with this `chunk`
    chunk: Chunk = 1  # actions of one decision
    width: Units = 64  # units of a step
    heads: Few = 4  # attention heads of a layer
    layers: Few = 2  # layers
    window: Count = 64  # steps that a step sees, itself included
    sink: bool = False  # a learned key and value in each head, for a step that needs no other
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds


class Transformer(Policy):
    """Policy with a causal transformer. Noise is that of the inner policy."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.chunk = config.chunk
        self.width = config.width
        self.encoder = Encoder(spec.obs, config.images, points=config.points)
        self.enter = nn.Linear(self.encoder.size, config.width)
        sizes = (config.width, config.heads, config.layers, config.window, config.sink)
        self.past = CausalTransformer(*sizes)
        self.inner = build_inner(config.inner, config.chunk, config.width, spec)

    def initial(self, n: int) -> Tensors:
        return {**self.past.empty(n), **self.inner.initial(n)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.inner.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        memory, cache = self.past.step(self.enter(self.encoder(obs)), carry)
        actions, kept = self.inner.act(inner_obs(self.inner, memory, obs), {}, noise)
        return actions, {**cache, **kept}

    def along(self, obs: Tensors, carry: Tensors, first: Tensor) -> tuple[Tensor, Tensors]:
        """Outputs [T, B, width] at observations [T, B, ...], and the cache after the last one."""
        flat = each(obs, lambda leaf: leaf.transpose(0, 1).flatten(0, 1))
        inputs = self.enter(self.encoder(flat)).view(*first.mT.shape, self.width)
        memory, cache = self.past(inputs, carry, first.mT)
        return memory.transpose(0, 1), cache

    def evaluate_sequence(
        self, obs: Tensors, action: Tensor, carry: Tensors, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [T, B] of sequences of actions [T, B, ...], from the `carry`
        [B, ...] before the first action."""
        return evaluate_inner(self.inner, self.along(obs, carry, first)[0], obs, action)

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
