"""NoisyFlow: a flow or shortcut policy with learned noise on each of its Euler steps.

ReinFlow (Zhang et al., 2025). With the flow's own grid t_k = k / K,

    mean_k = clip(x_k + v(x_k, t_k, o) / K),   log std_k^2 = between log low^2 and log high^2,
                                               by a tanh network of (t_k, o)

The noise network is used in training only; the flow without noise is deployed. Gradients of the
noise network do not reach the features that it shares with the flow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Positive, Units
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.nn.networks import mlp
from embodied.policies.denoising_mdp import chain
from embodied.policies.denoising_mdp.chain import DenoisingMDP
from embodied.policies.generative.flow import Flow


@dataclass(frozen=True, kw_only=True)
class Config(chain.Config):
    """Settings of a flow policy with noisy steps; std in units of the normalised action.

    `low` and `high` matter most: too small, probability ratios explode; too large, actions lose
    precision.
    """

    low: Positive = 0.08  # smallest std of a step
    high: Positive = 0.16  # largest std of a step
    hidden: tuple[Units, ...] = (64, 64)  # units of each hidden layer
    clip: Positive = 3.0  # bound of the means while exploring (of the last one: [-1, 1])


class NoisyFlow(DenoisingMDP):
    """Flow policy whose Euler steps are all trainable links with learned noise."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]
    high: Tensor
    limits: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        if config.low > config.high:
            raise ConfigError(f"low={config.low} must be at most high={config.high}")
        self.links = self.inner.steps
        size = self.inner.embedded().shape[1] + self.inner.feature_size
        self.noise = mlp(size, config.hidden, self.size, "tanh")
        self.register_buffer("high", torch.tensor(config.high))  # may be annealed during training
        limits = torch.tensor([config.clip] * (self.links - 1) + [1.0])
        self.register_buffer("limits", limits[:, None], persistent=False)

    def inside(self, config: Config, base: Node) -> Policy:
        inner = build(base, Policy, spec=self.spec)
        if not isinstance(inner, Flow):
            raise ConfigError(
                "policy=noisy_flow needs a flow or shortcut base policy (init=RUN), not "
                f"{type(inner).__name__}; finetune=dppo trains diffusion policies"
            )
        return inner

    def load_base(self, base: Policy) -> None:
        self.inner.load_state_dict(base.state_dict())

    def times(self) -> Tensor:
        return self.inner.embedded()

    def link(
        self, x: Tensor, k: int | Tensor, time: Tensor, seen: Tensor, explores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mean = x + self.inner.velocity_at(x, time, seen) / self.links
        limit = self.limits[k]
        if explores is not None:
            limit = torch.where(explores, limit, torch.inf)
        return mean.clamp(-limit, limit), self.std(time, seen)

    def std(self, time: Tensor, seen: Tensor) -> Tensor:
        """Standard deviation [n, size] at embedded times [time_dim] or [n, time_dim]."""
        times = time.detach().expand(seen.shape[0], -1)
        share = (1 + torch.tanh(self.noise(torch.cat([times, seen.detach()], 1)))) / 2
        low, high = torch.full_like(self.high, self.config.low).log(), self.high.log()
        return torch.exp(low + share * (high - low))

    def narrow(self, share: float) -> None:
        """Set the upper bound of the std to low + share (high - low)."""
        low, high = self.config.low, self.config.high
        self.high.fill_(low + share * (high - low))
