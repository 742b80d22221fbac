"""Recurrent: recurrent policy, a GRU (Cho et al., 2014) with an inner policy on its hidden state.

    x = f(encoder(o)),  r, z = sigma(W x + U h),  n = tanh(W x + r U h),  h' = (1 - z) n + z h

The hidden state is the observation `memory` of the inner policy, which may be any policy with
log-probabilities: diagonal_gaussian (continuous actions) or categorical (choices). It also observes
the mask of choices, where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Chunk, Units
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import MASK, Leaf, Spec
from embodied.core.tensors import Tensors, each
from embodied.policies.networks import blocks
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig


@dataclass(frozen=True)
class Config:
    """Settings of a policy with a GRU."""

    inner: Node  # node of the policy on the hidden state, built with this `chunk`
    chunk: Chunk = 1  # actions of one decision
    width: Units = 64  # units of the hidden state
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds


class Memory(nn.Module):
    """An encoder and a GRU cell; sequences have the same arithmetic as single steps."""

    def __init__(self, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.width = width
        self.enter = nn.Linear(encoder.size, width)
        self.cell = nn.GRUCell(width, width)
        for weight in (self.enter.weight, self.cell.weight_ih, self.cell.weight_hh):
            nn.init.orthogonal_(weight)
        for bias in (self.enter.bias, self.cell.bias_ih, self.cell.bias_hh):
            nn.init.zeros_(bias)

    def initial(self, n: int) -> Tensor:
        """The initial hidden state, zeros [n, width]."""
        return torch.zeros(n, self.width, device=self.enter.weight.device)

    def forward(self, obs: Tensors, h: Tensor) -> Tensor:
        """One step: the next hidden state from observations [n, ...] and `h` [n, width]."""
        return blocks.gru_cell(self._inputs(obs), h, self.cell.weight_hh, self.cell.bias_hh)

    def along(self, obs: Tensors, h: Tensor, first: Tensor) -> Tensor:
        """Hidden states [T, B, width] after each of the observations [T, B, ...], from `h`
        [B, width]; reset before an observation that is the `first` [T, B] (bool) of an episode."""
        inputs = self._inputs(each(obs, lambda value: value.flatten(0, 1)))
        keep = (~first).to(h.dtype).unsqueeze(2)
        unroll = blocks.unroll_gru_cpu if h.device.type == "cpu" else blocks.unroll_gru
        x = inputs.view(*first.shape, -1)
        return unroll(x, h, keep, self.cell.weight_hh, self.cell.bias_hh)

    def _inputs(self, obs: Tensors) -> Tensor:
        x = blocks.fast_tanh(self.enter(self.encoder(obs)))
        return functional.linear(x, self.cell.weight_ih, self.cell.bias_ih)


class Recurrent(Policy):
    """Recurrent policy. The carry holds the hidden state; noise is that of the inner policy."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.chunk = config.chunk
        self.width = config.width
        self.memory = Memory(Encoder(spec.obs, config.images, points=config.points), config.width)
        self.inner = build_inner(config.inner, config.chunk, config.width, spec)

    @property
    def encoder(self) -> Encoder:
        """The observation encoder, which holds the normaliser."""
        return self.memory.encoder

    def initial(self, n: int) -> Tensors:
        return {"h": self.memory.initial(n), **self.inner.initial(n)}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.inner.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        h = self.memory(obs, carry["h"])
        actions, kept = self.inner.act(inner_obs(self.inner, h, obs), {}, noise)
        return actions, {"h": h, **kept}

    def evaluate_sequence(
        self, obs: Tensors, action: Tensor, carry: Tensors, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [T, B] of actions [T, B, ...] after the `carry` [B, ...]."""
        return self.evaluate_memory(self.memory.along(obs, carry["h"], first), obs, action)

    def evaluate_memory(
        self, memory: Tensor, obs: Tensors, action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same with the hidden states `memory` [T, B, width]."""
        return evaluate_inner(self.inner, memory, obs, action)

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)


def build_inner(node: Node, chunk: int, width: int, spec: Spec) -> Policy:
    """Build the policy on the memory [n, width]; ConfigError if it has no log-probabilities."""
    seen = {name: leaf for name, leaf in spec.obs.items() if name == MASK}
    inside = Spec({"memory": Leaf((width,)), **seen}, spec.act, spec.dt)
    inner = build({**node, "chunk": chunk}, Policy, spec=inside)
    if not callable(getattr(inner, "evaluate_actions", None)):
        raise ConfigError(
            "the inner policy needs a density (log-probabilities): "
            "embodied.policies.gaussian or embodied.policies.categorical"
        )
    return inner


def inner_obs(inner: Policy, memory: Tensor, obs: Tensors) -> Tensors:
    """What the inner policy observes: `memory`, and of `obs` the mask of choices."""
    return {"memory": memory, **{name: obs[name] for name in inner.spec.obs if name == MASK}}


def evaluate_inner(
    inner: Policy, memory: Tensor, obs: Tensors, action: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [T, B] of actions taken at `obs` with `memory` [T, B, width]."""
    flat = each(inner_obs(inner, memory, obs), lambda leaf: leaf.flatten(0, 1))
    log_prob, entropy = inner.evaluate_actions(flat, action.flatten(0, 1))  # pyright: ignore[reportCallIssue]
    shape = memory.shape[:2]
    return log_prob.view(shape), entropy.reshape(shape)
