"""GRU (Cho et al., 2014) over sequences, with episodes that begin anywhere in them.

    r, z = sigma(x_rz + U_rz h + b_rz),  n = tanh(x_n + r (U_n h + b_n)),  h' = (1 - z) n + z h

`x` are the inputs after their own linear layer. `cell` is one step; `unroll` is the plain loop over
it; `unroll_cpu` is the same with a backward pass by hand, about twice as fast on a CPU.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def tanh(x: Tensor) -> Tensor:
    """tanh(x) = 2 sigma(2 x) - 1, to 1e-7: PyTorch's sigmoid is several times as fast on a CPU."""
    return torch.sigmoid(x * 2) * 2 - 1


def cell(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The next hidden state [B, W] of inputs `x` [B, 3 W] and the last one, `h` [B, W]."""
    size = h.shape[1]
    own = functional.linear(h, weight, bias)
    gates = torch.sigmoid(x[:, : 2 * size] + own[:, : 2 * size])
    reset = gates[:, :size]
    update = gates[:, size:]
    new = tanh(torch.addcmul(x[:, 2 * size :], reset, own[:, 2 * size :]))
    return torch.lerp(new, h, update)


def unroll(x: Tensor, h: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Hidden states [T, B, W] after each of the inputs `x` [T, B, 3 W], from `h` [B, W]; `keep`
    [T, B, 1] is 0 where an episode begins, 1 elsewhere."""
    memories: list[Tensor] = []
    for inputs, kept in zip(x, keep, strict=True):
        h = cell(inputs, h * kept, weight, bias)
        memories.append(h)
    return torch.stack(memories)


def unroll_cpu(x: Tensor, h: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`unroll` for a CPU; differentiable once, in everything but `keep`."""
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
