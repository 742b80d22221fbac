"""ChunkSampler: base of the policies that turn noise into a chunk by the steps of a sampler.

It owns what flow, shortcut, consistency and diffusion policies have in common: the encoder of the
last `obs_steps` observations, the normaliser of the actions and the network that is asked at each
step. One encoder, with the same weights for all observed steps, makes the features of each step;
the network gets them side by side, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import Node
from embodied.core.spec import Spec
from embodied.core.tensors import FRESH, HISTORY, Tensors, each, with_history
from embodied.nn.networks import sinusoid
from embodied.nn.normalizers import MinMaxNormalizer
from embodied.policies.encoded import require_continuous
from embodied.policies.generative.denoisers import denoiser
from embodied.policies.networks.encoders import ImageConfig, PointConfig, make_encoder
from embodied.policies.wrappers.real_time_chunking import GuidedSampler


class ObservesHistory(GuidedSampler):
    """A sampler whose decisions use the `past` observations `names` before the present one; they
    are in the carry (`core.history`). Diffusion Policy (Chi et al., 2023) uses 2 steps, DPPO,
    ReinFlow and Q-chunking 1."""

    past: int = 0
    names: Sequence[str] = ()

    def initial(self, n: int) -> Tensors:
        if not self.past:
            return {}
        device = next(self.parameters()).device
        carry: Tensors = {FRESH: torch.ones(n, dtype=torch.bool, device=device)}
        for name in self.names:
            leaf = self.spec.obs[name]
            zeros = leaf.zeros(n, device)[:, None]
            carry[HISTORY + name] = zeros.repeat(1, self.past, *[1] * len(leaf.shape))
        return carry

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return with_history(obs, carry), carry

    @property
    def augments(self) -> bool:
        return self.past > 0


@dataclass(frozen=True)
class Config:
    """Settings that all sampled policies share."""

    chunk: Count = 8  # actions of one decision
    width: Count = 256  # units of the residual MLP
    depth: Count = 2  # residual blocks of the MLP
    time_dim: Count = 16  # size of the time embedding, even
    net: Node | str | None = None  # another network, see policies.generative.denoisers
    obs_steps: Count = 1  # observations that the policy sees, the present one included
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds
    extractor: str | None = None  # class of an own Encoder in place of the usual one


class ChunkSampler(ObservesHistory):
    """Base class of sampled policies. Noise [n, chunk * A] is the initial sample.

    A subclass sets `waves` with `set_times`, and has `act`, `strides` and `loss`.
    """

    waves: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        require_continuous(spec)
        self.spec = spec
        self.chunk = config.chunk
        self.size = config.chunk * spec.act.size
        self.noise_steps = config.chunk
        self.encoder = make_encoder(spec, config)
        self.past = config.obs_steps - 1
        self.names = self.encoder.names
        self.range = MinMaxNormalizer(spec.act.size, spec.act.is_normalized)
        self.net = denoiser(
            config.net,
            config.chunk,
            spec.act.size,
            self.feature_size,
            config.width,
            config.depth,
            config.time_dim,
        )

    def set_times(self, times: Tensor) -> None:
        """Set the times [K] at which the sampler asks the network."""
        self.register_buffer("waves", sinusoid(times, self.net.time_dim), persistent=False)

    def embedded(self) -> Tensor:
        """The network's embeddings [K, time_dim] of the sampler's times."""
        return self.net.time(self.waves)

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.size, device=self.range.radius.device)

    @property
    def feature_size(self) -> int:
        return self.encoder.size * (self.past + 1)

    def features(self, obs: Tensors) -> Tensor:
        """Features [n, feature_size] of `obs`, with `history/NAME` [n, past, ...] where there are
        past steps; without them, those of the present one repeated."""
        if not self.past:
            return self.encoder(obs)
        steps: Tensors = {}  # [n, past + 1, ...], oldest first
        for name in self.names:
            now = obs[name][:, None]
            copies = now.expand(-1, self.past, *now.shape[2:])
            steps[name] = torch.cat([obs.get(HISTORY + name, copies).to(now.dtype), now], 1)
        encoded = self.encoder(each(steps, lambda leaf: leaf.flatten(0, 1)))
        return encoded.view(-1, self.feature_size)

    def to_actions(self, x: Tensor) -> Tensor:
        """Map normalised chunks [n, chunk * A] to actions [n, chunk, A] in [-1, 1] (not clamped
        where the action is normalised by a wrapper)."""
        bounded = self.spec.act.bounded
        x = bounded(x).view(-1, self.chunk, *self.spec.act.shape)
        return bounded(self.range.inverse(x))

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
        self.range.fit(rows["action"].reshape(-1, self.spec.act.size))
