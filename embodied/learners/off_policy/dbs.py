"""DBS: direct behaviour specification, SAC under constraints on frequencies (Roy et al., 2022).

A constraint says in which share d_k of the steps an event may, or has to, happen: c_k in {0, 1} is
a flag of `Step.log`, s_k = 1 for "at most" and -1 for "at least". No penalty is weighed by hand:

    lambda = softmax(w_0, w_1, ..., w_K)
    L_pi = E (alpha log pi(a|s) - lambda_0 min_i Q_i(s, a) + sum_k s_k lambda_k C_k(s, a))
    y_k  = c_k + m gamma_c C'_k(s', a'),  a' ~ pi,   m = 0 after a termination
    w    ascends   sum_k s_k lambda_k (f_k - d_k)

f_k is the frequency in the newest steps, not in the replay buffer. With `bootstrap`, the name of a
constraint on success, its multiplier is a lower bound of lambda_0, so that constraints that are not
satisfied yet do not silence the task.

Differences from the paper: the frequencies are no observations of the policy; Adam's steps of w
follow every update of the policy, more slowly by `multiplier_lr` alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Fraction, Number
from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.actor_critic import actor_loss
from embodied.learners.critics import critic_loss, ensemble
from embodied.learners.learner import soft_update
from embodied.learners.off_policy import sac
from embodied.nn.optim import Adam


@dataclass(frozen=True)
class Config(sac.Config):
    """Settings of DBS: those of SAC, and the constraints."""

    at_most: Mapping[str, Fraction] = field(
        default_factory=lambda: {"violated": 0.05}
    )  # largest share of the steps, by the name of a flag
    at_least: Mapping[str, Fraction] = field(
        default_factory=dict[str, float]
    )  # least share of the steps, likewise
    bootstrap: str | None = None  # one of `at_least`: its multiplier bounds the reward's from below
    cost_gamma: Fraction = 0.9  # discount of the events per step
    window: Count = 4000  # newest steps over which the frequencies are averaged
    multiplier_lr: Fraction = 1e-3  # Adam's learning rate of w; 0: the multipliers stay
    initial: Number = 0.0  # w of each constraint at the start; that of the reward is 0


class Dbs(sac.Sac):
    """`update` as in SAC, on transitions with the column (bool) of each constraint. The metric
    `excess` is the share of the steps by which the constraint that is missed most is missed."""

    losses = (*sac.Sac.losses, "_cost_loss")
    counters = (*sac.Sac.counters, "observed")
    recent: Tensor
    share: Tensor
    sign: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        names = [*config.at_most, *config.at_least]
        if len(set(names)) < len(names) or not names:
            raise ConfigError(
                "learner=dbs needs flags of Step.log, each in one of learner.at_most={NAME: SHARE} "
                "and learner.at_least={NAME: SHARE}"
            )
        if config.bootstrap is not None and config.bootstrap not in config.at_least:
            raise ConfigError(
                f"bootstrap={config.bootstrap} should be one of at_least "
                f"({', '.join(config.at_least) or 'none is set'})"
            )
        if config.n_step > 1:
            raise ConfigError("learner=dbs counts single steps: learner.n_step=1")
        super().__init__(config, policy, spec)
        self.extra_columns = tuple(names)
        self.costs = ensemble(config, spec, self.policy.size, n=len(names))
        self.later_costs = copy.deepcopy(self.costs).requires_grad_(False)
        self.cost_params: list[Tensor] = list(self.costs.parameters())
        self.later_params: list[Tensor] = list(self.later_costs.parameters())
        self.logits = nn.Parameter(torch.tensor([0.0] + [config.initial] * len(names)))
        shares = torch.tensor([*config.at_most.values(), *config.at_least.values()])
        self.register_buffer("share", shares)
        self.register_buffer("recent", shares.clone())
        signs = [1.0] * len(config.at_most) + [-1.0] * len(config.at_least)
        self.register_buffer("sign", torch.tensor(signs))
        self.observed = 0
        self.optims |= {
            "costs": Adam(self.cost_params, config.critic_lr),
            "multipliers": Adam([self.logits], config.multiplier_lr),
        }

    @torch.no_grad()
    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        """Average the frequencies of the newest `window` transitions, exponentially."""
        events = self._events(transitions)
        self.observed += events.shape[1]
        rate = events.shape[1] / min(self.observed, self.config.window)
        self.recent.lerp_(events.mean(1), min(rate, 1.0))

    def _events(self, transitions: Tensors) -> Tensor:
        """The flags of the constraints, [K, N]."""
        return torch.stack([transitions[name].float() for name in self.extra_columns])

    def multipliers(self) -> Tensor:
        """[1 + K]: those of the reward and of the constraints."""
        found = self.logits.softmax(0)
        if self.config.bootstrap is None:
            return found
        success = found[1 + self.extra_columns.index(self.config.bootstrap)]
        return torch.cat([torch.maximum(found[:1], success), found[1:]])

    def _step(self, act: bool, batch: Tensors) -> dict[str, Tensor]:
        metrics = super()._step(act, batch)
        excess = self.sign * (self.recent - self.share)
        if act:
            self.descend("multipliers", -(self.logits.softmax(0)[1:] @ excess))
        with torch.no_grad():
            found = self.multipliers()
        metrics["excess"] = excess.amax()
        metrics["multiplier_reward"] = found[0]
        for place, name in enumerate(self.extra_columns):
            metrics[f"multiplier_{name}"] = found[1 + place]
            metrics[f"frequency_{name}"] = self.recent[place].clone()
        return metrics

    def critic_step(self, batch: Tensors, tau: float = 0.0) -> dict[str, Tensor]:
        metrics = super().critic_step(batch, tau)
        loss = self._cost_loss(batch)
        self.descend("costs", loss)
        soft_update(self.later_params, self.cost_params, tau)
        return metrics | {"cost_loss": loss.detach()}

    def _cost_loss(self, batch: Tensors) -> Tensor:
        following = under(batch, "next_obs")
        with torch.no_grad():
            action, _ = self.drawn(following)
            goes_on = (batch["discount"] > 0).float()
            later = self.later_costs(following, action)
            backup = self._events(batch) + self.config.cost_gamma * goes_on * later
        return critic_loss(self.costs(under(batch, "obs"), batch["action"]), backup)

    def soft_actor_step(
        self, batch: Tensors, fixed: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor]:
        known = self.critic_params if fixed is None else fixed
        return super().soft_actor_step(batch, [*known, *self.cost_params])

    def _actor_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        obs = under(batch, "obs")
        action, log_prob = self.drawn(obs)
        q = self.critic(obs, action)
        value = q.amin(0) if self.config.actor_objective == "min" else q.mean(0)
        weight = self.multipliers().detach()
        cost = (self.sign * weight[1:]) @ self.costs(obs, action)
        return actor_loss(weight[0] * value - cost, log_prob, self.alpha), log_prob.detach()
