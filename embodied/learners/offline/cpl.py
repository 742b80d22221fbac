"""CPL: contrastive preference learning (Hejna et al., 2024): a policy from labelled pairs, offline.

Preferences are taken to follow the advantage, which the log-probability of a maximum-entropy policy
is: no reward and no value function is learned. With the score S = sum_t alpha log pi(a_t|s_t) of a
segment and the label y, the probability that the second one is preferred,

    L = -y log sigma(S_2 - lambda S_1) - (1 - y) log sigma(S_1 - lambda S_2)

With lambda < 1 segments of the data are likely in themselves: at lambda = 1 both scores may fall
together. First the share `clone` of the updates is behaviour cloning of all segments.

log pi is minus the policy's imitation loss, summed over action elements: of a deterministic policy
-|a - mu(s)|^2, a Gaussian of fixed width as in the paper. Differences from it: no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from embodied.core.bounds import Count, Fraction, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, under
from embodied.learners.acceleration import Acceleration
from embodied.learners.learner import Learner, RunPlan
from embodied.nn.optim import Adam


@dataclass(frozen=True)
class Config(Acceleration):
    batch_size: Count = 96  # pairs per update
    segment: Count = 64  # steps of a segment; no longer than an episode
    alpha: Positive = 0.1  # of the scores, which grow with the steps and the action elements
    bias: Fraction = 0.5  # lambda; 1: not conservative
    clone: Fraction = 0.4  # share of the updates that are behaviour cloning, before the others
    lr: PositiveFraction = 1e-4  # Adam's learning rate; both parts have an optimiser of their own


class Cpl(Learner):
    """`update` is one step of behaviour cloning or of the contrastive loss."""

    data = "offline"
    rows = "pairs"
    usual_policy = "deterministic"
    counters = ("done",)

    def __init__(self, config: Config, policy: Policy, run: RunPlan) -> None:
        super().__init__(config, policy)
        if type(policy).loss is Policy.loss or policy.chunk > 1:
            raise ConfigError(
                "learner=cpl compares single steps: it needs a policy with a loss and without "
                "action chunks, such as policy=deterministic"
            )
        self.done = 0
        self.cloned = round(config.clone * run.updates)
        weights = list(policy.parameters())
        # A policy's loss may leave out what its samples need (the deviation of a Gaussian).
        self.optims = {name: Adam(weights, config.lr, partial=True) for name in ("clone", "policy")}

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        clones = self.done < self.cloned
        self.done += 1
        return self._step(clones, batch)

    def _step(self, clones: bool, batch: Tensors) -> Tensors:
        loss, metrics = self._loss(clones, batch)
        self.descend("clone" if clones else "policy", loss)
        return metrics

    def _loss(self, clones: bool, batch: Tensors) -> tuple[Tensor, Tensors]:
        """The loss of this update, and metrics."""
        log_prob = self.log_prob(batch)
        first, second = (self.config.alpha * log_prob).sum(2).unbind(1)
        contrast = contrastive_loss(first, second, batch["label"], self.config.bias)
        right = ((second > first) == (batch["label"] > 0.5)) & (batch["label"] != 0.5)
        decided = (batch["label"] != 0.5).sum().clamp(min=1)
        metrics = {
            "clone_loss": -log_prob.detach().mean(),
            "contrastive_loss": contrast.detach(),
            "agreement": right.sum() / decided,  # of labels without ties
        }
        return -log_prob.mean() if clones else contrast, metrics

    def log_prob(self, batch: Tensors) -> Tensor:
        """log pi of every step, [n, 2, segment], up to constants."""
        shape = batch["action"].shape[:3]
        steps = {f"obs/{name}": v.flatten(0, 2) for name, v in under(batch, "obs").items()}
        action = batch["action"].flatten(0, 2)
        valid = torch.ones(len(action), 1, dtype=torch.bool, device=action.device)
        loss = self.policy.loss({**steps, "action": action[:, None], "valid": valid})
        return -loss.view(shape) * self.policy.spec.act.size


def contrastive_loss(first: Tensor, second: Tensor, label: Tensor, bias: float) -> Tensor:
    """The mean of -y log sigma(S_2 - bias S_1) - (1 - y) log sigma(S_1 - bias S_2); all [n]."""
    later = softplus(bias * first - second)
    earlier = softplus(bias * second - first)
    return (label * later + (1 - label) * earlier).mean()
