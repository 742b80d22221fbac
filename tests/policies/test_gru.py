"""The GRU with a backward pass by hand is the plain loop: values and gradients agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.policies.networks import gru

T, B, W = 7, 5, 6


def _inputs() -> list[Tensor]:
    """x, h, keep, weight and bias in float64; episodes begin in the middle."""
    torch.manual_seed(0)
    keep = (torch.rand(T, B, 1) > 0.3).double()
    shapes = ((T, B, 3 * W), (B, W), (3 * W, W), (3 * W,))
    x, h, weight, bias = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes)
    return [x, h, keep, weight, bias]


def _grads(unroll: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = unroll(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    wanted = [value for value in inputs if value.requires_grad]
    return [out, *torch.autograd.grad((out * weights).sum(), wanted)]


def test_both_agree() -> None:
    inputs = _inputs()
    for one, other in zip(_grads(gru.unroll, inputs), _grads(gru.unroll_cpu, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def test_the_gradient_is_the_difference_quotient() -> None:
    assert torch.autograd.gradcheck(gru.unroll_cpu, _inputs())


def test_tanh() -> None:
    x = torch.linspace(-20, 20, 10_001)
    torch.testing.assert_close(gru.tanh(x), torch.tanh(x), atol=2e-7, rtol=0)
