"""Gaussian: a multivariate normal distribution by its mean and Cholesky factor.

KL(p || q) = (tr(S_q^-1 S_p) + (m_q - m_p)' S_q^-1 (m_q - m_p) - d + log |S_q| - log |S_p|) / 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """`mean` [d]; `factor` [d, d]: the Cholesky factor of the covariance, with the logarithm of its
    diagonal in place of the diagonal."""

    mean: Tensor
    factor: Tensor

    def root(self) -> Tensor:
        """The Cholesky factor [d, d] of the covariance."""
        return torch.tril(self.factor, -1) + torch.diag(torch.diagonal(self.factor).exp())

    def flat(self) -> Tensor:
        """Parameter vector [d + d + d (d - 1) / 2]: mean, log-diagonal, elements below it."""
        below = torch.tril_indices(len(self.mean), len(self.mean), -1)
        return torch.cat([self.mean, torch.diagonal(self.factor), self.factor[*below]])

    @classmethod
    def unflat(cls, flat: Tensor, d: int) -> Gaussian:
        below = torch.tril_indices(d, d, -1)
        factor = torch.diag(flat[d : 2 * d]).index_put((below[0], below[1]), flat[2 * d :])
        return cls(flat[:d], factor)

    def stretched(self, by: Tensor) -> Gaussian:
        """The distribution with deviations scaled by `by` [d] and the same correlations."""
        root = self.root() * by[:, None]
        return Gaussian(self.mean, torch.tril(root, -1) + torch.diag(torch.diagonal(root).log()))


def log_density(gaussian: Gaussian, x: Tensor) -> Tensor:
    """Log-density [n] at x [n, d]."""
    d = len(gaussian.mean)
    off = torch.linalg.solve_triangular(gaussian.root(), (x - gaussian.mean).T, upper=False)
    volume = torch.diagonal(gaussian.factor).sum()
    return -0.5 * (off**2).sum(0) - volume - 0.5 * d * math.log(2 * math.pi)


def kl(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p || q)."""
    d, root = len(p.mean), q.root()
    both = torch.cat([p.root(), (p.mean - q.mean)[:, None]], 1)
    spread = torch.linalg.solve_triangular(root, both, upper=False)
    volume = torch.diagonal(q.factor).sum() - torch.diagonal(p.factor).sum()
    return 0.5 * ((spread**2).sum() - d) + volume
