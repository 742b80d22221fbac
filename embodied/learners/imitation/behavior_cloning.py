"""Behaviour cloning (BC) of any policy with an imitation loss, with an EMA of the weights.

The policy that acts and is saved has an exponential moving average of the trained weights, which
diffusion and flow policies need (Chi et al., 2023):

    averaged <- ema averaged + (1 - ema) trained

Differences from Diffusion Policy's published code: the decay is (1 + k) / (10 + k) up to `ema`
after k updates, not 1 - (1 + k)^-0.75; Adam without weight decay or a warm-up of the rate.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Bound, Count, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner, RunPlan, soft_update
from embodied.nn.optim import Adam


@dataclass(frozen=True)
class Config:
    batch_size: Count = 256  # action chunks per update
    lr: PositiveFraction = 1e-3  # AdamW's learning rate; a cosine to a tenth of it over the run
    weight_decay: NonNegative = 1e-6  # of AdamW
    ema: Annotated[float, Bound(0.0, below=1.0)] = 0.995  # decay of the moving average; 0: none
    grad_clip: Positive = 10.0  # largest norm of the gradient


class BehaviorCloning(Learner):
    """Behaviour cloning: each update is one AdamW step on the policy's mean imitation loss."""

    data = "offline"
    usual_policy = "flow"
    rows = "chunks"
    counters = ("done",)

    def __init__(self, config: Config, policy: Policy, run: RunPlan) -> None:
        super().__init__(config)
        self.online = policy
        self.policy = copy.deepcopy(policy).requires_grad_(False)
        decay = config.weight_decay
        weights = policy.parameters()
        adam = Adam(weights, config.lr, weight_decay=decay, decoupled=True, local=True)
        self.optims["adam"] = adam
        self.done = 0
        self.total = max(run.updates, 1)

    def loss(self, batch: Tensors) -> Tensor:
        """The number that an update lowers."""
        return self.online.loss(batch).mean()

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        self.optims["adam"].param_groups[0]["lr"] = cosine(self.config.lr, self.done / self.total)
        loss = self.loss(batch)
        loss.backward()
        distributed.average_gradients(self.online.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.online.parameters(), self.config.grad_clip)
        self.optims["adam"].step()
        self.done += 1
        ema = min(self.config.ema, (1 + self.done) / (10 + self.done))
        soft_update(list(self.policy.parameters()), list(self.online.parameters()), 1 - ema)
        for own, other in zip(self.policy.buffers(), self.online.buffers(), strict=True):
            own.copy_(other)  # statistics of batch normalisation
        return {"loss": loss.detach(), "grad_norm": norm}

    def fit(self, transitions: Tensors) -> None:
        self.online.fit(transitions)
        self.policy.fit(transitions)


def cosine(lr: float, progress: float) -> float:
    """Cosine decay from `lr` at progress 0 to `lr` / 10 at progress 1, then constant."""
    return lr * (0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


def behaviour(transitions: Tensors, policy: Policy) -> Tensors:
    """Convert transitions with `action` [n, H * A] to the form of `policy.loss`: `action` [n, H, A]
    and `valid` [n, H], the steps that were executed before the episode ended (`executed_steps`).
    ConfigError if the actions are not whole chunks of the policy."""
    action = transitions["action"]
    shape = policy.spec.act.shape
    if action.shape[1] != policy.chunk * policy.spec.act.size:
        raise ConfigError(
            f"transitions hold {action.shape[1] // policy.spec.act.size} steps per decision and "
            f"policy.chunk is {policy.chunk}: leave execute out, as this learner needs whole chunks"
        )
    action = action.reshape(-1, policy.chunk, *shape)
    return {
        **{k: v for k, v in transitions.items() if k.startswith("obs/")},
        "action": action,
        "valid": valid_steps(transitions, policy.chunk),
    }


def valid_steps(transitions: Tensors, chunk: int) -> Tensor:
    """Return which steps [n, H] (bool) of the transitions' chunks were executed: all, unless the
    episode ended within a chunk. With H = 1 there is no `executed_steps` [n]: all are valid."""
    action = transitions["action"]
    if chunk == 1:
        return torch.ones(len(action), 1, dtype=torch.bool, device=action.device)
    return torch.arange(chunk, device=action.device) < transitions["executed_steps"][:, None]
