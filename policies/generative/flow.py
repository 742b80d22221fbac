"""Flow: flow-matching policy, sampled with a few Euler steps (Lipman et al., 2023).

Rectified flow (Liu et al., 2023): x_t = (1 - t) x_0 + t x_1 with x_0 ~ N(0, I) and x_1 a normalised
action chunk; the network is trained to predict the velocity v(x_t, t, o) = x_1 - x_0. Sampling:
x <- x + v(x, i/K, o) / K for i = 0 .. K-1, clipped to [-1, 1] at the end.

Shortcut: shortcut-model policy, a flow conditioned on its step size (Frans et al., 2024).

It can be sampled with one step or many. The network s(x_t, t, d, o) is the mean velocity over the
next step of length d. For the smallest d = 1 / finest it is trained by flow matching, s = x_1 -
x_0. One in `bootstrap` samples of a batch, drawn at random, trains a longer step from two of half
the length, without gradient through the target:

    s(x_t, t, d) = (s(x_t, t, d/2) + s(x', t + d/2, d/2)) / 2,   x' = x_t + d/2 s(x_t, t, d/2),

for d = 1, 1/2 .. 2/finest and t a multiple of d. Sampling takes K = `steps` Euler steps of d = 1/K.
Differences from the published code: targets use the trained network itself, not an EMA, as in
ReinFlow (Zhang et al., 2025); the authors bootstrap the first eighth of a shuffled batch.

Consistency: a consistency policy, which maps noise to a chunk in one or a few steps.

Consistency training (Song et al., 2023), without a diffusion teacher (Prasad et al., 2024, distil
one). On the path x_t = (1 - t) z + t x_1 from noise z to a normalised chunk x_1,

    f(x, t, o) = x + (1 - t) net(x, t, o)

is trained to be constant along a trajectory. Of two neighbouring times on a grid of N = `levels`,
with the same z and x_1, the one nearer to the data gives the target, without gradient:

    loss = |f(x_t, t) - f(x_s, s)|^2 / (1.05 - t),   s = t + 1/N,   f(x_1, 1) = x_1.

The loss is squared, as the pseudo-Huber distance of Song and Dhariwal (2024) tends to the median
and under-represents rare modes (a mode of 30% became 13%). The action is f(z, 0); with K = `steps`
> 1 the result is noised again to t = i/K, i = 1 .. K-1, with new noise, and denoised again.

MinimalIterative: two steps of regression, the minimal iterative policy (Pan et al., 2025).

MIP (arXiv 2512.01809). One network pi(o, x, t) predicts the normalised chunk a twice, at t = 0 from
nothing and at t = t* from a noisy chunk; no distribution is fitted:

    loss = |pi(o, 0, 0) - a|^2 + |pi(o, t* a + (1 - t*) z, t*) - a|^2,   z ~ N(0, I)
    a_0  = pi(o, 0, 0),   action = pi(o, t* a_0, t*)

With z = 0 the action is a function of the observation. For exploration z is drawn as in training:
action = pi(o, t* a_0 + (1 - t*) z, t*). The authors' code adds noise without scaling a by t*, and
weighs the terms by 1 / t*^2 and 1 / (1 - t*)^2; here both count alike, as in the paper.

OneStep: a one-step policy distilled from a flow policy; the actor of FQL (Park et al., 2025).

Flow Q-learning adds a Q term to this imitation loss:

    L = L_flow(v) + |mu(o, z) - sg ODE_v(o, z)|^2,   z ~ N(0, I)

The policy acts with `mu`. The flow is part of the module because learners need it; acting never
evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn

from embodied.core.bounds import Bound, Count, Levels
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.nn.networks import mlp, per_row
from embodied.policies.encoded import build_with_chunk, require_continuous
from embodied.policies.generative import chunk_sampler
from embodied.policies.generative.chunk_sampler import ChunkSampler
from embodied.policies.networks.encoders import Encoder, ImageConfig, PointConfig
from embodied.policies.wrappers.real_time_chunking import SamplerStep


@dataclass(frozen=True)
class FlowConfig(chunk_sampler.Config):
    """Settings of a flow-matching policy."""

    steps: Levels = 4  # Euler steps K


class Flow(ChunkSampler):
    """Flow-matching policy. Noise [n, chunk * A] is the initial sample x_0."""

    def __init__(self, config: FlowConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.steps = config.steps
        self.set_times(self.times())

    def times(self) -> Tensor:
        """The times i / K, [K]."""
        return torch.arange(self.steps, device=self.range.radius.device) / self.steps

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        x = noise
        for time in self.embedded().unbind():
            x = torch.add(x, self.net.at(x, time, features), alpha=1 / self.steps)
        return self.to_actions(x), carry

    def velocity_at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        return self.net.at(x, time, features)

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        features = self.features(obs)

        def stride(i: int, time: Tensor) -> SamplerStep:
            remain = 1 - i / self.steps
            return SamplerStep(
                keep=i / self.steps,
                remain=remain,
                clean=lambda x: torch.add(x, self.net.at(x, time, features), alpha=remain),
                onward=lambda x, clean: torch.lerp(x, clean, 1 / (self.steps - i)),
            )

        return noise, [stride(i, time) for i, time in enumerate(self.embedded().unbind())]

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared errors of the velocity."""
        x0 = torch.randn_like(target)
        t = torch.rand(len(target), device=target.device)
        x = torch.lerp(x0, target, t[:, None])
        return (self.net(x, t, features) - (target - x0)).square()


