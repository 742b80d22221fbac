"""ActorCritic: base class of off-policy actor-critic methods (SAC, TD3, ...).

    theta' <- theta' + tau (theta - theta'),   L_alpha = -log alpha E (log pi(a|s) + H)

Each transition has its own discount d (gamma^k, 0 after a termination), so action chunks and n-step
returns need no special code in the methods.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, Positive, PositiveFraction
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, each, under
from embodied.learners.acceleration import Acceleration
from embodied.learners.critics import critic_loss, cross_entropy
from embodied.learners.learner import Learner, frozen, soft_update
from embodied.nn.networks import redraw
from embodied.nn.optim import Adam
from embodied.policies.gaussian import Gaussian


@dataclass(frozen=True)
class OffPolicyConfig(Acceleration):
    batch_size: Count = 256  # transitions per critic step
    gamma: Fraction = 0.99  # discount per environment step
    n_step: Count = 1  # decisions of an n-step return
    tau: PositiveFraction = 0.005  # step of the target networks towards the trained ones
    actor_lr: PositiveFraction = 3e-4  # Adam's learning rate of the policy
    critic_lr: PositiveFraction = 3e-4  # Adam's learning rate of the critics


@dataclass(frozen=True)
class SoftConfig(OffPolicyConfig):
    """The settings of maximum-entropy methods."""

    temperature_lr: Fraction = 3e-4  # Adam's learning rate of log alpha; 0: alpha stays
    initial_temperature: Positive = 1.0  # alpha at the start, in units of the reward


SOFT_METRICS = ("actor_loss", "entropy", "temperature")


class ActorCritic(Learner):
    """A critic and its target, a policy and, if it has an entropy to reach, a temperature.

    Subclasses define `_backup` (of reward [N], discount [N] and next observations: the critics'
    target [N]), `_actor_loss` and `update`. With a `support` the critics are categorical, and
    `_backup` gives a distribution [N, atoms].
    """

    losses = ("_critic_loss", "_actor_loss")
    support: Any = None  # Support of categorical critics
    given: ClassVar[tuple[str, ...]] = ()  # policies that are trained elsewhere
    critic: Any
    target: Any
    log_alpha: nn.Parameter
    _backup: Callable[..., Any]
    _actor_loss: Callable[..., Any]

    def __init__(
        self,
        config: OffPolicyConfig,
        policy: Policy,
        critic: nn.Module,
        actor: Iterable[Tensor],
        target_entropy: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        """`critic` is trained and copied as the target; `actor`: the policy's parameters that are
        trained; `target_entropy` of a decision, in nats (None: there is no temperature)."""
        super().__init__(config, policy)
        self.critic = critic
        self.target = copy.deepcopy(critic).requires_grad_(False)
        self.critic_params: list[Tensor] = list(self.critic.parameters())
        self.target_params: list[Tensor] = list(self.target.parameters())
        self.actor_params: list[Tensor] = list(actor)
        self.optims = {
            "critic": Adam(self.critic_params, config.critic_lr, weight_decay=weight_decay),
            "actor": Adam(self.actor_params, config.actor_lr, weight_decay=weight_decay),
        }
        if target_entropy is not None:
            assert isinstance(config, SoftConfig)
            self.entropy = target_entropy
            self.log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_temperature)))
            self.optims["temperature"] = Adam([self.log_alpha], config.temperature_lr)

    @property
    def alpha(self) -> Tensor:
        """The temperature, without gradients."""
        return self.log_alpha.detach().exp()

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, ...]:
        """The critics' loss, and the mean of their values."""
        q = self.critic(under(batch, "obs"), batch["action"])
        backup = self._backup(batch["reward"], batch["discount"], under(batch, "next_obs"))
        return self.critic_error(batch, q, backup)

    def critic_error(self, batch: Tensors, q: Tensor, backup: Tensor) -> tuple[Tensor, Tensor]:
        """The critics' loss for their output `q` on a batch, and the mean of their values."""
        if self.support is None:
            return critic_loss(q, backup) + self.critic_terms(batch, q), q.detach().mean()
        loss = cross_entropy(q, backup) + self.critic_terms(batch, q)
        return loss, self.values(q.detach()).mean()

    def values(self, q: Tensor) -> Tensor:
        """Expected values [E, N] of the critics' output `q` [E, N] or [E, N, atoms]."""
        return q if self.support is None else self.support.mean(q)

    def critic_terms(self, batch: Tensors, q: Tensor) -> Tensor | float:
        """Further terms of the critics' loss, a scalar, from transitions and the critics' output
        `q` [E, N] (categorical: logits [E, N, atoms]). A hook: none by default."""
        return 0.0

    def critic_step(self, batch: Tensors, tau: float = 0.0) -> dict[str, Tensor]:
        """One gradient step of the critic; with `tau` > 0 also one Polyak step of its target."""
        loss, q_mean = self._critic_loss(batch)
        self.descend("critic", loss)
        if tau:
            soft_update(self.target_params, self.critic_params, tau)
        return {"critic_loss": loss.detach(), "q_mean": q_mean}

    def soft_actor_step(
        self, batch: Tensors, fixed: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor]:
        """One gradient step of the policy and one of the temperature; `fixed`: parameters of the
        critic that evaluates the actions (None: those of `critic`)."""
        with frozen(self.critic_params if fixed is None else fixed):
            loss, log_prob = self._actor_loss(batch)
            self.descend("actor", loss)
        self.log_alpha.grad = temperature_gradient(log_prob, self.entropy)
        self.optims["temperature"].step()
        return {"actor_loss": loss.detach(), "entropy": -log_prob.mean(), "temperature": self.alpha}

    @torch.no_grad()
    def restart_critic(self) -> None:
        """Draw the critic anew, copy it to the target and forget Adam's moments; the normalisers
        stay."""
        redraw(self.critic)
        soft_update(self.target_params, self.critic_params, 1.0)
        for moments in self.optims["critic"].state.values():
            for value in moments.values():
                value.zero_()

    def slices(self, batch: Tensors, size: int) -> Iterator[Tensors]:
        """`batch` in parts of `size` transitions, for several critic steps per update."""
        if size == self.batch_size:
            yield batch
            return
        for at in range(0, self.batch_size, size):
            yield each(batch, lambda v, at=at: v[at : at + size])

    def fit(self, transitions: Tensors) -> None:
        """Set the normalisers of all policies and critics, but for those of `given`."""
        for name, part in self.named_children():
            fitted: Any = part if isinstance(part, Policy) else getattr(part, "encoder", None)
            if fitted is not None and name not in self.given:
                fitted.fit(transitions)


