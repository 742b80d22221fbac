"""Groove: an update rule, learned on levels where it is still bad (Jackson et al., 2023).

The rule of LPG (Oh et al., 2020; `embodied.policies.tabular`) gives, for each step of a
rollout, a number g_t and a target u_t of the prediction vector y(s_t). An agent's tables descend

    1/T sum_t  g_t log pi(a_t|s_t) + 1/2 KL(y(s_t) || softmax(u_t)),

with step size `agent_lr`, where g and u are constants. The rule is trained through K such updates:
with theta_K the tables after them, and A_t the standardised advantages (GAE; a table of values of
each agent) of the rollout that is collected next,

    L = -E[A_t log pi_theta_K(a_t|s_t)] - c_H H(pi) - c_y H(y) + c_g E[g_t^2] + c_u E[u_t^2].

An agent lives for one lifetime (`Trials`) in one level, in two halves of `episodes` episodes, from
zero tables each: first it learns by an advantage actor-critic with the same values, then by the
rule. The algorithmic regret of the level is how much more the first one gets in the last quarter of
its half. `teacher=plr teacher.score=gain` replays levels by it, for the learner's estimates of a
lifetime are made so that their mean gain is that regret.

Differences from the published code: the baseline has the agent's own environment and as many steps,
before it; one environment for each agent; g and u are computed of constant pi and y, so there is no
second derivative through them; the buffer is that of prioritized level replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.bounds import Count, Fraction, NonNegative, Positive, PositiveFraction
from embodied.core.build import ConfigError
from embodied.core.checkpoint import load_policy
from embodied.core.policy import Policy
from embodied.core.spec import FIRST
from embodied.core.tensors import Tensors, under
from embodied.learners.learner import Learner
from embodied.learners.on_policy.ppo_parts import gae, normalized
from embodied.nn.optim import Adam
from embodied.policies.tabular import Tabular

LAST = 0.75  # share of a half's episodes after which returns count
LOSS = {"classes": 1e-3, "number": 5e-3, "target": 1e-3}  # weights c_y, c_g, c_u


@dataclass(frozen=True)
class Config:
    """Settings of a learned update rule."""

    rule: str | None = None  # a run whose rule is used and not trained further
    horizon: Count = 20  # steps of each agent per update
    episodes: Count = 32  # inner episodes of each half of a lifetime; Trials has twice as many
    unroll: Count = 5  # updates of the agents through which the rule is trained
    lr: PositiveFraction = 1e-3  # Adam's learning rate of the rule
    entropy: NonNegative = 0.01  # c_H, weight of the entropy of trained agents
    grad_clip: Positive = 0.5  # largest norm of the rule's gradient
    agent_lr: Positive = 10.0  # step size of the tables under the rule
    actor_lr: Positive = 10.0  # step size of the logits under the actor-critic
    value_lr: Fraction = 0.5  # step size of the values
    gamma: Fraction = 0.99  # discount per step
    lam: Fraction = 0.95  # lambda of GAE


class Groove(Learner):
    """`update` takes `horizon` steps [T, B] of every agent."""

    data = "on_policy"
    usual_policy = "tabular"
    batch_size = 0
    taught: Tensor  # [n] (bool): which agents learn by the rule, the others by the actor-critic
    count: Tensor  # [n]: inner episodes that ended in this half
    steps: Tensor  # [n]: steps of this lifetime
    scores: Tensor  # [2, n]: sums of the returns that count, of both halves
    shares: Tensor  # [2, n]: numbers of these returns
    now: Tensor  # [n]: returns of the running inner episodes

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        if not isinstance(policy, Tabular):
            raise ConfigError("learner=groove teaches agents with tables: policy=tabular")
        if FIRST not in policy.spec.obs:
            raise ConfigError("learner=groove needs lifetimes: an environment with Trials")
        if config.rule is not None:
            known = load_policy(config.rule)
            if not isinstance(known, Tabular):
                raise ConfigError("learner.rule names a run of learner=groove")
            policy.rule.load_state_dict(known.rule.state_dict())
            policy.rule.requires_grad_(False)
        n, states, _ = policy.logits.shape
        self.register_buffer("values", torch.zeros(n, states))
        self.optims = {"rule": Adam(policy.rule.parameters(), config.lr)}
        self.register_buffer("taught", torch.zeros(n, dtype=torch.bool))
        self.register_buffer("count", torch.zeros(n, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros(n, dtype=torch.int64))
        self.register_buffer("scores", torch.zeros(2, n))
        self.register_buffer("shares", torch.zeros(2, n))
        self.register_buffer("now", torch.zeros(n))
        self.window: list[Tensors] = []
        """Rollouts of the chain of updates through which the rule is trained next."""
        self.begin_window()
        self.estimates: Tensors | None = {}

    def begin_window(self) -> None:
        """Begin a chain of updates through which the rule is trained."""
        policy = self.policy
        self.window.clear()
        self.start = policy.logits.clone(), policy.predictions.clone()
        self.chain = self.start
        self.sizes: list[Tensor] = []

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        rollout = self.rollout(batch)
        metrics: dict[str, Tensor] = {}
        if len(self.window) == self.config.unroll:
            metrics = self.teach(rollout)
            self.window.clear()
        if not self.window:
            self.begin_window()
        self.learn(rollout)
        return metrics | self.follow(batch, rollout)

    def rollout(self, batch: Tensors) -> Tensors:
        """States, actions, rewards, and whether an inner episode ended, [T, B]; `taught` [T, B]."""
        agents = batch["reward"].shape[1]
        if agents != len(self.taught):
            raise ConfigError(f"as many agents as parallel environments: policy.agents={agents}")
        over = under(batch, "next_obs")[FIRST][..., 0] > 0.5
        return {
            "state": self.policy.state(under(batch, "obs")),
            "next": self.policy.state(under(batch, "next_obs")),
            "action": batch["action"].reshape(batch["reward"].shape),
            "reward": batch["reward"],
            "over": over | batch["ended"],
            "taught": self.taught.expand_as(over).clone(),
        }

    def advantages(self, rollout: Tensors) -> Tensor:
        """GAE [T, B] by the agents' values."""
        rows = torch.arange(len(self.count), device=self.count.device)
        over = rollout["over"]
        return gae(
            reward=rollout["reward"],
            discount=self.config.gamma * ~over,
            ended=over,
            valid=torch.ones_like(over),
            value=self.values[rows, rollout["state"]],
            next_value=self.values[rows, rollout["next"]],
            lam=self.config.lam,
        )

    def chances(self, tables: Tensor, rollout: Tensors) -> Tensor:
        """Log-probabilities [T, B, K] of tables [B, S, K] in the rollout's states."""
        rows = torch.arange(len(tables), device=tables.device)
        return tables[rows, rollout["state"]].log_softmax(2)

    def ruled(
        self, logits: Tensor, predictions: Tensor, rollout: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tables after an update by the rule, differentiable in it; and the squares of its
        outputs, weighted as in the loss."""
        with torch.no_grad():
            log = self.chances(logits, rollout).gather(2, rollout["action"][..., None])[..., 0]
            y = self.chances(predictions, rollout).exp()
            rows = torch.arange(len(predictions), device=predictions.device)
            next_y = predictions[rows, rollout["next"]].softmax(2)
        g, u = self.policy.rule(rollout["reward"], rollout["over"], log.exp(), y, next_y)
        moved = self.step(logits, rollout, self.slope(logits, rollout) * g[..., None])
        y_log = self.chances(predictions, rollout)
        gap = y_log - u.log_softmax(2)
        pull = y_log.exp() * (gap - (y_log.exp() * gap).sum(2, keepdim=True))
        turned = self.step(predictions, rollout, 0.5 * pull)
        return moved, turned, LOSS["number"] * g.square() + LOSS["target"] * u.square().mean(2)

    def slope(self, logits: Tensor, rollout: Tensors) -> Tensor:
        """The gradient [T, B, A] of log pi(a_t|s_t) in the logits of s_t."""
        taken = functional.one_hot(rollout["action"], logits.shape[2])
        return taken - self.chances(logits, rollout).exp()

    def step(self, tables: Tensor, rollout: Tensors, slopes: Tensor) -> Tensor:
        """Tables [B, S, K] after a step down the mean of `slopes` [T, B, K] of their states."""
        index = rollout["state"].T[..., None].expand(-1, -1, tables.shape[2])
        change = torch.zeros_like(tables).scatter_add(1, index, slopes.transpose(0, 1))
        return tables - self.config.agent_lr / len(slopes) * change

    def learn(self, rollout: Tensors) -> None:
        """One update of all agents: by the rule, or by the actor-critic and its values."""
        policy = self.policy
        config = self.config
        trains = config.rule is None
        with torch.set_grad_enabled(trains):
            moved, turned, size = self.ruled(*self.chain, rollout)
        taught = rollout["taught"][0][:, None, None]
        self.sizes.append(size.mean(0))
        advantage = self.advantages(rollout)
        with torch.no_grad():
            way = -self.slope(policy.logits, rollout) * advantage[..., None]
            share = config.actor_lr / config.agent_lr
            plain = self.step(policy.logits, rollout, share * way)
            error = torch.zeros_like(self.values).scatter_add(1, rollout["state"].T, advantage.T)
            seen = torch.zeros_like(error).scatter_add(
                1, rollout["state"].T, torch.ones_like(advantage.T)
            )
            self.values += config.value_lr * error / seen.clamp(min=1)
        self.chain = (
            torch.where(taught, moved, plain),
            torch.where(taught, turned, self.chain[1].detach()),
        )
        self.write()
        if trains:
            self.window.append(rollout)
        else:
            self.sizes.clear()
            self.chain = policy.logits.clone(), policy.predictions.clone()

    @torch.no_grad()
    def write(self) -> None:
        """Let the policy act by the newest tables."""
        self.policy.logits.copy_(self.chain[0])
        self.policy.predictions.copy_(self.chain[1])

    def teach(self, rollout: Tensors) -> dict[str, Tensor]:
        """One update of the rule, by a rollout that was collected after the chain of updates."""
        loss, metrics = self.rule_loss(rollout)
        if loss.requires_grad:
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.rule.parameters(), self.config.grad_clip)
            self.optims["rule"].step()
        return metrics

    def rule_loss(self, rollout: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """L, and metrics. Agents that were taught in the whole chain and in `rollout` count."""
        whole = torch.stack([each["taught"][0] for each in (*self.window, rollout)])
        used = whole.all(0).float().expand_as(rollout["reward"])
        total = used.sum().clamp(min=1)

        def mean(values: Tensor) -> Tensor:
            return (values * used).sum() / total

        advantage = normalized(self.advantages(rollout), used / total)
        log, y_log = (self.chances(tables, rollout) for tables in self.chain)
        taken = log.gather(2, rollout["action"][..., None])[..., 0]
        gain = mean(taken * advantage)
        entropy, variety = (mean(-(each.exp() * each).sum(2)) for each in (log, y_log))
        loss = mean(torch.stack(self.sizes).mean(0)) - gain
        loss = loss - self.config.entropy * entropy - LOSS["classes"] * variety
        found = {"loss": loss, "entropy": entropy, "class_entropy": variety, "taught": used.mean()}
        return loss, {name: value.detach() for name, value in found.items()}

    @torch.no_grad()
    def follow(self, batch: Tensors, rollout: Tensors) -> dict[str, Tensor]:
        """Count episodes, and let agents begin anew where a half of their lifetime is over."""
        begins = torch.zeros_like(self.taught)
        regret = torch.zeros_like(rollout["reward"])
        total = torch.zeros(2, device=regret.device)
        lifetimes = torch.zeros((), device=regret.device)
        for t, over in enumerate(rollout["over"]):
            self.steps += 1
            self.now += rollout["reward"][t]
            half = self.taught.long()[None]
            counts = (over & (self.count >= LAST * self.config.episodes) & ~begins)[None]
            self.scores.scatter_add_(0, half, self.now * counts)
            self.shares.scatter_add_(0, half, counts.float())
            self.count += over
            self.now *= ~over
            begins |= self.count >= self.config.episodes
            ended = batch["ended"][t]
            level = self.scores / self.shares.clamp(min=1)
            regret[t] = ended * (level[0] - level[1]) * self.steps
            total += (level * ended).sum(1)
            lifetimes += ended.sum()
            for sums in (self.steps, self.count, self.scores, self.shares):
                sums *= ~ended
            begins |= ended
            self.taught &= ~ended
        over = begins & (self.count >= self.config.episodes)
        self.taught |= over  # the first half is over: the rule's half begins
        self.count *= ~over
        self._begin(begins)
        self.estimates = {"advantage": regret, "value": torch.zeros_like(regret)}
        if not lifetimes:
            return {}
        baseline, rule = total / lifetimes
        return {"baseline_return": baseline, "rule_return": rule}

    def _begin(self, agents: Tensor) -> None:
        """Empty the tables of `agents` [B] (bool), and leave them out of the chain."""
        kept = ~agents[:, None, None]
        with torch.enable_grad():
            self.chain = self.chain[0] * kept, self.chain[1] * kept
        self.values *= kept[..., 0]
        self.write()
        for rollout in self.window:
            rollout["taught"] = rollout["taught"] & ~agents

    def state_values(self, obs: Tensors) -> Tensor:
        raise ConfigError("learner=groove has no values of starts: teacher=plr teacher.score=gain")

    def get_state(self) -> dict[str, Any]:
        window = [{**rollout} for rollout in self.window]
        return super().get_state() | {"window": window, "start": [*self.start]}

    def set_state(self, state: dict[str, Any]) -> None:
        own = {key: value for key, value in state.items() if key not in ("window", "start")}
        super().set_state(own)
        self.begin_window()
        logits, predictions = cast(Sequence[Tensor], state["start"])
        self.start = logits, predictions
        self._replay(cast(list[Tensors], state["window"]))

    def _replay(self, window: list[Tensors]) -> None:
        """Build the chain of updates of a checkpoint again; its values are those that are saved."""
        chain = self.start
        for rollout in window:
            moved, turned, size = self.ruled(*chain, rollout)
            self.sizes.append(size.mean(0))
            chain = moved, turned
        taught = [rollout["taught"].all(0) for rollout in window] or [~self.taught & self.taught]
        kept = torch.stack(taught).all(0)[:, None, None]
        saved = self.policy.logits.clone(), self.policy.predictions.clone()
        self.chain = torch.where(kept, chain[0], saved[0]), torch.where(kept, chain[1], saved[1])
        self.window = window
