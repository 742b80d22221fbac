"""Transformer layers of denoisers and of ACT (Vaswani et al., 2017).

x + MHA(LN(x)), then with a memory m: x + MHA(LN(x), m), then x + W2 gelu(W1 LN(x)). Pre-layer
normalisation (Xiong et al., 2020) trains without learning-rate warm-up. No dropout: decisions are
deterministic.

GRU (Cho et al., 2014) over sequences, with episodes that begin anywhere in them.

    r, z = sigma(x_rz + U_rz h + b_rz),  n = tanh(x_n + r (U_n h + b_n)),  h' = (1 - z) n + z h

`x` are the inputs after their own linear layer. `cell` is one step; `unroll` is the plain loop over
it; `unroll_cpu` is the same with a backward pass by hand, about twice as fast on a CPU.

ResNet backbones with torchvision's parameter names (He et al., 2016), to load trained weights.

The result of `resnet` ends with the last feature map; the classifier is left out. `norm` makes the
normalisation layer of a number of channels: `nn.BatchNorm2d`, `FrozenBatchNorm`, or groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        """Returns [n, L, width]; `seen` [n, M] (bool): tokens of the memory that are seen, by
        every query; [n, L, M]: by each."""
        query = self._split(self.query(x))
        key, value = map(self._split, self.key_value(memory).chunk(2, 2))
        mask = None if seen is None else seen.view(len(seen), 1, -1, seen.shape[-1])
        found = functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(found.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


def feedforward(width: int) -> nn.Sequential:
    """The MLP of a transformer layer."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class AttentionLayer(nn.Module):
    """One transformer layer: self-attention, (if `cross`) cross-attention to a memory, MLP."""

    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own = Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads) if cross else None
        self.last_norm = nn.LayerNorm(width)
        self.each = feedforward(width)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        seen: Tensor | None = None,
        memory_seen: Tensor | None = None,
    ) -> Tensor:
        """`seen` [n, L] (bool): which of the layer's own tokens are attended to; `memory_seen`
        [n, M] or [n, L, M]: which of the memory's."""
        own = self.norm(x)
        x = x + self.own(own, own, seen)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, memory_seen)
        return x + self.each(self.last_norm(x))


def fast_tanh(x: Tensor) -> Tensor:
    """tanh(x) = 2 sigma(2 x) - 1, to 1e-7: PyTorch's sigmoid is several times as fast on a CPU."""
    return torch.sigmoid(x * 2) * 2 - 1


