"""The learned scores of preferences.

The scores are a Bradley-Terry model, fitted by cross-entropy (Christiano et al., 2017):

    P(second preferred) = sigmoid(S(second) - S(first)),   S = tanh(net(observation)) in [-1, 1]

A tie has the target 1/2. The members differ in their initial weights and in the order of the pairs.
Of segments (Christiano et al., 2017; PEBBLE, Lee et al., 2021) the sums of the scores are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Few, Fraction, NonNegative, PositiveFraction, Units
from embodied.core.device import forked
from embodied.core.remembered import Remembered
from embodied.core.spec import Leaf
from embodied.nn.networks import Ensemble
from embodied.nn.normalizers import MeanStdNormalizer
from embodied.nn.optim import Adam, gradient_step
from embodied.rewards.preferences.labellers import Labels, joined

CONVOLUTIONS = ((16, 5, 3), (32, 3, 2), (64, 3, 2), (128, 3, 2))  # channels, kernel, stride


@dataclass(frozen=True)
class FitConfig:
    """Settings of the ensemble and its fit, which ends early at the training accuracy `enough`."""

    members: Few = 3  # networks of the ensemble
    hidden: tuple[Units, ...] = (128, 128)  # units of the hidden layers; images have convolutions
    epochs: Count = 50  # largest number of passes over all pairs
    enough: Fraction = 0.97  # training accuracy above which a fit ends
    batch: Count = 64  # pairs per gradient step
    rate: PositiveFraction = 3e-4  # Adam's learning rate
    decay: NonNegative = 0.0  # Adam's weight decay
    fresh: bool = True  # reinitialise with every set of labels; else wrong labels are memorised


class Vectors(nn.Module):
    """Scores of vectors, [N, size] or [E, N, size] to [E, N]."""

    def __init__(self, leaf: Leaf, fit: FitConfig) -> None:
        super().__init__()
        self.norm = MeanStdNormalizer(leaf.size)
        self.net = Ensemble(fit.members, leaf.size, fit.hidden)

    def prepare(self, images: Tensor) -> None:
        """Fit the normaliser to observations [N, ...]."""
        self.norm.fit(images.flatten(1))

    def forward(self, images: Tensor, per_member: bool = False) -> Tensor:
        return self.net(self.norm(images.float().flatten(2 if per_member else 1))).squeeze(2).tanh()


class Pictures(nn.Module):
    """Scores of images, uint8 [N, H, W, C] or [E, N, H, W, C] to [E, N]; the members' convolutions
    are groups of one convolution."""

    def __init__(self, leaf: Leaf, fit: FitConfig) -> None:
        super().__init__()
        self.members = e = fit.members
        sizes = [leaf.shape[2], *(channels for channels, _, _ in CONVOLUTIONS)]
        layers: list[nn.Module] = []
        side = leaf.shape[:2]
        for (inputs, outputs), (_, kernel, stride) in zip(
            pairwise(sizes), CONVOLUTIONS, strict=True
        ):
            if min(side) < kernel:
                break  # small images need fewer layers
            layers += [nn.Conv2d(e * inputs, e * outputs, kernel, stride, groups=e), nn.ReLU()]
            side = tuple((pixels - kernel) // stride + 1 for pixels in side)
        self.layers = nn.Sequential(*layers)
        width = sizes[len(layers) // 2] * math.prod(side)
        self.head = Ensemble(e, width, ())

    def prepare(self, images: Tensor) -> None:
        """Images need no normaliser."""

    def forward(self, images: Tensor, per_member: bool = False) -> Tensor:
        pictures = images.float().div_(255)
        if per_member:
            pictures = pictures.permute(1, 0, 4, 2, 3).flatten(1, 2)
        else:
            pictures = pictures.permute(0, 3, 1, 2).repeat(1, self.members, 1, 1)
        features = self.layers(pictures).unflatten(1, (self.members, -1)).flatten(2)
        return self.head(features.transpose(0, 1)).squeeze(2).tanh()


Scores = Vectors | Pictures
PolicyTerm = Callable[[Scores], Tensor]
"""A further loss of a fit (a scalar), of the scores that are fitted."""


def scores_of(leaf: Leaf, fit: FitConfig, seed: int) -> Scores:
    """An ensemble for observations like `leaf`; deterministic given the seed."""
    with forked(seed):
        return Pictures(leaf, fit) if leaf.is_image else Vectors(leaf, fit)


def loss_of(first: Tensor, second: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of scores [E, b] with targets [E, b], summed over the members."""
    error = functional.binary_cross_entropy_with_logits(second - first, target, reduction="none")
    return error.mean(1).sum()


