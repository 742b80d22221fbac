"""DPO of generative policies: a cloned policy is moved towards what is preferred, offline.

Rafailov et al. (2023); for diffusion models Wallace et al. (2024); as in RAPL (Tian et al., 2024)
of a robot's policy, with pairs of its own rollouts that a reward ranked. With the imitation loss l
(the denoising error) of a segment, d = l_theta - l_ref against the policy as it began, and the
label y, the probability that the second segment is preferred,

    L = -y log sigma(beta (d_1 - d_2)) - (1 - y) log sigma(beta (d_2 - d_1))

Both losses of a segment are of the same noise: their difference has far less variance than each.
A segment is of several chunks, and its loss is their mean.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from embodied.core.bounds import Count, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.device import forked
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, under
from embodied.learners.learner import Learner
from embodied.nn.optim import Adam


@dataclass(frozen=True)
class Config:
    """Settings of the preference fine-tuning."""

    batch_size: Count = 32  # pairs per update
    segment: Count = 24  # steps of a segment, a multiple of the policy's chunk
    beta: Positive = 20.0  # how fast a preference saturates with d; larger: nearer to the base
    lr: PositiveFraction = 1e-4  # Adam's learning rate


class Dpo(Learner):
    """`update` is one step on labelled pairs; the policy is one of `init=RUN`."""

    data = "offline"
    rows = "pairs"
    usual_policy = "diffusion"

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        if type(policy).loss is Policy.loss:
            raise ConfigError(
                "learner=dpo compares imitation losses: it needs a policy with one, such as "
                "policy=diffusion"
            )
        if config.segment % policy.chunk:
            raise ConfigError(
                f"learner.segment={config.segment} should be a multiple of the policy's "
                f"chunk={policy.chunk}"
            )
        self.reference = copy.deepcopy(policy).eval().requires_grad_(False)
        self.optims = {"policy": Adam(policy.parameters(), config.lr, partial=True)}

    def fit(self, transitions: Tensors) -> None:
        """The normalisers stay those of the base policy."""

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        chunks = self.chunks(batch)
        with forked(), torch.no_grad():  # the same noise for both
            before = self.errors(self.reference, chunks)
        gain = self.errors(self.policy, chunks) - before
        logit = self.config.beta * (gain[:, 0] - gain[:, 1])
        label = batch["label"]
        loss = binary_cross_entropy_with_logits(logit, label)
        self.descend("policy", loss)
        right = ((logit > 0) == (label > 0.5)) & (label != 0.5)
        return {
            "loss": loss.detach(),
            "error_gain": gain.detach().mean(),  # above 0: worse at all of the data
            "agreement": right.sum() / (label != 0.5).sum().clamp(min=1),
        }

    def chunks(self, batch: Tensors) -> Tensors:
        """The decisions of the segments, [n, 2, segment / chunk] of them, flat: `obs/*` at their
        first steps, `action` and `valid` of chunks."""
        chunk = self.policy.chunk
        obs = {
            f"obs/{name}": v[:, :, ::chunk].flatten(0, 2) for name, v in under(batch, "obs").items()
        }
        action = batch["action"].unflatten(2, (-1, chunk)).flatten(0, 2)
        valid = torch.ones(action.shape[:2], dtype=torch.bool, device=action.device)
        return {**obs, "action": action, "valid": valid}

    def errors(self, policy: Policy, chunks: Tensors) -> Tensor:
        """The mean loss [n, 2] of the decisions of each segment."""
        per_segment = self.config.segment // policy.chunk
        return policy.loss(chunks).view(-1, 2, per_segment).mean(2)
