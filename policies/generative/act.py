"""ACT: action chunking with transformers, trained as a conditional VAE (Zhao et al., 2023).

An encoder of the demonstrated chunk gives a style z ~ q(z | o, a) = N(mean, std^2); a transformer
over [z, o], whose decoder has one learned query per step, predicts the chunk:

    loss = |a - a'|_1 + beta KL(q(z | o, a) || N(0, I)).

The policy acts with z = 0, or with z sampled from the prior. With temporal ensembling (`ensemble`)
it decides at every step and executes the mean of all predictions for that step, weighted by
exp(-decay i), i = 0 for the oldest prediction. There is no dropout: decisions are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from embodied.core.bounds import Chunk, Count, Few, NonNegative, Units
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, each, under
from embodied.nn.networks import per_row
from embodied.nn.normalizers import MinMaxNormalizer
from embodied.policies.encoded import require_continuous
from embodied.policies.networks.blocks import AttentionLayer
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig


@dataclass(frozen=True)
class Config:
    """Settings of ACT."""

    chunk: Chunk = 8  # actions of one decision
    style: Count = 16  # size of the latent z
    beta: NonNegative = 10.0  # weight of the KL divergence
    prior: bool = False  # act with z sampled from the prior, not with its mean
    width: Units = 128  # units of a token
    heads: Few = 4  # attention heads of a layer
    layers: Few = 2  # layers of the encoder and of the decoder
    ensemble: bool = False  # temporal ensembling (leave `execute` out)
    decay: NonNegative = 0.01  # of the ensemble's weights per step of age
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds


class Act(Policy):
    """ACT policy. Noise [n, style] is z: zero to act, standard normal to explore or with `prior`.

    With `ensemble`, `chunk` is the prediction length in training mode (`train()`) and 1 in
    evaluation mode (`eval()`).
    """

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        require_continuous(spec)
        self.spec = spec
        self.chunk = config.chunk
        self.config = config
        width = config.width
        self.length = config.chunk
        self.encoder = Encoder(spec.obs, config.images, points=config.points)
        self.range = MinMaxNormalizer(spec.act.size, spec.act.is_normalized)
        self.tokens = nn.ModuleList(nn.Linear(size, width) for size in self.encoder.sizes)
        self.enter = nn.Linear(config.style, width)
        self.places = place(1 + len(self.encoder.sizes), width)
        self.queries = place(config.chunk, width)
        self.encode = layers(config, config.layers)
        self.decode = layers(config, config.layers, cross=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.leave = nn.Linear(width, spec.act.size)
        # The style encoder, used in training only.
        self.show = nn.Linear(spec.act.size, width)
        self.ask = place(1, width)
        self.steps = place(config.chunk, width)
        self.read = layers(config, config.layers)
        self.style = nn.Linear(width, 2 * config.style)

    def train(self, mode: bool = True) -> Self:
        self.chunk = 1 if self.config.ensemble and not mode else self.length
        return super().train(mode)

    def initial(self, n: int) -> Tensors:
        if not self._ensembling:
            return {}
        device = self.range.radius.device
        return {
            "sum": torch.zeros(n, self.length, self.spec.act.size, device=device),
            "weight": torch.zeros(n, self.length, device=device),
            "count": torch.zeros(n, self.length, device=device),
        }

    @property
    def _ensembling(self) -> bool:
        return self.config.ensemble and not self.training

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        make = torch.randn if explore or self.config.prior else torch.zeros
        return make(n, self.config.style, device=self.range.radius.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        x = self.spec.act.bounded(self.predict(self.observed(obs), noise))
        if self._ensembling:
            x, carry = ensembled(x, carry, self.config.decay)
        return self.spec.act.bounded(self.range.inverse(x.unflatten(2, self.spec.act.shape))), carry

    def observed(self, obs: Tensors) -> Tensor:
        """Observation tokens [n, T, width]: one for all vectors, one per camera and point set."""
        parts = self.encoder.parts(obs)
        return torch.stack([t(part) for t, part in zip(self.tokens, parts, strict=True)], 1)

    def predict(self, seen: Tensor, z: Tensor) -> Tensor:
        """Normalised actions [n, H, A] for observation tokens `seen` and a style `z` [n, style]."""
        h = torch.cat([self.enter(z)[:, None], seen], 1) + self.places
        for layer in self.encode:
            h = layer(h)
        memory = self.norms[0](h)
        out = self.queries.expand(z.shape[0], -1, -1)
        for layer in self.decode:
            out = layer(out, memory)
        return self.leave(self.norms[1](out))

    def posterior(self, seen: Tensor, action: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log std [n, style] of z given normalised actions [n, H, A]."""
        ask = self.ask.expand(len(action), -1, -1)
        h = torch.cat([ask, seen, self.show(action) + self.steps], 1)
        known = torch.ones(h.shape[0], h.shape[1] - self.length, dtype=torch.bool, device=h.device)
        may = torch.cat([known, valid], 1)
        for layer in self.read:
            h = layer(h, seen=may)
        mean, log_std = self.style(self.norms[2](h[:, 0])).chunk(2, 1)
        return mean, log_std

    def loss(self, batch: Tensors) -> Tensor:
        """Mean absolute error over the valid steps plus beta KL, [n]."""
        seen = self.observed(under(batch, "obs"))
        valid = batch["valid"]
        action = self.range(batch["action"]).flatten(2)
        mean, log_std = self.posterior(seen, action, valid)
        z = mean + log_std.exp() * torch.randn_like(mean)
        error = (self.predict(seen, z) - action).abs()
        divergence = self.config.beta * kl(mean, log_std) * valid.any(1)
        return per_row(error, valid) + divergence

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
        self.range.fit(rows["action"].reshape(-1, self.spec.act.size))


def kl(mean: Tensor, log_std: Tensor) -> Tensor:
    """KL(N(mean, std^2) || N(0, I)), summed over the last dimension."""
    return 0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).sum(1)


def ensembled(x: Tensor, carry: Tensors, decay: float) -> tuple[Tensor, Tensors]:
    """Temporal ensembling: this step's action [n, 1, A] from the new predictions `x` [n, H, A] and
    the earlier ones in `carry`, whose `sum`, `weight` and `count` [n, H, ...] accumulate the
    predictions of each future step.
    """
    share = torch.exp(-decay * carry["count"])
    total = carry["sum"] + share[:, :, None] * x
    weight = carry["weight"] + share
    action = total[:, :1] / weight[:, :1, None]
    kept = {"sum": total, "weight": weight, "count": carry["count"] + 1}
    # Shift by one step; the new last step has no predictions yet.
    return action, each(kept, lambda v: torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1))


def place(count: int, width: int) -> nn.Parameter:
    """Learned vectors [1, count, width]."""
    return nn.Parameter(0.02 * torch.randn(1, count, width))


def layers(config: Config, count: int, cross: bool = False) -> nn.ModuleList:
    """Transformer layers of the configured width."""
    return nn.ModuleList(AttentionLayer(config.width, config.heads, cross) for _ in range(count))