class Ranker(Remembered):
    """The ensemble together with all labels so far."""

    remembered = ("net", "optimizer", "random", "labels")

    def __init__(self, leaf: Leaf, how: FitConfig, device: torch.device, seed: int) -> None:
        self.leaf = leaf
        self.how = how
        self.device = device
        self.seed = seed
        self.random = torch.Generator().manual_seed(seed)
        self.labels: Labels = (torch.empty(0), torch.empty(0), torch.empty(0))
        self.net, self.optimizer = self._new_ensemble()

    def _new_ensemble(self) -> tuple[Scores, Adam]:
        net, how = scores_of(self.leaf, self.how, self.seed).to(self.device), self.how
        return net, Adam(net.parameters(), how.rate, weight_decay=how.decay, local=True)

    def __len__(self) -> int:
        return len(self.labels[2])

    @torch.no_grad()
    def each(self, images: Tensor, chunk: int = 512) -> Tensor:
        """Scores [E, N] of every member for observations [N, ...]."""
        return torch.cat([self.net(part.to(self.device)).cpu() for part in images.split(chunk)], 1)

    def score(self, images: Tensor) -> Tensor:
        """Mean score [N] over the members."""
        return self.each(images).mean(0)

    def sums(self, images: Tensor) -> Tensor:
        """Sums [n] of the scores of segments of observations [n, steps, ...]."""
        return self.score(images.flatten(0, 1)).view(images.shape[:2]).sum(1)

    def accuracy(self, labels: Labels) -> float:
        """Fraction of labels, without ties, that the scores agree with; NaN without any."""
        first, second, target = labels
        told = target != 0.5
        gain = self.sums(second) - self.sums(first)
        return float((((gain > 0).float() == target) & told).sum() / told.sum())

    def learn(self, new: Labels, policy_term: PolicyTerm | None = None) -> dict[str, Tensor]:
        """Add labels of segments [n, steps, ...] and fit to all of them; `policy_term` is added to
        the loss of each step.

        `new_accuracy` is the accuracy on the new labels before they are learned.
        """
        metrics: dict[str, Tensor] = {}
        if len(self):
            metrics["new_accuracy"] = torch.tensor(self.accuracy(new))
            new = joined([self.labels, new])
        if self.how.fresh or not len(self):
            self.net, self.optimizer = self._new_ensemble()
            self.net.prepare(torch.cat(new[:2]).flatten(0, 1).to(self.device))
        self.labels = new
        share = 0.0
        for _ in range(self.how.epochs):  # every member sees all pairs, each in its own order
            order = torch.rand(self.how.members, len(self), generator=self.random).argsort(1)
            for rows in order.split(self.how.batch, 1):
                one, two = (self._sums_per_member(x[rows].to(self.device)) for x in new[:2])
                loss = loss_of(one, two, new[2][rows].to(self.device))
                if policy_term is not None:
                    loss = loss + policy_term(self.net)
                gradient_step(self.optimizer, loss)
            share = self.accuracy(new)
            if share > self.how.enough:
                break
        return metrics | {"train_accuracy": torch.tensor(share)}

    def _sums_per_member(self, images: Tensor) -> Tensor:
        """Sums [E, b] of each member's scores of its own segments [E, b, steps, ...]."""
        return self.net(images.flatten(1, 2), per_member=True).view(images.shape[:3]).sum(2)
