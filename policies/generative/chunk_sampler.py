"""ChunkSampler: base of the policies that turn noise into a chunk by the steps of a sampler.

It owns what flow, shortcut, consistency and diffusion policies have in common: the encoder of the
last `obs_steps` observations, the normaliser of the actions and the network that is asked at each
step. One encoder, with the same weights for all observed steps, makes the features of each step;
the network gets them side by side, oldest first.

Denoising networks from (noisy chunk, time, features) to a chunk: Transformer (DiT) and 1D U-Net.

`Transformer`: one token per step of the chunk; time and features modulate every layer (adaptive
layer normalisation, DiT; Peebles and Xie, 2023). `UNet`: 1D convolutions along the chunk, halving
its length and restoring it, conditioned by FiLM (Chi et al., 2023; Perez et al., 2018). Its
defaults are for a CPU; the authors use channels 256, 512, 1024, kernel 5 and 256 wide steps.

    h <- (1 + scale(c)) norm(h) + shift(c),   c = W [time, features].

A policy's setting `net` takes any subclass of `Timed`: it has `at(x, time, features)`, and uses the
embedding of times of its base class. It is built from its node with the context `chunk`, `action`
(numbers per step) and `features`. The policy defines the meaning of the output (noise, velocity,
...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Chunk, Count, Few, Units
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import device_of
from embodied.core.spec import Spec
from embodied.core.tensors import FRESH, HISTORY, Tensors, each, under, with_history
from embodied.nn.networks import own_network, per_row, sinusoid
from embodied.nn.normalizers import MinMaxNormalizer
from embodied.policies.encoded import require_continuous
from embodied.policies.networks.blocks import Attention, feedforward
from embodied.policies.networks.encoders import ImageConfig, PointConfig, make_encoder
from embodied.policies.wrappers.real_time_chunking import GuidedSampler

Net = Node | str | None  # another network, or the name of one that Python gave


def denoiser(
    net: Net, chunk: int, action: int, features: int, width: int, depth: int, time_dim: int
) -> Denoiser:
    """Build the network `net`; if None, a residual MLP of `width`, `depth` and `time_dim`. A name
    is an own network from [n, chunk * action + time_dim + features] to [n, chunk * action]."""
    if isinstance(net, str):
        return OwnDenoiser(net, chunk * action, features, time_dim)
    if net is None:
        return ResidualMlp(chunk * action, features, width, depth, time_dim)
    return build(net, Timed, chunk=chunk, action=action, features=features)


class Denoiser(nn.Module):
    """Base class of networks from (noisy chunk [n, D], time [n] in [0, 1], features [n, F]) to
    [n, D]. Diffusion and flow policies define the meaning of the output."""

    def __init__(self, time_dim: int) -> None:
        super().__init__()
        if time_dim < 2 or time_dim % 2:
            raise ConfigError(f"time_dim={time_dim} must be even: half sines, half cosines")
        self.time_dim = time_dim
        self.time = nn.Sequential(
            nn.Linear(time_dim, 2 * time_dim), nn.Mish(), nn.Linear(2 * time_dim, time_dim)
        )

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        return self.at(x, self.embed(t), features)

    def embed(self, t: Tensor) -> Tensor:
        """Time embeddings [n, time_dim] of times [n]; samplers compute all steps' at once."""
        return self.time(sinusoid(t, self.time_dim))

    def at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """`forward` with embedded times: [time_dim] for all samples, or [n, time_dim]."""
        raise NotImplementedError(f"{type(self).__name__} has no output")


class ResidualMlp(Denoiser):
    """A residual MLP of the noisy chunk, the embedded time and the features."""

    def __init__(self, size: int, features: int, width: int, depth: int, time_dim: int) -> None:
        super().__init__(time_dim)
        self.enter = nn.Linear(size + time_dim + features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, size)

    def at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        h = self.enter(torch.cat([x, time.expand(x.shape[0], -1), features], 1))
        for block in self.blocks:
            h = block(h)
        return self.leave(functional.mish(h))


