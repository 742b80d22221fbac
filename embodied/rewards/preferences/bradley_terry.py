"""Bradley-Terry model: an ensemble of scores fitted to pairwise preferences.

    P(second preferred) = sigmoid(S(second) - S(first)),   S = tanh(net(observation)) in [-1, 1]

Fitted by cross-entropy (Christiano et al., 2017); a tie has the target 1/2. The members differ in
their initial weights and in the order of the pairs.

HERON: a reward learned from a ranking of factors by importance, instead of weights.

    level l decides between transitions i, j iff |z_l(i) - z_l(j)| > margin_l std(z_l), larger wins;
    a tie at every level is dropped;   loss = E softplus(-(r(i) - r(j))) for i preferred to j

Bukharin et al., "Deep reinforcement learning with hierarchical reward modeling" (2023), with the
Bradley-Terry model as the reward itself. Preferences are computed on the agent's transitions, and
the model is fitted continually. Such preferences are not transitive near the margins, so that no
model agrees with all of them: see `accuracy`, measured before learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, NonNegative, Number, Positive
from embodied.core.build import ConfigError, Node
from embodied.core.device import forked
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.nn.fit import gradient_step
from embodied.nn.networks import Ensemble, mlp
from embodied.nn.normalizers import MeanStdNormalizer, RunningMeanStd
from embodied.rewards.handcrafted.factors import Factor
from embodied.rewards.intrinsic.curiosity import ObservationFeatures

CONVOLUTIONS = ((16, 5, 3), (32, 3, 2), (64, 3, 2), (128, 3, 2))  # channels, kernel, stride


@dataclass(frozen=True)
class FitConfig:
    """Settings of the ensemble and its fit, which ends early at the training accuracy `enough`."""

    members: Count = 3  # networks of the ensemble
    hidden: tuple[Count, ...] = (128, 128)  # units of the hidden layers; images have convolutions
    epochs: Count = 50  # largest number of passes over all pairs
    enough: Fraction = 0.97  # training accuracy above which a fit ends
    batch: Count = 64  # pairs per gradient step
    rate: Positive = 3e-4  # Adam's learning rate
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
Labels = tuple[Tensor, Tensor, Tensor]  # images [n, ...] of both, P(second preferred) [n]


def joined(parts: Sequence[Labels]) -> Labels:
    """Several sets of labels as one."""
    first, second, target = (torch.cat(each) for each in zip(*parts, strict=True))
    return first, second, target


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

    def _new_ensemble(self) -> tuple[Scores, torch.optim.Optimizer]:
        """A new ensemble and its optimiser."""
        net, how = scores_of(self.leaf, self.how, self.seed).to(self.device), self.how
        return net, torch.optim.Adam(net.parameters(), how.rate, weight_decay=how.decay)

    def __len__(self) -> int:
        return len(self.labels[2])

    @torch.no_grad()
    def each(self, images: Tensor, chunk: int = 512) -> Tensor:
        """Scores [E, N] of every member for observations [N, ...]."""
        parts = [self.net(part.to(self.device)).cpu() for part in images.split(chunk)]
        return torch.cat(parts, 1)

    def score(self, images: Tensor) -> Tensor:
        """Mean score [N] over the members."""
        return self.each(images).mean(0)

    def accuracy(self, labels: Labels) -> float:
        """Fraction of labels, without ties, that the scores agree with; NaN without any."""
        first, second, target = labels
        told = target != 0.5
        gain = self.score(second) - self.score(first)
        return float((((gain > 0).float() == target) & told).sum() / told.sum())

    def learn(self, new: Labels) -> dict[str, Tensor]:
        """Add labels and fit to all of them.

        `new_accuracy` is the accuracy on the new labels before they are learned.
        """
        metrics: dict[str, Tensor] = {}
        if len(self):
            metrics["new_accuracy"] = torch.tensor(self.accuracy(new))
            new = joined([self.labels, new])
        if self.how.fresh or not len(self):
            self.net, self.optimizer = self._new_ensemble()
            self.net.prepare(torch.cat(new[:2]).to(self.device))
        self.labels = new
        share = 0.0
        for _ in range(self.how.epochs):  # every member sees all pairs, each in its own order
            order = torch.rand(self.how.members, len(self), generator=self.random).argsort(1)
            for rows in order.split(self.how.batch, 1):
                one, two = (self.net(x[rows].to(self.device), per_member=True) for x in new[:2])
                loss = loss_of(one, two, new[2][rows].to(self.device))
                gradient_step(self.optimizer, loss)
            share = self.accuracy(new)
            if share > self.how.enough:
                break
        return metrics | {"train_accuracy": torch.tensor(share)}


TOP = 0.99  # quantile of the scores that gets a cost of 0


@dataclass(frozen=True)
class HeronConfig:
    """Settings of HERON. A `margin` is in standard deviations of its factor: 0 for a binary factor
    such as success. Both levels of the reward have the standard deviation `weight`."""

    factors: tuple[Node, ...]  # the most important first; with `weight` -1 if less is better
    leaves: tuple[str, ...] | None = None  # observations that are scored; null: all
    hidden: tuple[Count, ...] = (256, 256)  # units of the hidden layers
    lr: Positive = 1e-3  # Adam's learning rate
    rows: Count = 256  # transitions of a batch that are compared
    rivals: Count = 16  # other transitions that each is compared with
    rounds: Count = 4  # gradient steps per fit
    every: Count = 10  # updates of the learner between fits
    level: Literal["cost", "centred"] = "cost"  # at most 0, so delay never pays; or of mean 0
    weight: Number = 1.0  # standard deviation of the learned reward
    env_weight: Number = 0.0  # weight of the environment's reward


class Heron(Remembered, SummedReward):
    """Applied when transitions are sampled, to their next observations."""

    frozen = False
    remembered = (
        "net",
        "adam",
        "generator",
        "factor_moments",
        "features",
        "middle",
        "count",
        "metrics",
    )

    def __init__(self, config: HeronConfig, spec: Spec, device: torch.device, seed: int) -> None:
        if not config.factors:
            raise ConfigError("reward.factors needs at least one factor")
        self.config = config
        plain = [{k: v for k, v in node.items() if k != "margin"} for node in config.factors]
        self.factors = [Factor(node, spec) for node in plain]
        self.margins = torch.tensor([float(node.get("margin", 1.0)) for node in config.factors])
        self.features = ObservationFeatures(spec.obs, config.leaves, device)
        with forked(seed):
            self.net = mlp(self.features.size, config.hidden, 1).to(device)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=config.lr)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.factor_moments = RunningMeanStd(len(self.factors), device)
        self.middle = torch.zeros(3, device=device)  # mean, deviation, top of the scores
        self.middle[1] = 1.0
        self.count = 0
        self.metrics: dict[str, Tensor] = {}

    @torch.no_grad()
    def components(self, transitions: Tensors) -> Tensors:
        mean, std, top = self.middle
        zero = mean if self.config.level == "centred" else top
        learned = (self.score(transitions) - zero) / std
        if self.config.level == "cost":
            learned = learned.clamp(max=0)
        env = self.config.env_weight * transitions["reward"]
        return {"env": env, "preferred": self.config.weight * learned}

    def score(self, transitions: Tensors) -> Tensor:
        """The model's raw scores [N]."""
        return self.net(self.features(transitions, "next_obs"))[:, 0]

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        self.count += 1
        if (self.count - 1) % self.config.every == 0:
            self.metrics = self._fit(transitions)
        return self.metrics

    def _fit(self, transitions: Tensors) -> dict[str, Tensor]:
        n, device = len(transitions["reward"]), transitions["reward"].device
        drawn = torch.randperm(n, generator=self.generator, device=device)[: self.config.rows]
        transitions = {k: v[drawn] for k, v in transitions.items()}
        values = torch.stack([factor(transitions) for factor in self.factors], 1)
        self.factor_moments.update(values)
        self.features.update(transitions, "next_obs")
        first, second, wins, decided = self._compare(values)
        with torch.no_grad():
            gap = (self.score(transitions)[first] - self.score(transitions)[second]) * wins
            right = ((gap > 0) & (wins != 0)).float().sum() / (wins != 0).sum().clamp(min=1)
        loss = torch.zeros(())
        for _ in range(self.config.rounds):
            loss = preference_loss(self.score(transitions), first, second, wins)
            gradient_step(self.adam, loss)
        self._rescale(transitions)
        shares = {
            f"decided_{level}": (decided == level).float().mean()
            for level in range(len(self.factors))
        }
        return {"loss": loss.detach(), "accuracy": right, **shares}

    def _compare(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compares every transition with some others: (index, rival, winner, deciding level), [P]
        each."""
        n = len(values)
        first = torch.arange(n, device=values.device).repeat(self.config.rivals)
        ahead = torch.randint(
            1, max(n, 2), (len(first),), generator=self.generator, device=values.device
        )
        second = (first + ahead) % n
        margins = self.margins.to(values.device) * self.factor_moments.std
        wins, decided = preferences(values[first], values[second], margins)
        return first, second, wins, decided

    @torch.no_grad()
    def _rescale(self, transitions: Tensors) -> None:
        """Update the reward's zero and scale: the scale of a preference model only grows."""
        scores = self.score(transitions)
        std = scores.std(correction=0).clamp(min=1e-3)
        self.middle.copy_(torch.stack([scores.mean(), std, scores.quantile(TOP)]))


def preferences(one: Tensor, other: Tensor, margins: Tensor) -> tuple[Tensor, Tensor]:
    """(1 if `one` wins, -1 if `other` does, 0 for a tie; the deciding level, -1 for a tie) [P] of
    factors [P, K] in order of importance, and margins [K]."""
    gap = one - other
    decides = gap.abs() > margins
    level = decides.float().argmax(1)
    none = ~decides.any(1)
    wins = gap.gather(1, level[:, None])[:, 0].sign()
    return torch.where(none, 0.0, wins), torch.where(none, -1, level)


def preference_loss(scores: Tensor, first: Tensor, second: Tensor, wins: Tensor) -> Tensor:
    """Bradley-Terry loss: mean softplus(-(r_i - r_j)) over the pairs that are no ties."""
    gap = (scores[first] - scores[second]) * wins
    known = (wins != 0).float()
    return (functional.softplus(-gap) * known).sum() / known.sum().clamp(min=1)