@dataclass(frozen=True)
class ShortcutConfig(FlowConfig):
    """Settings of a shortcut policy, in addition to those of flow matching."""

    steps: Levels = 1  # sampling steps, a power of two up to `finest`
    finest: Annotated[int, Bound(2)] = 16  # steps of plain flow matching, a power of two
    bootstrap: Annotated[int, Bound(2)] = 4  # one in so many samples of a batch trains longer steps


class Shortcut(Flow):
    """Shortcut policy. Noise [n, chunk * A] is the initial sample x_0."""

    def __init__(self, config: ShortcutConfig, spec: Spec) -> None:
        for name, count in (("steps", config.steps), ("finest", config.finest)):
            if count & (count - 1):
                raise ConfigError(f"{name}={count} must be a power of two: 1, 2, 4, ...")
        if config.steps > config.finest:
            raise ConfigError(f"steps={config.steps} must be at most finest={config.finest}")
        super().__init__(config, spec)
        self.config = config
        self.finest_level = config.finest.bit_length() - 1
        # One vector per step size 2^-level, added to the time embedding.
        self.sizes = nn.Embedding(self.finest_level + 1, self.net.time_dim)
        nn.init.normal_(self.sizes.weight, std=0.3)

    def embedded(self) -> Tensor:
        return super().embedded() + self.sizes.weight[self.steps.bit_length() - 1]

    def velocity(self, x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Return s [n, D] at times [n] for steps of 2^-level [n] (int64)."""
        return self.net.at(x, self.net.embed(t) + self.sizes(level), features)

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        x0 = torch.randn_like(target)
        t = torch.rand(len(target), device=target.device)
        level = torch.full_like(t, self.finest_level, dtype=torch.int64)
        # Random samples [n / bootstrap] of a batch. Not every k-th one: a batch may alternate
        # between sources. Not randperm, which synchronises with the device.
        some = torch.rand_like(t).topk(len(t) // self.config.bootstrap).indices
        level[some] = torch.randint(self.finest_level, (len(t[some]),), device=t.device)
        scale = torch.exp2(level[some])
        t[some] = (t[some] * scale).floor() / scale
        x = torch.lerp(x0, target, t[:, None])
        goal = target - x0
        goal[some] = self.longer(x[some], t[some], level[some], features[some])
        return (self.velocity(x, t, level, features) - goal).square()

    @torch.no_grad()
    def longer(self, x: Tensor, t: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Target of a step of 2^-level: the mean velocity of two steps of half its length."""
        half = torch.exp2(-(level + 1).float())
        one = self.velocity(x, t, level + 1, features)
        two = self.velocity(x + half[:, None] * one, t + half, level + 1, features)
        return (one + two) / 2


@dataclass(frozen=True)
class ConsistencyConfig(FlowConfig):
    """Settings of a consistency policy, in addition to those of flow matching."""

    steps: Levels = 1  # sampling steps
    levels: Annotated[int, Bound(2)] = 80  # training times (more: sharper, slower)


class Consistency(Flow):
    """Noise [n, steps * chunk * A]: the initial sample, then what is added at each further step."""

    def __init__(self, config: ConsistencyConfig, spec: Spec) -> None:
        if config.steps > config.levels:
            raise ConfigError(f"steps={config.steps} must be at most levels={config.levels}")
        super().__init__(config, spec)
        self.levels = config.levels
        if config.steps > 1:
            self.noise_steps = 0

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.steps * self.size, device=self.range.radius.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        x, *fresh = noise.split(self.size, 1)
        for i, time in enumerate(self.embedded().unbind()):
            t = i / self.steps
            if i:
                x = torch.lerp(fresh[i - 1], x, t)
            x = self.spec.act.bounded(x + (1 - t) * self.net.at(x, time, features))
        return self.to_actions(x), carry

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        x, *fresh = noise.split(self.size, 1)
        strides = super().strides(obs, x)[1]
        for i, again in enumerate(fresh):
            share = (i + 1) / self.steps
            strides[i] = strides[i]._replace(onward=renoise(again, share, self.spec.act))
        return x, strides

    def clean(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Return f(x, t, o) [n, D] at times `t` [n], the predicted chunk."""
        return x + (1 - t)[:, None] * self.net(x, t, features)

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        z = torch.randn_like(target)
        level = torch.randint(self.levels, (len(z),), device=z.device)
        t = level / self.levels
        s = (level + 1) / self.levels
        with torch.no_grad():
            goal = self.clean(torch.lerp(z, target, s[:, None]), s, features)
        found = self.clean(torch.lerp(z, target, t[:, None]), t, features)
        return (found - goal).square() / (1.05 - t)[:, None]


def renoise(noise: Tensor, share: float, act: Leaf) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that maps a chunk to the next x, a mix of `share` of it and `noise`."""
    return lambda _, clean: torch.lerp(noise, act.bounded(clean), share)


@dataclass(frozen=True)
class MinimalIterativeConfig(chunk_sampler.Config):
    """Settings of a minimal iterative policy."""

    time: Annotated[float, Bound(above=0.0, below=1.0)] = 0.9  # t* of the second step


class MinimalIterative(ChunkSampler):
    """Minimal iterative policy. Noise [n, chunk * A] is z, zero without exploration."""

    def __init__(self, config: MinimalIterativeConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        self.time = config.time
        self.set_times(torch.tensor([0.0, config.time]))

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        noise = torch.zeros(n, self.size, device=self.range.radius.device)
        return noise.normal_() if explore else noise

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        features = self.features(obs)
        first, second = self.embedded().unbind()
        x = self.net.at(torch.zeros_like(noise), first, features)
        x = self.net.at(torch.lerp(noise, x, self.time), second, features)
        return self.to_actions(x), carry

    def strides(self, obs: Tensors, noise: Tensor) -> tuple[Tensor, list[SamplerStep]]:
        features = self.features(obs)
        first, second = self.embedded().unbind()
        return torch.zeros_like(noise), [
            SamplerStep(
                keep=0.0,
                remain=1.0,
                clean=lambda x: self.net.at(x, first, features),
                onward=lambda _, clean: torch.lerp(noise, clean, self.time),
            ),
            SamplerStep(
                keep=self.time,
                remain=1 - self.time,
                clean=lambda x: self.net.at(x, second, features),
                onward=lambda _, clean: clean,
            ),
        ]

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared errors of both steps."""
        first, second = self.embedded().unbind()
        noisy = torch.lerp(torch.randn_like(target), target, self.time)
        once = self.net.at(torch.zeros_like(target), first, features)
        twice = self.net.at(noisy, second, features)
        return (once - target).square() + (twice - target).square()


@dataclass(frozen=True, kw_only=True)
class OneStepConfig:
    """Settings of a one-step policy and its network."""

    flow: Node  # node of the policy to distil, whose noise has the size of its chunk
    chunk: Count | None = None  # actions of one decision (null: the flow's)
    hidden: tuple[Count, ...] = (256, 256, 256)  # units of each hidden layer
    activation: Literal["relu", "tanh", "gelu", "mish", "silu"] = "gelu"  # of the hidden layers
    layer_norm: bool = False  # layer normalisation in the hidden layers
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds


class OneStep(PolicyWrapper):
    """One-step policy. Noise [n, chunk * A] is standard normal."""

    flow: Policy

    def __init__(self, config: OneStepConfig, spec: Spec) -> None:
        super().__init__()
        require_continuous(spec)
        self.flow = build_with_chunk(config.flow, config.chunk, spec)
        self.spec = spec
        self.chunk = self.flow.chunk
        self.size = self.chunk * spec.act.size
        if self.flow.sample_noise(1).shape[1:] != (self.size,):
            raise ConfigError("flow must be a policy whose noise is as large as its chunk")
        if self.flow.initial(1):
            raise ConfigError("a one-step policy observes the present only: flow.obs_steps=1")
        self.encoder = Encoder(spec.obs, config.images, points=config.points)
        self.net = mlp(
            self.encoder.size + self.size,
            config.hidden,
            self.size,
            config.activation,
            config.layer_norm,
        )
        self.fresh = True

    @classmethod
    def build_around(cls, base: Policy, node: Mapping[str, Any]) -> Self:
        """Build `node` with a trained flow policy `base`, which keeps its normalisers."""
        policy = build({**node, "flow": base.node, "chunk": None}, cls, spec=base.spec)
        policy.flow.load_state_dict(base.state_dict())
        policy.fresh = False
        return policy

    def forward(self, obs: Tensors, noise: Tensor) -> Tensor:
        """Return mu(o, z) [n, size], not clipped to [-1, 1]; differentiable."""
        return self.net(torch.cat([self.encoder(obs), noise], 1))

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, self.size, device=self.encoder.norm.mean.device)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        actions = self.spec.act.bounded(self(obs, noise))
        return actions.view(-1, self.chunk, *self.spec.act.shape), carry

    @torch.no_grad()
    def teacher(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The flow's chunks [n, size] for the same noise."""
        return self.flow.act(obs, {}, noise)[0].flatten(1)

    def loss(self, batch: Tensors) -> Tensor:
        """The flow's own loss plus the squared distance to its chunks at new noise, [n]."""
        obs = under(batch, "obs")
        noise = self.sample_noise(len(batch["action"]))
        error = (self(obs, noise) - self.teacher(obs, noise)).square()
        distil = per_row(error.view_as(batch["action"]), batch["valid"])
        return self.flow.loss(batch) + distil

    def fit(self, rows: Tensors) -> None:
        """Set the normalisers; a pretrained flow keeps its own."""
        if self.fresh:
            self.flow.fit(rows)
        self.encoder.fit(rows)
