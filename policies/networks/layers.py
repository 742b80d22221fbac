"""Layers: a small network as one differentiable step, for methods that update often.

The same arithmetic as layer by layer. Where batches are small most of an update is bookkeeping, and
on a CPU torch's tanh: a network of two layers of 64 takes half the time so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from embodied.nn.ensemble import tanh_
from embodied.nn.networks import mlp


def layers(
    size: int, hidden: Sequence[int], out: int, activation: str, layer_norm: bool
) -> nn.Sequential:
    """`mlp`, as one step where its activation is tanh or relu and nothing else is between."""
    net = mlp(size, hidden, out, activation, layer_norm)
    if layer_norm or activation not in ("tanh", "relu"):
        return net
    return Layers(*net, tanh=activation == "tanh")


class Layers(nn.Sequential):
    """Linear layers with tanh (or relu) between them."""

    def __init__(self, *parts: nn.Module, tanh: bool) -> None:
        super().__init__(*parts)
        self.tanh = tanh
        self.places = range(0, len(parts), 2)

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or input.ndim != 2:  # pyright: ignore[reportPrivateImportUsage]
            return super().forward(input)
        own = [self._modules[str(place)]._parameters for place in self.places]  # pyright: ignore[reportOptionalMemberAccess, reportPrivateUsage]
        parameters = [part["weight"] for part in own] + [part["bias"] for part in own]
        return cast(Tensor, Through.apply(input, self.tanh, *parameters))


class Through(torch.autograd.Function):
    """x W^T + b, tanh or relu, and again; as `embodied.nn.ensemble.Plain` for one network."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool, *parameters: Tensor) -> Tensor:
        count = len(parameters) // 2
        weights, biases, inputs = parameters[:count], parameters[count:], [x]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            hidden = torch.addmm(bias, inputs[-1], weight.t())
            inputs.append(tanh_(hidden) if tanh else hidden.relu_())
        ctx.tanh = tanh
        ctx.save_for_backward(*inputs, *weights)
        return torch.addmm(biases[-1], inputs[-1], weights[-1].t())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        count = len(ctx.saved_tensors) // 2
        inputs, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        of_weights: list[Tensor | None] = [None] * count
        of_biases: list[Tensor | None] = [None] * count
        for i in reversed(range(count)):
            if ctx.needs_input_grad[2 + i]:
                of_weights[i] = grad.t().mm(inputs[i])
                of_biases[i] = grad.sum(0)
            if i:
                grad = grad.mm(weights[i])
                if ctx.tanh:
                    torch.ops.aten.tanh_backward.grad_input(grad, inputs[i], grad_input=grad)
                else:
                    back = torch.ops.aten.threshold_backward.grad_input
                    back(grad, inputs[i], 0, grad_input=grad)
            elif ctx.needs_input_grad[0]:
                return (grad.mm(weights[0]), None, *of_weights, *of_biases)
        return (None, None, *of_weights, *of_biases)
