"""ActorCritic: base class of off-policy actor-critic methods (SAC, TD3, ...).

It provides target critics with Polyak averaging, the temperature of maximum-entropy methods, and
delayed actor updates:

    theta' <- theta' + tau (theta - theta'),   L_alpha = -log alpha E (log pi(a|s) + H)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, NonNegative, Positive, PositiveFraction
from embodied.core.cuda_graph import Update
from embodied.core.tensors import Tensors, each
from embodied.learners.acceleration import Acceleration
from embodied.learners.gradient_learner import GradientLearner, frozen, soft_update


@dataclass(frozen=True)
class OffPolicyConfig(Acceleration):
    """The settings that all off-policy actor-critic methods have."""

    batch_size: Count = 256  # transitions per critic step
    gamma: Fraction = 0.99  # discount per environment step
    n_step: Count = 1  # decisions of an n-step return
    tau: PositiveFraction = 0.005  # step of the target networks towards the trained ones
    actor_lr: Positive = 3e-4  # Adam's learning rate of the policy
    critic_lr: Positive = 3e-4  # Adam's learning rate of the critics


@dataclass(frozen=True)
class CriticConfig:
    """An ensemble of critics, each an MLP."""

    critics: Count = 2  # number of critics
    hidden: tuple[Count, ...] = (256, 256)  # units of the critics' hidden layers
    layer_norm: bool = False  # layer normalisation in the critics


@dataclass(frozen=True)
class TemperatureConfig:
    """The temperature of maximum-entropy methods."""

    temperature_lr: NonNegative = 3e-4  # Adam's learning rate of log alpha; 0: alpha stays
    initial_temperature: Positive = 1.0  # alpha at the start, in units of the reward


SOFT_METRICS = ("actor_loss", "entropy", "temperature")


class ActorCritic(GradientLearner):
    """A critic and its target. Subclasses define `_critic_loss` and `_actor_loss`."""

    critic: Any
    target: Any
    log_alpha: nn.Parameter
    entropy: float  # target entropy H of the policy
    _critic_loss: Callable[[Tensors], tuple[Tensor, ...]]
    _actor_loss: Callable[..., Any]

    def add_critic(self, critic: nn.Module) -> None:
        """Register `critic` and a copy of it as the target."""
        self.critic = critic
        self.target = copy.deepcopy(critic).requires_grad_(False)
        self.critic_params: list[Tensor] = list(self.critic.parameters())
        self.target_params: list[Tensor] = list(self.target.parameters())

    def add_temperature(self, initial: float, target_entropy: float) -> None:
        """Register log alpha and the target entropy that it is tuned to."""
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))
        self.entropy = target_entropy

    def compile_losses(self) -> None:
        """Compile the losses if `compile` is set. Call it at the end of the constructor."""
        self._critic_loss_fn = self.compiled(self._critic_loss)
        self._actor_loss_fn = self.compiled(self._actor_loss)

    @property
    def alpha(self) -> Tensor:
        """The temperature, without gradients."""
        return self.log_alpha.detach().exp()

    def critic_step(self, batch: Tensors, tau: float = 0.0) -> dict[str, Tensor]:
        """One gradient step of the critic; with `tau` > 0 also one Polyak step of its target."""
        loss, q_mean = self._critic_loss_fn(batch)
        self.descend("critic", loss)
        if tau:
            soft_update(self.target_params, self.critic_params, tau)
        return {"critic_loss": loss.detach(), "q_mean": q_mean}

    def soft_actor_step(
        self, batch: Tensors, name: str = "actor", fixed: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor]:
        """One gradient step of the policy with the optimiser `name`, and one of the temperature.

        `fixed`: parameters of the critic that evaluates the actions (None: those of `critic`).
        """
        with frozen(self.critic_params if fixed is None else fixed):
            loss, log_prob = self._actor_loss_fn(batch)
            self.descend(name, loss)
        self.log_alpha.grad = temperature_gradient(log_prob, self.entropy)
        self.optims["temperature"].step()
        values = (loss.detach(), -log_prob.mean(), self.alpha)
        return dict(zip((f"{name}_loss", *SOFT_METRICS[1:]), values, strict=True))

    def slices(self, batch: Tensors, size: int) -> Iterator[Tensors]:
        """`batch` in parts of `size` transitions, for several critic steps per update."""
        if size == self.batch_size:
            yield batch
            return
        for at in range(0, self.batch_size, size):
            yield each(batch, lambda v, at=at: v[at : at + size])

    def fit_encoders(self, rows: Tensors) -> None:
        """Set the normalisers of the critic and its target from data."""
        self.critic.encoder.fit(rows)
        self.target.encoder.fit(rows)


class DelayedActorCritic(ActorCritic):
    """Actor-critic with delayed policy updates (TD3, DSAC-T, FlashSAC); counts its updates.

    `_step(*kind, batch)` does one update; `kind` says what it trains besides the critic. `steps`
    holds one function per kind, each with its own CUDA graph if `cuda_graph` is set.
    """

    updates: int
    _step: Callable[..., Tensors]

    def count_updates(self, kinds: Sequence[tuple[bool, ...]]) -> None:
        """Start counting updates. Call it at the end of the constructor."""
        self.updates = 0
        self.last_actor: Tensors = {}  # metrics of the newest policy step
        self.compile_losses()
        self.steps: dict[tuple[bool, ...], Update] = {
            kind: self.recorded(partial(self._step, *kind)) for kind in kinds
        }

    def delayed(self, kind: tuple[bool, ...], batch: Tensors, keys: Sequence[str]) -> Tensors:
        """One update; reports the metrics `keys` of the latest policy step until the next one."""
        metrics = self.steps[kind](batch)
        if kind[-1]:
            self.last_actor = {key: metrics[key] for key in keys}
        return metrics | self.last_actor

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"updates": self.updates}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.updates = state["updates"]


def actor_loss(value: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """mean(alpha log pi - Q), all [N]."""
    return (alpha * log_prob - value).mean()


def temperature_gradient(log_prob: Tensor, target: float) -> Tensor:
    """The gradient of -log alpha mean(log pi + H) with respect to log alpha.

    Unlike the gradient of -alpha mean(log pi + H), it does not vanish with alpha. With the latter,
    40% more updates were needed: Adam's second moments are dominated by the large first gradients.
    """
    return -(log_prob + target).mean()
