"""The gradient of J(theta*(phi)) in phi, where theta* maximises an inner objective V(theta, phi).

At the maximum dV/dtheta = 0, and so by the implicit function theorem

    dtheta*/dphi = -H^{-1} A,   H = d^2 V / dtheta^2,   A = d^2 V / dtheta dphi
    dJ/dphi = u^T A,            (damping I - H) u = dJ/dtheta

u is found by products of H with vectors (Pearlmutter, 1994), so no matrix is made. `damping` makes
up for an H that is not negative definite, as away from the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vector = list[Tensor]
"""A tensor for each tensor of theta."""
Product = Callable[[Vector], Vector]
"""M v of a vector v, for a symmetric matrix M."""
Solver = Callable[[Product, Vector], Vector]
"""An approximation of the u for which M u = v, from M and v."""


def implicit_gradient(
    inner: Tensor,
    slopes: Sequence[Tensor],
    theta: Sequence[Tensor],
    phi: Sequence[Tensor],
    solve: Solver,
    damping: float = 0.0,
) -> Vector:
    """dJ/dphi through theta*, one tensor for each of `phi`.

    `inner`: V (a scalar), differentiable twice in `theta` and then in `phi`, at about its maximum
    in `theta`. `slopes`: dJ/dtheta, one for each of `theta`. No `.grad` is changed.
    """
    ascent = torch.autograd.grad(inner, theta, create_graph=True, materialize_grads=True)

    def product(vector: Vector) -> Vector:
        turned = torch.autograd.grad(
            ascent, theta, vector, retain_graph=True, materialize_grads=True
        )
        return [damping * v - h for v, h in zip(vector, turned, strict=True)]

    solution = solve(product, [slope.detach() for slope in slopes])
    return list(torch.autograd.grad(ascent, phi, solution, materialize_grads=True))


def dot(one: Vector, other: Vector) -> Tensor:
    """The inner product, a scalar."""
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()


def conjugate_gradient(steps: int, tolerance: float = 1e-10) -> Solver:
    """At most `steps` of the method of conjugate gradients, from 0.

    It ends where the squared remainder is below `tolerance` times that of 0, and before a direction
    along which M is not positive; where that is the first one, the solution is the right side.
    """

    def solve(product: Product, vector: Vector) -> Vector:
        solution = [torch.zeros_like(v) for v in vector]
        remainder = [v.clone() for v in vector]
        direction = [v.clone() for v in vector]
        size = first = dot(remainder, remainder)
        for step in range(steps):
            if size <= tolerance * first:
                break
            turned = product(direction)
            curvature = dot(direction, turned)
            if curvature <= 0:
                return vector if step == 0 else solution
            length = size / curvature
            solution = [s + length * d for s, d in zip(solution, direction, strict=True)]
            remainder = [r - length * t for r, t in zip(remainder, turned, strict=True)]
            before, size = size, dot(remainder, remainder)
            direction = [r + size / before * d for r, d in zip(remainder, direction, strict=True)]
        return solution

    return solve


def neumann(terms: int, step: float) -> Solver:
    """u = step sum_{i < terms} (I - step M)^i v: theta* replaced by what `terms` steps of gradient
    ascent of size `step` make of theta; a single term looks one step ahead. It converges where the
    eigenvalues of M are between 0 and 2 / step."""

    def solve(product: Product, vector: Vector) -> Vector:
        term = [step * v for v in vector]
        total = term
        for _ in range(terms - 1):
            turned = product(term)
            term = [v - step * t for v, t in zip(term, turned, strict=True)]
            total = [s + v for s, v in zip(total, term, strict=True)]
        return total

    return solve
