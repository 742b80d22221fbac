"""HNPG: hybrid natural policy gradient, here by PPO: demonstrations in an on-policy critic.

Zhou et al., "Offline data enhanced on-policy policy gradient" (2024). Action values f of the
current policy pi are fitted to the newest decisions O and to demonstrations D of any quality,
equally:

    E_O (f(s, a) - R)^2 + E_D (f(s, a) - r - d E_{a' ~ pi} f'(s', a'))^2

R is GAE's return and f' a moving average of f. V(s) is the mean of f over `samples` actions of pi.
PPO's batch is the decisions with GAE's advantages, and states of D with new actions of pi and the
advantages f - V. So D needs no actions as good as those of pi; where it says nothing, O does.

Differences from the paper: PPO's step in the place of TRPO's, one f for all times.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from embodied.core.bounds import Count, Few, NonNegative, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, cat, each, length, nest, take, to, under
from embodied.learners.critics import Critic, ValueConfig, critic_loss, ensemble
from embodied.learners.learner import RunPlan, soft_update
from embodied.learners.on_policy import ppo
from embodied.learners.on_policy.ppo_parts import normalized
from embodied.nn.optim import Adam, Optimizer


@dataclass(frozen=True)
class Config(ppo.Config):
    """Settings of HNPG: those of PPO, whose `value` describes the networks of f."""

    critics: Few = 2  # networks of f, which is their mean
    critic_steps: Count = 160  # steps of f per update; as many as the value function of PPO has
    critic_batch_size: Count = 256  # decisions, and transitions of D, in each
    samples: Count = 10  # actions over which f is averaged for V
    tau: PositiveFraction = 0.02  # step of f' towards f
    offline_states: NonNegative = 1.0  # states of D in a batch of PPO, per decision


class SampledValue(nn.Module):
    """V(s) [N]: the mean of a critic over `samples` actions of a policy; owns neither of them."""

    def __init__(self, policy: Policy, critic: Critic, samples: int) -> None:
        super().__init__()
        self.parts = (policy, critic)  # a tuple: they are no submodules
        self.samples = samples

    @property
    def encoder(self) -> nn.Module:
        return self.parts[1].encoder

    @torch.no_grad()
    def forward(self, obs: Tensors, critic: Critic | None = None) -> Tensor:
        """`critic`: another one than its own."""
        policy, own = self.parts
        many = each(obs, lambda leaf: leaf.repeat_interleave(self.samples, 0))
        values = action_values(critic or own, many, drawn(policy, many))
        return values.view(-1, self.samples).mean(1)


class Hnpg(ppo.Ppo):
    """`update` as in PPO; `set_demonstrations` gets transitions. For single continuous actions."""

    takes_memory = False

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        if config.value_weight != Config.value_weight or config.value.head != ValueConfig.head:
            raise ConfigError("value_weight, value.head: no effect with learner=hnpg, leave it out")
        if policy.chunk > 1 or not spec.act.is_continuous:
            raise ConfigError("learner=hnpg needs continuous single actions")
        super().__init__(replace(config, critic_lr=0.0), policy, spec, run)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.critic_params: list[Tensor] = list(self.critic.parameters())
        self.target_params: list[Tensor] = list(self.target.parameters())
        self.fitter = Adam(self.critic_params, config.critic_lr or config.lr)
        self.shown: Tensors | None = None

    def _critic(self, spec: Spec) -> SampledValue:
        value = self.config.value
        n, size = self.config.critics, spec.act.size
        self.critic = ensemble(value, spec, size, value.activation, n=n, obs=value.obs)
        return SampledValue(self.policy, self.critic, self.config.samples)

    def set_demonstrations(self, demonstrations: Tensors) -> None:
        """Set the transitions: `obs/*`, `action`, `reward`, `discount`, `next_obs/*` [N, ...]."""
        names = ("obs/", "next_obs/", "action", "reward", "discount")
        kept = {key: v for key, v in demonstrations.items() if key.startswith(names)}
        self.shown = to(kept, self.lr.base_lrs.device)

    def _table(self, batch: Tensors, carry: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
        table, metrics = super()._table(batch, carry)
        metrics["critic_loss"] = self._fit_critic(table)
        if self.shown is not None and (count := round(length(table) * self.config.offline_states)):
            table = cat([table, self._offline(count)])
        return table, metrics

    def _fit_critic(self, table: Tensors) -> Tensor:
        """Fit f to the returns of `table` and to the demonstrations; the mean loss."""
        size = self.config.critic_batch_size
        losses: list[Tensor] = []
        for _ in range(self.config.critic_steps):
            here = sample(table, size)
            loss = self._error(under(here, "obs"), here["action"], here["target"])
            if self.shown is not None:
                there = sample(self.shown, size)
                loss = loss + self._error(under(there, "obs"), there["action"], self._backup(there))
            loss.backward()
            self.fitter.step()
            soft_update(self.target_params, self.critic_params, self.config.tau)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _error(self, obs: Tensors, action: Tensor, target: Tensor) -> Tensor:
        """The squared error of each network, summed over them."""
        return critic_loss(self.critic(obs, action.clamp(-1, 1)), target)

    def _backup(self, transitions: Tensors) -> Tensor:
        """r + d E f'(s', a') of transitions, [N], a' of the current policy."""
        following = self.value(under(transitions, "next_obs"), self.target)
        reward = transitions["reward"]
        if self.config.scale_rewards:
            reward = self.returns.scaled(reward)
        return reward + transitions["discount"] * following

    @torch.no_grad()
    def _offline(self, count: int) -> Tensors:
        """Rows for PPO's minibatches: states of the demonstrations, with new actions."""
        assert self.shown is not None
        obs = under(sample(self.shown, count), "obs")
        action = drawn(self.policy, obs)
        value = self.value(obs)
        advantage = action_values(self.critic, obs, action) - value
        old = self._evaluate_actions({**nest(obs, "obs"), "action": action})[0]
        rows = {"action": action, "old": old, "value": value, "target": value + advantage}
        if self.config.advantage == "batch":
            advantage = normalized(advantage, torch.full_like(advantage, 1 / count))
        return {**nest(obs, "obs"), **rows, "advantage": advantage}

    def _evaluate_minibatch(self, minibatch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        return *self._evaluate_actions(minibatch), minibatch["value"]

    def _total(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["policy_loss"] - self.config.entropy * parts["entropy"]

    def state_values(self, obs: Tensors) -> Tensor:
        return self.value(obs)

    def fit(self, transitions: Tensors) -> None:
        super().fit(transitions)
        self.target.encoder.fit(transitions)

    def _observe(self, batch: Tensors) -> None:
        super()._observe(batch)
        self.target.encoder.load_state_dict(self.critic.encoder.state_dict())

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {**super().optimizers(), "critic": self.fitter}


def sample(rows: Tensors, count: int) -> Tensors:
    """`count` of the rows, with replacement."""
    device = next(iter(rows.values())).device
    return take(rows, torch.randint(length(rows), (count,), device=device))


@torch.no_grad()
def drawn(policy: Policy, obs: Tensors) -> Tensor:
    """Actions [N, A] of the policy as PPO stores them."""
    count = len(next(iter(obs.values())))
    plan, carry = policy.act(obs, policy.initial(count), policy.sample_noise(count, True))
    return carry.get("row/action", plan.flatten(1))


@torch.no_grad()
def action_values(critic: Critic, obs: Tensors, action: Tensor) -> Tensor:
    """f [N]: the mean of the critic's networks for the actions as they are executed."""
    return critic(obs, action.clamp(-1, 1)).mean(0)
