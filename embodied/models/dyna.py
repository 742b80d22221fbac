"""Dyna: updates from transitions that a model imagines, from states of the replay buffer.

Dyna (Sutton, 1991), in the controlled form of "The Benefits of Model-Based Generalization" (Young
et al., 2023): a batch of n transitions has n / k starts, drawn from the replay buffer, and k steps
of the policy in the model from each. A batch of experience replay has n transitions of the same
buffer, so that both have equal budgets: as many transitions, updates and environment steps.

The paper weights the steps after a predicted termination by the probability of no termination; here
a rollout that ends goes on at another start, so that all n transitions count. The model is fitted
again, from its present parameters, once in `every` batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.core import tensors as tt
from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.models.dynamics import Dynamics, LatentDynamics


@dataclass(frozen=True)
class Config:
    """Settings of imagined updates."""

    model: Node  # the model and its settings (embodied.models)
    steps: Count = 5  # k: steps of a rollout
    every: Count = 1000  # batches between two fits of the model


class Dyna:
    """A `Source` of imagined transitions, and its model. `policy` acts with its exploration."""

    def __init__(
        self,
        config: Config,
        replay: ReplayBuffer,
        policy: Policy,
        gamma: float,
        device: torch.device,
    ) -> None:
        self.config = config
        self.replay = replay
        self.policy = policy
        self.gamma = gamma
        self.model = build(config.model, Dynamics, spec=policy.spec).to(device)
        if isinstance(self.model, LatentDynamics) or {*self.model.spec.obs} != {*policy.spec.obs}:
            raise ConfigError(
                "data.imagined needs a model that predicts every observation of the policy: "
                "embodied.models.ensemble.MlpEnsemble with obs=null"
            )
        if policy.chunk > 1 or policy.initial(1):
            raise ConfigError(
                "data.imagined steps a policy without memory one step at a time: policy.chunk=1"
            )
        self.batches = 0

    def __len__(self) -> int:
        return len(self.replay)

    @torch.no_grad()
    def sample(self, n: int) -> Tensors:
        """`n` imagined transitions, by torch's default generator; those of a rollout side by side,
        so that slices of a batch are alike."""
        if self.batches % self.config.every == 0:
            self.fit()
        self.batches += 1
        starts = -(-n // self.config.steps)
        obs = self._starts(starts)
        parts: list[Tensors] = []
        for _ in range(self.config.steps):
            action = self._act(obs)
            drawn = torch.randn(starts, self.model.noise_size, device=action.device)
            found = self.model.step(obs, action, drawn)
            parts.append(
                {
                    **tt.nest(obs, "obs"),
                    "action": action,
                    "reward": found.reward,
                    "discount": self.gamma * (~found.terminated).float(),
                    **tt.nest(found.next_obs, "next_obs"),
                }
            )
            obs = tt.where(found.terminated, self._starts(starts), found.next_obs)
        return {
            key: torch.stack([part[key] for part in parts], 1).flatten(0, 1)[:n] for key in parts[0]
        }

    def fit(self) -> None:
        """Fit the model to everything in the replay buffer."""
        every = torch.arange(len(self.replay), device=self.replay.device)
        with torch.enable_grad():
            self.model.fit(self.replay.take(every))

    def _act(self, obs: Tensors) -> Tensor:
        """Actions [n, A] of the policy, exploring, at observations [n, ...]."""
        noise = self.policy.sample_noise(tt.length(obs), explore=True)
        return self.policy.act(obs, {}, noise)[0][:, 0]

    def _starts(self, n: int) -> Tensors:
        return tt.each(tt.under(self.replay.sample(n), "obs"), Tensor.contiguous)

    def get_state(self) -> dict[str, Any]:
        """The model and the number of batches."""
        return {"model": self.model.state_dict(), "batches": self.batches}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned."""
        self.model.load_state_dict(state["model"])
        self.batches = state["batches"]
