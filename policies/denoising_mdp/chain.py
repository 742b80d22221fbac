"""DenoisingMDP: a generative policy whose denoising steps are the actions of an MDP.

The actions of a diffusion or flow policy have no tractable density, but its denoising steps, with
added noise, are Gaussian (DPPO, Ren et al., 2024; ReinFlow, Zhang et al., 2025):

    x_{k+1} = mean_k(x_k, o) + std_k(x_k, o) z_k,   z_k ~ N(0, I), clipped,   k = 0 .. K-1
    log p(x_0 .. x_K) = log N(x_0; 0, I) + sum_k log N(x_{k+1}; mean_k, diag std_k^2)

The learner's action is the whole chain; the robot executes x_K, unnormalised and clipped to
[-1, 1]. The density is that of the samples before clipping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.core.bounds import Chunk, Positive
from embodied.core.build import ConfigError, Node
from embodied.core.device import device_of
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.policies.networks.encoders import Encoder

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that all fine-tuned denoising policies share."""

    base: Node  # node of the policy whose denoising steps become stochastic
    chunk: Chunk | None = None  # actions of one decision (null: the base's)
    cut: Positive = 3.0  # noise is clipped to so many standard deviations


class DenoisingMDP(PolicyWrapper):
    """Base class of policies with stochastic denoising steps (`links`). Noise [n, (1 + K) * size]:
    x_0 and the z of each of K links.

    `inner` is the policy without exploration, which is deployed. With z = 0 the actions are exactly
    those of `inner`.
    """

    requires_base = True
    inner: Any  # Policy; also `size` and `to_actions`; `first`: elements before the first action
    links: int

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        if spec.act.is_normalized:
            raise ConfigError("the denoising steps of a policy in physical units cannot be tuned")
        chunk = {} if config.chunk is None else {"chunk": config.chunk}
        self.inner = self.inside(config, {**config.base, **chunk})
        self.chunk = self.inner.chunk
        self.size = self.inner.size
        self.first = getattr(self.inner, "first", 0)

    def inside(self, config: Any, base: Node) -> Policy:
        """Build `inner`; ConfigError if `base` is not a policy of the right kind."""
        raise NotImplementedError

    def load_base(self, base: Policy) -> None:
        """Copy the weights and normalisers of a trained policy of the base's kind."""
        raise NotImplementedError

    def begin(self, obs: Tensors, x: Tensor) -> Tensor:
        """x_0 [n, size] of the chain, made of noise `x` by the frozen denoising steps, if any."""
        return x

    def times(self) -> Tensor:
        """The network's time embeddings [K, time_dim] of the links."""
        raise NotImplementedError

    def link(
        self, x: Tensor, k: int | Tensor, time: Tensor, seen: Tensor, explores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [n, size] of x_{k+1} given `x`; `k`: one index or [n]
        (int64), `time`: its embedding, `seen` [n, F]: features of the observation.

        `explores` [n, 1] (bool, None: all): which samples explore.
        """
        raise NotImplementedError

    @property
    def encoder(self) -> Encoder | None:
        return getattr(self.inner, "encoder", None)

    @property
    def feature_size(self) -> int:
        return self.inner.feature_size

    def features(self, obs: Tensors) -> Tensor:
        return self.inner.features(obs)

    @property
    def augments(self) -> bool:
        return self.inner.augments

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return self.inner.observe(obs, carry, noise)

    def inference_policy(self) -> Policy:
        return self.inner

    def initial(self, n: int) -> Tensors:
        chain = torch.zeros(n, self.links + 1, self.size, device=device_of(self))
        return {**self.inner.initial(n), "row/action": chain}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        start = self.inner.sample_noise(n)
        make = torch.randn if explore else torch.zeros
        return torch.cat([start, make(n, self.links * self.size, device=start.device)], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        start, *drawn = noise.split(self.size, 1)
        explores = noise[:, self.size :].any(1, keepdim=True)
        seen = self.features(obs)
        x = self.begin(obs, start)
        chain = [x]
        for k, (time, z) in enumerate(zip(self.times(), drawn, strict=True)):
            mean, std = self.link(x, k, time, seen, explores)
            x = mean + std * z.clamp(-self.config.cut, self.config.cut)
            chain.append(x)
        return self.inner.to_actions(x), {**carry, "row/action": torch.stack(chain, 1)}

    def link_log_prob(self, obs: Tensors, x: Tensor, following: Tensor, k: Tensor) -> Tensor:
        """Log-density [n, size] of `following`, the result of link `k` [n] on `x`, by element."""
        return log_normal(following, *self.link(x, k, self.times()[k], self.features(obs)))

    def evaluate_actions(
        self, obs: Tensors, chain: Tensor, played: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-density and entropy [n] of whole chains [n, K + 1, size], averaged over the K + 1
        samples and over the elements of the first `played` of an action chunk (None: all)."""
        n, draws = chain.shape[:2]
        k = torch.arange(self.links, device=chain.device).repeat(n)
        seen = self.features(obs).repeat_interleave(self.links, 0)
        mean, std = self.link(chain[:, :-1].flatten(0, 1), k, self.times()[k], seen)
        log_prob = log_normal(chain[:, 1:].flatten(0, 1), mean, std).view(n, self.links, -1)
        first = -0.5 * chain[:, 0].square() - HALF_LOG_2PI
        total = log_prob.sum(1) + first
        spread = std.log().expand_as(mean).view(n, self.links, -1).sum(1)
        entropy = spread + draws * (HALF_LOG_2PI + 0.5)
        part = self.executed(played)
        return total[:, part].mean(1) / draws, entropy[:, part].mean(1) / draws

    def executed(self, played: int | None) -> slice:
        """The elements of a sample that are the first `played` of an action chunk (None: all)."""
        count = self.chunk * self.spec.act.size if played is None else played
        return slice(self.first, self.first + count)

    def fit(self, rows: Tensors) -> None:
        self.inner.fit(rows)


def log_normal(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return log N(x; mean, std^2) of each element."""
    return -0.5 * ((x - mean) / std).square() - std.log() - HALF_LOG_2PI
