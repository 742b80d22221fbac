"""BRESA: SAC with a recovery policy that a safety critic triggers at every control step (2025).

Based on Recovery RL (Thananjeyan et al., 2021). c in {0, 1} is the environment's constraint
violation (`violated`). A decision of the task policy lasts n control steps; gamma_risk is per
decision. Per control step:

    y_risk = c + (1 - c) m gamma_risk^(1/n) max_j Q'_j(s', a'),  L = sum_j E w H(y, Q_j(s, a_exec))
    L_rec  = E max_j Q_j(s, pi_rec(s)),         Q = sigmoid(.), m = 0 after a termination

a' is the running decision or, with probability 1/n or after a recovery, a new one. As violations
are rare, a fixed share of each safety-critic batch is sampled from a buffer of recent violations.
H is the cross-entropy, minimal at the expected target. With p the share of violations in the
replayed transitions, the v violations of a batch of n and the k from their buffer each have the
weight w = p n / (v + k), other samples 1: as much weight as without the buffer, so that Q is a
probability. (Without `calibrated`: squared error with w = 1, as the method was published; Q is then
far above the probability.) The task critic does not use c and is trained on proposed, not executed,
actions.
It also learns per control step, with the intra-option target (Sutton et al., 1999) of running
decisions:

    y = r + d ((1 - 1/n) min Q'(s', a) + 1/n (min Q'(s', a') - alpha log pi(a'|s')))

or, with `task.n_step` of n or more, with the n-step return, after which the decision has ended;
values then spread over as much time per update as those of whole decisions.

With `rate: decision` it is Recovery RL: transitions are whole decisions (n = 1 above, gamma_risk
per transition), and the safety critic is asked once per decision.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Number,
    PositiveFraction,
    Units,
)
from embodied.core.build import ConfigError, build
from embodied.core.checkpoint import load_policy
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.critics import critic_loss
from embodied.learners.learner import Learner, frozen, soft_update
from embodied.learners.off_policy.sac import Config as SacConfig
from embodied.learners.off_policy.sac import Sac
from embodied.nn.optim import Adam
from embodied.policies.wrappers import reflex_override
from embodied.policies.wrappers.reflex_override import Rate, ReflexOverride

Between0And1 = Annotated[float, Bound(above=0.0, below=1.0)]
SHARE_RATE = 1e-3  # least rate of the running mean of the share of violations
NEWEST = 8  # at most so many violations of one batch are added to the buffer of violations


@dataclass(frozen=True)
class Config:
    """Settings of BRESA and Recovery RL; those of the reflex are explained in
    embodied.policies.wrappers.reflex_override."""

    batch_size: Count = 256  # transitions per update
    gamma: Fraction = 0.99  # discount of the task per control step
    rate: Rate = "control"  # when the safety critic is asked: each "control" step or "decision"
    decision_steps: Count = 5  # control steps of a decision
    reflex: bool = True  # false: the recovery policy never acts
    threshold: Between0And1 = 0.5  # risk above which the recovery policy acts
    release_ratio: PositiveFraction = 0.7  # it stops below this share of the threshold
    min_duration_steps: Count = 3  # least control steps that it acts for
    reflex_obs: str | None = None  # observation that only the reflex sees; null: both see all
    held_stiffness: tuple[Number, ...] = ()  # last action elements, which only the reflex changes
    reflex_start: CountOrZero = 500  # updates before the reflex can act
    risk_gamma: Between0And1 = 0.5  # discount of the risk per decision
    risk_tau: PositiveFraction = 0.005  # step of the safety critic's target network
    risk_lr: PositiveFraction = 3e-4  # Adam's learning rate of the safety critic
    recovery_lr: PositiveFraction = 3e-4  # Adam's learning rate of the recovery policy
    violation_fraction: Between0And1 = 0.1  # of the safety critic's batch, from the violations
    violation_buffer: Annotated[int, Bound(NEWEST)] = 2048  # newest violations that are kept
    calibrated: bool = False  # train the risk, and so `threshold`, to be a probability
    violation_penalty: NonNegative = 0.0  # taken from the task's reward at a violation
    hidden: tuple[Units, ...] = (128, 128)  # units of the safety critic and the recovery policy
    task: SacConfig = field(default_factory=SacConfig)  # SAC; n_step 1, or >= decision_steps
    task_run: str | None = None  # run whose task policy is used as it is; null: train it too


class Held(Sac):
    """SAC for decisions that are held for several control steps, trained on transitions of single
    control steps."""

    held_steps: int

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        following = under(batch, "next_obs")
        q = self.critic(under(batch, "obs"), batch["action"])
        new = self._backup(batch["reward"], batch["discount"], following)
        with torch.no_grad():
            value = self.target(following, batch["action"]).amin(0)
            same = batch["reward"] + batch["discount"] * value
        return self.critic_error(batch, q, same + (new - same) / self.held_steps)


class Bresa(Learner):
    """`update` takes transitions of single control steps (`rate: decision`: of decisions) with the
    columns `violated` (bool) and, where it differs from `action`, `executed`. It trains the task
    policy, the safety critic and the recovery policy, in this order."""

    data = "off_policy"
    seen: Tensor
    done: Tensor
    stored: Tensor
    cursor: Tensor
    updates: Tensor
    violating: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__(config)
        task = replace(config.task, batch_size=config.batch_size, gamma=config.gamma)
        if task.utd != 1:
            raise ConfigError("task.utd must be 1; set data.utd_ratio instead")
        if task.actor_start:
            raise ConfigError("task.actor_start must be 0: the task policy learns from the start")
        self.policy = policy if isinstance(policy, ReflexOverride) else reflexive(policy, config)
        if config.task_run is not None:
            self.policy.use_task_of(load_policy(config.task_run, spec))
        self.held_steps = self.policy.held_calls
        """Transitions that a decision lasts."""
        self.task = Held(task, self.policy.base, self.policy.base.spec)
        self.n_step = task.n_step
        self.keep_single = task.n_step > 1
        if self.keep_single and (
            task.n_step < self.held_steps or config.rate == "decision" or config.violation_penalty
        ):
            raise ConfigError(
                f"task.n_step={task.n_step} should be 1, or at least decision_steps="
                f"{config.decision_steps} with rate=control and without violation_penalty"
            )
        self.task.held_steps = 1 if self.keep_single else self.held_steps
        self.target = copy.deepcopy(self.policy.risks).requires_grad_(False)
        self.critic_params: list[Tensor] = list(self.policy.risks.parameters())
        self.target_params: list[Tensor] = list(self.target.parameters())
        self.optims = {
            **{f"task_{name}": adam for name, adam in self.task.optims.items()},
            "risk": Adam(self.critic_params, config.risk_lr),
            "recovery": Adam(self.policy.recovery.parameters(), config.recovery_lr),
        }
        self.extra = round(
            config.batch_size * config.violation_fraction / (1 - config.violation_fraction)
        )
        slots = config.violation_buffer
        self.register_buffer("seen", torch.zeros(slots, self.policy.encoder.size))
        self.register_buffer("done", torch.zeros(slots, spec.act.size))
        for name in ("stored", "cursor", "updates"):
            self.register_buffer(name, torch.tensor(0))
        if config.calibrated:
            self.register_buffer("violating", torch.tensor(0.0))  # running share of violations

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        if "violated" not in batch:
            raise ConfigError(
                "this environment reports no violations: env=contact_maze or env=fr3_channel"
            )
        metrics: Tensors = {}
        if self.config.task_run is None:
            chosen = batch["action"][:, : self.policy.base.spec.act.size]
            cost = self.config.violation_penalty * batch["violated"]
            task = {**batch, "action": chosen, "reward": batch["reward"] - cost}
            metrics = self.task.update(task)
        transitions = self._risk_transitions(self._single(batch))
        self._remember(transitions)
        slots = (torch.rand(self.extra, device=self.seen.device) * self.stored).long()
        metrics |= self._risk_step(transitions, slots) | self._recovery_step(transitions, slots)
        self.updates += 1
        if self.config.reflex:
            self.policy.armed.copy_(self.updates >= self.config.reflex_start)
        reflex = batch.get("reflex")
        return metrics if reflex is None else metrics | {"reflex": reflex.mean()}

    def _single(self, batch: Tensors) -> Tensors:
        """The transitions of single control steps (or decisions) in `batch`."""
        if not self.keep_single:
            return batch
        if "single/discount" not in batch:
            raise ConfigError("task.n_step above 1 is for a run's own transitions: demos=null")
        return batch | under(batch, "single")

    def _risk_transitions(self, batch: Tensors) -> Tensors:
        """The safety critic's batch, with observations as flat vectors."""
        flat = self.policy.encoder.flat
        action = batch["action"]
        following = under(batch, "next_obs")
        executed = batch.get("executed", action)  # demonstrations: same as the proposed action
        with torch.no_grad():
            new = self.policy.propose(following, self.policy.sample_noise(len(action), True))
        again = torch.rand(len(action), device=action.device) < 1 / self.held_steps
        # After the reflex the task policy makes a new decision.
        again = again | (executed != action).any(1)
        return {
            "seen": flat(under(batch, "obs")),
            "executed": executed,
            "violated": batch["violated"].float(),
            "goes_on": (batch["discount"] > 0).float(),
            "next_seen": flat(following),
            "next_action": torch.where(again[:, None], new, action),
        }

    def _remember(self, transitions: Tensors) -> None:
        """Add violations to their buffer; no device synchronisation, so their number stays
        unknown here."""
        bad, at = transitions["violated"].topk(min(NEWEST, self.batch_size))
        slots = (self.cursor + torch.arange(len(at), device=at.device)) % len(self.seen)
        for kept, new in ((self.seen, transitions["seen"]), (self.done, transitions["executed"])):
            kept[slots] = torch.where(bad[:, None] > 0, new[at], kept[slots])
        count = bad.sum().long()
        self.cursor.copy_((self.cursor + count) % len(self.seen))
        self.stored.copy_((self.stored + count).clamp(max=len(self.seen)))

    def _risk_step(self, transitions: Tensors, slots: Tensor) -> dict[str, Tensor]:
        policy = self.policy
        seen = policy.encoder.norm(torch.cat([transitions["seen"], self.seen[slots]]))
        action = torch.cat([transitions["executed"], self.done[slots]])
        target = self._risk_target(transitions)
        target = torch.cat([target, torch.ones_like(target[:1]).expand(self.extra)])
        logits = policy.risk_logits(seen, action)
        weight = self._risk_weights(transitions["violated"])
        risk = torch.sigmoid(logits)
        if self.config.calibrated:
            loss = cross_entropy(logits, target, weight)
        else:
            loss = critic_loss(risk, target, weight)
        self.descend("risk", loss)
        soft_update(self.target_params, self.critic_params, self.config.risk_tau)
        ordinary, bad = risk.detach().amax(0).split([self.batch_size, self.extra])
        return {"risk_loss": loss.detach(), "risk": ordinary.mean(), "risk_violating": bad.mean()}

    def _risk_weights(self, violated: Tensor) -> Tensor:
        """Weights of the batch [n] and of the samples from the buffer of violations [k]."""
        known = (self.stored > 0).float().expand(self.extra)
        if not self.config.calibrated:
            return torch.cat([torch.ones_like(violated), known])
        rate = (1 / (self.updates + 1.0)).clamp(min=SHARE_RATE)
        self.violating.lerp_(violated.mean(), rate)
        each = self.violating * len(violated) / (violated.sum() + known.sum()).clamp(min=1)
        return torch.cat([torch.where(violated > 0, each, 1.0), each * known])

    @torch.no_grad()
    def _risk_target(self, transitions: Tensors) -> Tensor:
        """Targets y_risk [n] of the safety critic."""
        seen = self.policy.encoder.norm(transitions["next_seen"])
        x = torch.cat([seen, transitions["next_action"]], 1)
        later = torch.sigmoid(self.target(x).squeeze(-1)).amax(0)
        gamma = self.config.risk_gamma ** (1 / self.held_steps)
        return risk_target(transitions["violated"], transitions["goes_on"], gamma, later)

    def _recovery_step(self, transitions: Tensors, slots: Tensor) -> dict[str, Tensor]:
        with frozen(self.critic_params):
            seen = self.policy.encoder.norm(torch.cat([transitions["seen"], self.seen[slots]]))
            loss = self.policy.risks_of(seen, self.policy.recover(seen)).amax(0).mean()
            self.descend("recovery", loss)
        return {"recovery_risk": loss.detach()}

    def fit(self, transitions: Tensors) -> None:
        if self.config.task_run is None:
            self.task.fit(transitions)
        self.policy.encoder.fit(transitions)


def reflexive(base: Policy, config: Config) -> ReflexOverride:
    """An untrained reflex around the task policy `base`."""
    of_policy = {field.name for field in fields(reflex_override.Config)}
    node = {
        "_target_": "embodied.policies.wrappers.reflex_override.ReflexOverride",
        "base": base.node,
        **{name: value for name, value in vars(config).items() if name in of_policy},
    }
    node = {key: list(value) if isinstance(value, tuple) else value for key, value in node.items()}
    made = build(node, ReflexOverride, spec=base.spec)
    if made.base.spec == base.spec:
        made.base = base
    return made


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Sum over critics of the mean cross-entropy; `logits` [E, N], `target` and `weight` [N]."""
    each = binary_cross_entropy_with_logits(logits, target.expand_as(logits), reduction="none")
    return (each * weight).mean(1).sum()


def risk_target(violated: Tensor, goes_on: Tensor, gamma: float, later: Tensor) -> Tensor:
    """Target of the safety critic, c + (1 - c) m gamma later; all [n]."""
    return violated + (1 - violated) * goes_on * gamma * later