class Block(nn.Module):
    """h + W2 mish(W1 mish(h))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.two(functional.mish(self.one(functional.mish(h))))


class Timed(Denoiser):
    """Base class of denoisers with a condition [n, width] of time and features."""

    def __init__(self, time_dim: int, features: int, width: int) -> None:
        super().__init__(time_dim)
        self.condition = nn.Sequential(nn.Linear(time_dim + features, width), nn.Mish())

    def conditioned(self, time: Tensor, features: Tensor) -> Tensor:
        """Condition c [n, width] from embedded times ([time_dim] or [n, time_dim]) and features."""
        return self.condition(torch.cat([time.expand(features.shape[0], -1), features], 1))


class OwnDenoiser(Timed):
    """The network `name`, of the noisy chunk, the embedded time and the features."""

    def __init__(self, name: str, size: int, features: int, time_dim: int) -> None:
        super().__init__(time_dim, features, time_dim)
        del self.condition
        self.net = own_network(name, size + time_dim + features, size)

    def at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        return self.net(torch.cat([x, time.expand(x.shape[0], -1), features], 1))


@dataclass(frozen=True)
class TransformerConfig:
    """Settings of a Transformer that denoises a chunk."""

    width: Units = 128  # units of a token
    depth: Few = 3  # layers
    heads: Few = 4  # attention heads of a layer
    time_dim: Units = 16  # size of the time embedding, even


class Transformer(Timed):
    """Transformer denoiser: one token per step of the chunk, full self-attention."""

    def __init__(self, config: TransformerConfig, chunk: int, action: int, features: int) -> None:
        super().__init__(config.time_dim, features, config.width)
        self.action = action
        width = config.width
        self.enter = nn.Linear(action, width)
        self.place = nn.Parameter(0.02 * torch.randn(chunk, width))
        self.layers = nn.ModuleList(Modulated(width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, action)

    def at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        condition = self.conditioned(time, features)
        h = self.enter(x.unflatten(1, (-1, self.action))) + self.place
        for layer in self.layers:
            h = layer(h, condition)
        return self.leave(self.norm(h)).flatten(1)


class Modulated(nn.Module):
    """A transformer layer with adaptive layer normalisation: scale and shift from a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, 4 * width)
        self.own = Attention(width, heads)
        self.each = feedforward(width)

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        """Return the next tokens [n, L, width] of `h` [n, L, width] and `condition` [n, width]."""
        scale, shift, last_scale, last_shift = self.modulate(condition)[:, None].chunk(4, 2)
        own = self.norm(h) * (1 + scale) + shift
        h = h + self.own(own, own)
        return h + self.each(self.norm(h) * (1 + last_scale) + last_shift)


@dataclass(frozen=True)
class UNetConfig:
    """Settings of a U-Net that denoises a chunk."""

    channels: tuple[Units, ...] = (64, 128)  # of each level, half as long as the last
    kernel: Count = 3  # width of a convolution in steps, odd
    groups: Count = 8  # of group normalisation
    width: Units = 128  # units of the condition
    time_dim: Units = 16  # size of the time embedding, even