def gru_cell(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The next hidden state [B, W] of inputs `x` [B, 3 W] and the last one, `h` [B, W]."""
    size = h.shape[1]
    own = functional.linear(h, weight, bias)
    gates = torch.sigmoid(x[:, : 2 * size] + own[:, : 2 * size])
    reset = gates[:, :size]
    update = gates[:, size:]
    new = fast_tanh(torch.addcmul(x[:, 2 * size :], reset, own[:, 2 * size :]))
    return torch.lerp(new, h, update)


def unroll_gru(x: Tensor, h: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Hidden states [T, B, W] after each of the inputs `x` [T, B, 3 W], from `h` [B, W]; `keep`
    [T, B, 1] is 0 where an episode begins, 1 elsewhere."""
    memories: list[Tensor] = []
    for inputs, kept in zip(x, keep, strict=True):
        h = gru_cell(inputs, h * kept, weight, bias)
        memories.append(h)
    return torch.stack(memories)


def unroll_gru_cpu(x: Tensor, h: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`unroll_gru` for a CPU; differentiable once, in everything but `keep`."""
    return cast(Tensor, _Unroll.apply(x, h, keep, weight, bias))


class _Unroll(torch.autograd.Function):
    """Keeps the gates of all steps, so that the gradient of the weights is one product."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, h: Tensor, keep: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        steps = len(x)
        rows = x.shape[1]
        size = h.shape[1]
        before, after, new = (x.new_empty(steps, rows, size) for _ in range(3))
        own = x.new_empty(steps, rows, 3 * size)
        gates = x.new_empty(steps, rows, 2 * size)
        across = weight.t().contiguous()
        for t in range(steps):
            torch.mul(h, keep[t], out=before[t])
            torch.addmm(bias, before[t], across, out=own[t])
            torch.add(x[t, :, : 2 * size], own[t, :, : 2 * size], out=gates[t]).sigmoid_()
            reset = gates[t, :, :size]
            update = gates[t, :, size:]
            torch.addcmul(x[t, :, 2 * size :], reset, own[t, :, 2 * size :], out=new[t])
            new[t].mul_(2).sigmoid_().mul_(2).sub_(1)
            h = torch.lerp(new[t], before[t], update, out=after[t])
        ctx.save_for_backward(keep, weight, before, own[:, :, 2 * size :], gates, new)
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        keep, weight, before, own_new, gates, new = ctx.saved_tensors
        steps, rows, size = new.shape
        # Factors of all steps at once: d gates / d sums, d new / d sum, and h - n.
        slope = gates * (1 - gates)
        bend = 1 - new * new
        apart = before - new
        to_own = grad.new_empty(steps, rows, 3 * size)
        to_x_new = grad.new_empty(steps, rows, size)
        back = grad.new_zeros(rows, size)
        for t in range(steps - 1, -1, -1):
            back += grad[t]
            reset = gates[t, :, :size]
            update = gates[t, :, size:]
            inner = to_x_new[t]
            torch.addcmul(back, back, update, value=-1, out=inner).mul_(bend[t])
            to_rz = to_own[t, :, : 2 * size]
            torch.mul(inner, own_new[t], out=to_rz[:, :size])
            torch.mul(back, apart[t], out=to_rz[:, size:])
            to_rz *= slope[t]
            torch.mul(inner, reset, out=to_own[t, :, 2 * size :])
            back = torch.addmm(back * update, to_own[t], weight).mul_(keep[t])
        flat = to_own.flatten(0, 1)
        to_x = torch.cat([to_own[:, :, : 2 * size], to_x_new], 2)
        return to_x, back, None, flat.t() @ before.flatten(0, 1), flat.sum(0)


Norm = Callable[[int], nn.Module]
DEPTHS: dict[str, tuple[int, int, int, int]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
BOTTLENECK = ("resnet50", "resnet101", "resnet152")


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with fixed statistics and affine parameters, all of them buffers."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [n, C, H, W]."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def group_norm(channels: int) -> nn.Module:
    """Group normalisation with 16 channels a group."""
    return nn.GroupNorm(channels // 16, channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    widening = 1

    def __init__(self, channels: int, width: int, stride: int, dilation: int, norm: Norm) -> None:
        super().__init__()
        if dilation > 1:
            raise ConfigError("dilation needs a ResNet of bottleneck blocks: resnet50 and larger")
        self.conv1 = conv(channels, width, 3, stride)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = norm(width)
        self.relu = nn.ReLU()
        self.downsample = shortcut(channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return self.relu(h + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, and a shortcut."""

    widening = 4

    def __init__(self, channels: int, width: int, stride: int, dilation: int, norm: Norm) -> None:
        super().__init__()
        wide = width * self.widening
        self.conv1 = conv(channels, width, 1)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, stride, dilation)
        self.bn2 = norm(width)
        self.conv3 = conv(width, wide, 1)
        self.bn3 = norm(wide)
        self.relu = nn.ReLU()
        self.downsample = shortcut(channels, wide, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return self.relu(h + (x if self.downsample is None else self.downsample(x)))


def resnet(name: str, norm: Norm, dilate_last: bool = False) -> nn.Sequential:
    """The layers up to the last feature map, named as in torchvision (conv1, bn1, ..., layer4).

    `dilate_last`: dilation instead of a stride in `layer4`. ConfigError for an unknown name.
    """
    if name not in DEPTHS:
        raise ConfigError(f"there is no backbone {name}; there are {', '.join(DEPTHS)}")
    block = Bottleneck if name in BOTTLENECK else BasicBlock
    layers = nn.Sequential()
    layers.add_module("conv1", nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False))
    layers.add_module("bn1", norm(64))
    layers.add_module("relu", nn.ReLU())
    layers.add_module("maxpool", nn.MaxPool2d(3, stride=2, padding=1))
    channels = 64
    for i, depth in enumerate(DEPTHS[name]):
        width = 64 * 2**i
        stride = 1 if i == 0 else 2
        dilated = dilate_last and i == 3
        parts = nn.Sequential()
        for j in range(depth):
            step = stride if j == 0 and not dilated else 1
            parts.append(block(channels, width, step, 2 if dilated and j else 1, norm))
            channels = width * block.widening
        layers.add_module(f"layer{i + 1}", parts)
    return layers


def channels_of(name: str) -> int:
    """The channels of the last feature map of `resnet(name)`."""
    return 512 * (4 if name in BOTTLENECK else 1)


def conv(channels: int, out: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size where the stride is 1."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(channels, out, kernel, stride, padding, dilation, bias=False)


def shortcut(channels: int, out: int, stride: int, norm: Norm) -> nn.Sequential | None:
    """The projection of a shortcut whose input has another shape than its output."""
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(conv(channels, out, 1, stride), norm(out))