class DelayedActorCritic(ActorCritic):
    """Actor-critic with delayed policy updates (SAC, TD3, DSAC-T, FlashSAC); counts its updates."""

    counters = ("updates",)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.updates = 0
        self.last_actor: Tensors = {}  # metrics of the newest policy step

    def is_due(self, delay: int) -> bool:
        """Whether what is trained at every `delay`-th update is trained at this one."""
        return self.updates % delay == 0

    def with_last_actor(self, metrics: Tensors) -> Tensors:
        """`metrics` of an update, with those of the newest policy step if it had none."""
        own = {key: metrics[key] for key in SOFT_METRICS if key in metrics}
        self.last_actor = own or self.last_actor
        return metrics | self.last_actor


def draw(policy: Gaussian, obs: Tensors) -> tuple[Tensor, Tensor]:
    """Sample actions [N, size] for observations [N, ...], with their log-densities [N]."""
    return policy.sample(obs, policy.sample_noise(len(next(iter(obs.values()))), True))


def actor_loss(value: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """mean(alpha log pi - Q), all [N]."""
    return (alpha * log_prob - value).mean()


def temperature_gradient(log_prob: Tensor, target: float) -> Tensor:
    """The gradient of -log alpha mean(log pi + H) with respect to log alpha. With that of -alpha
    mean(log pi + H), which vanishes with alpha, 40% more updates were needed."""
    return -(log_prob + target).mean()