class UNet(Timed):
    """1D U-Net denoiser for chunks of any length; odd lengths are rounded up when halved."""

    def __init__(self, config: UNetConfig, chunk: int, action: int, features: int) -> None:
        super().__init__(config.time_dim, features, config.width)
        if not config.channels or not config.kernel % 2:
            raise ConfigError(f"UNet needs channels and an odd kernel, got {config}")
        self.action = action
        ends = [action, *config.channels]
        pairs = list(zip(ends, config.channels, strict=False))
        self.down = nn.ModuleList(Film(a, b, config) for a, b in pairs)
        self.halve = nn.ModuleList(
            nn.Conv1d(c, c, 3, stride=2, padding=1) for c in config.channels[:-1]
        )
        self.middle = Film(ends[-1], ends[-1], config)
        ups = list(zip(config.channels[:0:-1], config.channels[-2::-1], strict=True))
        self.up = nn.ModuleList(Film(a + b, b, config) for a, b in ups)
        self.leave = nn.Conv1d(config.channels[0], action, 1)

    def at(self, x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        condition = self.conditioned(time, features)
        h = x.unflatten(1, (-1, self.action)).transpose(1, 2)
        kept = []
        for i, block in enumerate(self.down):
            h = block(h, condition)
            if i < len(self.halve):
                kept.append(h)
                h = self.halve[i](h)
        h = self.middle(h, condition)
        for block in self.up:
            skip = kept.pop()
            # Upsample by repetition; the result is one step too long if the length was odd.
            h = h.unsqueeze(3).expand(-1, -1, -1, 2).flatten(2)[:, :, : skip.shape[2]]
            h = block(torch.cat([h, skip], 1), condition)
        return self.leave(h).transpose(1, 2).flatten(1)


class Film(nn.Module):
    """Residual block of two convolutions, with FiLM conditioning (scale, shift) between them."""

    def __init__(self, channels: int, out: int, config: UNetConfig) -> None:
        super().__init__()
        if out % config.groups:
            raise ConfigError(f"channels={out} must be a multiple of groups={config.groups}")
        half = config.kernel // 2
        self.one = nn.Conv1d(channels, out, config.kernel, padding=half)
        self.norm = nn.GroupNorm(config.groups, out)
        self.modulate = nn.Linear(config.width, 2 * out)
        self.two = nn.Conv1d(out, out, config.kernel, padding=half)
        self.last = nn.GroupNorm(config.groups, out)
        self.short = nn.Conv1d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        """Map `h` [n, channels, L] to [n, out, L]."""
        scale, shift = self.modulate(condition)[:, :, None].chunk(2, 1)
        inner = functional.mish(self.norm(self.one(h))) * (1 + scale) + shift
        return self.short(h) + functional.mish(self.last(self.two(inner)))


def empty_history(
    spec: Spec, names: Sequence[str], steps: int, n: int, device: torch.device
) -> Tensors:
    """The carry of `n` episodes that begin: no past observations `names` of `steps` steps yet."""
    carry: Tensors = {FRESH: torch.ones(n, dtype=torch.bool, device=device)}
    for name in names:
        leaf = spec.obs[name]
        carry[HISTORY + name] = leaf.zeros(n, device)[:, None].repeat(
            1, steps, *[1] * len(leaf.shape)
        )
    return carry


class ObservesHistory(GuidedSampler):
    """A sampler whose decisions use the `past` observations `names` before the present one; they
    are in the carry (`core.history`). Diffusion Policy (Chi et al., 2023) uses 2 steps, DPPO,
    ReinFlow and Q-chunking 1."""

    past: int = 0
    names: Sequence[str] = ()

    def initial(self, n: int) -> Tensors:
        device = device_of(self)
        return empty_history(self.spec, self.names, self.past, n, device) if self.past else {}

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        return with_history(obs, carry), carry

    @property
    def augments(self) -> bool:
        return self.past > 0


@dataclass(frozen=True)
class Config:
    """Settings that all sampled policies share."""

    chunk: Chunk = 8  # actions of one decision
    width: Units = 256  # units of the residual MLP
    depth: Few = 2  # residual blocks of the MLP
    time_dim: Units = 16  # size of the time embedding, even
    net: Node | str | None = None  # another network, such as Transformer
    obs_steps: Count = 1  # observations that the policy sees, the present one included
    images: ImageConfig = field(default_factory=ImageConfig)  # encoder of images
    points: PointConfig = field(default_factory=PointConfig)  # encoder of point clouds
    extractor: str | None = None  # class of an own Encoder in place of the usual one


class ChunkSampler(ObservesHistory):
    """Base class of sampled policies. Noise [n, chunk * A] is the initial sample.

    A subclass sets `waves` with `set_times`, and has `act`, `strides` and `errors`.
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

    def errors(self, features: Tensor, target: Tensor) -> Tensor:
        """Squared errors [n, size] for normalised chunks `target` [n, size]."""
        raise NotImplementedError

    def loss(self, batch: Tensors) -> Tensor:
        """The mean of `errors` over the valid steps, [n]."""
        features = self.features(under(batch, "obs"))
        error = self.errors(features, self.range(batch["action"]).flatten(1))
        return per_row(error.view_as(batch["action"]), batch["valid"])

    def fit(self, rows: Tensors) -> None:
        self.encoder.fit(rows)
        self.range.fit(rows["action"].reshape(-1, self.spec.act.size))
