"""BRESA: SAC with a recovery policy that a safety critic triggers at every control tick (2025).

Based on Recovery RL (Thananjeyan et al., 2021). c in {0, 1} is the environment's constraint
violation (`violated`). A decision of the task policy lasts n control ticks; gamma_risk is per
decision. Per tick:

    y_risk = c + (1 - c) m gamma_risk^(1/n) max_j Q'_j(s', a'),  L = sum_j E (Q_j(s, a_exec) - y)^2
    L_rec  = E max_j Q_j(s, pi_rec(s)),         Q = sigmoid(.), m = 0 after a termination

a' is the running decision or, with probability 1/n, a new one. As violations are rare, a fixed
share of each safety-critic batch is sampled from a buffer of recent violations; without it the
critic predicts 0. The task critic does not use c and is trained on proposed, not executed, actions.
It also learns per tick, with the intra-option target (Sutton et al., 1999) of running decisions:

    y = r + d ((1 - 1/n) min Q'(s', a) + 1/n (min Q'(s', a') - alpha log pi(a'|s')))
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.critics import critic_loss
from embodied.learners.gradient_learner import GradientLearner, frozen, soft_update
from embodied.learners.off_policy.sac import Config as SacConfig
from embodied.learners.off_policy.sac import Sac
from embodied.nn.optim import Adam
from policies.wrappers.reflex_override import ReflexOverride

NEWEST = 8  # at most so many violations of one batch are added to the buffer of violations


@dataclass(frozen=True)
class Config:
    """`gamma`: per tick; `risk_gamma`: per decision of `ticks` ticks. The reflex (`above`,
    `release`, `least`: see policies.wrappers.reflex_override) is active after `calm` updates, or
    never (`reflex: false`). `violating`: share of the safety critic's batch that is sampled from
    the last `memory` violations. `penalty`: reward penalty of a violation in the task critic, for
    comparisons (0: none). `task`: settings of SAC, without batch_size and gamma."""

    batch_size: int = 256
    gamma: float = 0.99
    ticks: int = 5
    reflex: bool = True
    above: float = 0.5
    release: float = 0.7
    least: int = 3
    calm: int = 500
    risk_gamma: float = 0.5
    risk_tau: float = 0.005
    risk_lr: float = 3e-4
    recovery_lr: float = 3e-4
    violating: float = 0.1
    memory: int = 2048
    penalty: float = 0.0
    hidden: tuple[int, ...] = (128, 128)
    task: SacConfig = field(default_factory=SacConfig)


class Held(Sac):
    """SAC for decisions that are held for several ticks, trained on transitions of single ticks."""

    ticks: int

    def _critic_loss(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        action, following = batch["action"], under(batch, "next_obs")
        q = self.critic(under(batch, "obs"), action)
        reward, discount = batch["reward"], batch["discount"]
        new = self._backup(reward, discount, following)
        with torch.no_grad():
            same = reward + discount * self.target(following, action).amin(0)
        return critic_loss(q, same + (new - same) / self.ticks), q.detach().mean()


class Bresa(GradientLearner):
    """`update` takes transitions of single ticks with the columns `violated` (bool) and, where it
    differs from `action`, `executed`. It trains the task policy, the safety critic and the recovery
    policy, in this order."""

    data = "off_policy"
    policy: ReflexOverride  # pyright: ignore[reportIncompatibleVariableOverride]
    seen: Tensor
    done: Tensor
    stored: Tensor
    cursor: Tensor
    updates: Tensor

    def __init__(self, config: Config, policy: Policy, spec: Spec) -> None:
        super().__init__()
        if not 0 < config.violating < 1 or not 0 < config.risk_gamma < 1:
            raise ConfigError("violating and risk_gamma must be between 0 and 1")
        if config.memory < NEWEST:
            raise ConfigError(f"memory={config.memory} violations must be at least {NEWEST}")
        task = replace(config.task, batch_size=config.batch_size, gamma=config.gamma)
        if task.utd != 1 or task.n_step != 1:
            raise ConfigError("task.utd and task.n_step must be 1; set data.utd_ratio instead")
        self.config, self.batch_size, self.gamma = config, config.batch_size, config.gamma
        self.policy = policy if isinstance(policy, ReflexOverride) else reflexive(policy, config)
        self.task = Held(task, self.policy.base, spec)
        self.task.ticks = config.ticks
        self.target = copy.deepcopy(self.policy.risks).requires_grad_(False)
        self.critic_params: list[Tensor] = list(self.policy.risks.parameters())
        self.target_params: list[Tensor] = list(self.target.parameters())
        self.optims = {
            **{f"task_{name}": adam for name, adam in self.task.optims.items()},
            "risk": Adam(self.critic_params, config.risk_lr),
            "recovery": Adam(self.policy.recovery.parameters(), config.recovery_lr),
        }
        self.extra = round(config.batch_size * config.violating / (1 - config.violating))
        flat = sum(leaf.size for leaf in spec.obs.values())
        self.register_buffer("seen", torch.zeros(config.memory, flat))
        self.register_buffer("done", torch.zeros(config.memory, spec.act.size))
        for name in ("stored", "cursor", "updates"):
            self.register_buffer(name, torch.tensor(0))

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        if "violated" not in batch:
            raise ConfigError("this environment reports no violations: env=contact_maze")
        cost = self.config.penalty * batch["violated"]
        metrics = self.task.update({**batch, "reward": batch["reward"] - cost})
        rows = self._ticks(batch)
        self._remember(rows)
        slots = (torch.rand(self.extra, device=self.seen.device) * self.stored).long()
        metrics |= self._risk_step(rows, slots) | self._recovery_step(rows, slots)
        self.updates += 1
        if self.config.reflex:
            self.policy.armed.copy_(self.updates >= self.config.calm)
        reflex = batch.get("reflex")
        return metrics if reflex is None else metrics | {"reflex": reflex.mean()}

    def _ticks(self, batch: Tensors) -> Tensors:
        """The safety critic's batch, with observations as flat vectors."""
        flat, action = self.policy.encoder.flat, batch["action"]
        following = under(batch, "next_obs")
        executed = batch.get("executed", action)  # demonstrations: same as the proposed action
        with torch.no_grad():
            new = self.policy.base.act(following, {}, self.policy.sample_noise(len(action), True))[
                0
            ]
        again = torch.rand(len(action), device=action.device) < 1 / self.config.ticks
        # After the reflex the task policy makes a new decision.
        again = again | (executed != action).any(1)
        return {
            "seen": flat(under(batch, "obs")),
            "executed": executed,
            "violated": batch["violated"].float(),
            "goes_on": (batch["discount"] > 0).float(),
            "next_seen": flat(following),
            "next_action": torch.where(again[:, None], new.squeeze(1), action),
        }

    def _remember(self, rows: Tensors) -> None:
        """Add violations to their buffer; no device synchronisation, so their number stays
        unknown here."""
        bad, at = rows["violated"].topk(min(NEWEST, self.batch_size))
        slots = (self.cursor + torch.arange(len(at), device=at.device)) % len(self.seen)
        for kept, new in ((self.seen, rows["seen"]), (self.done, rows["executed"])):
            kept[slots] = torch.where(bad[:, None] > 0, new[at], kept[slots])
        count = bad.sum().long()
        self.cursor.copy_((self.cursor + count) % len(self.seen))
        self.stored.copy_((self.stored + count).clamp(max=len(self.seen)))

    def _risk_step(self, rows: Tensors, slots: Tensor) -> dict[str, Tensor]:
        policy, norm = self.policy, self.policy.encoder.norm
        target = self._risk_target(rows)
        seen = torch.cat([rows["seen"], self.seen[slots]])
        action = torch.cat([rows["executed"], self.done[slots]])
        risk = policy.risks_of(norm(seen), action)
        known = (self.stored > 0).float().expand(self.extra)
        weight = torch.cat([torch.ones_like(target), known])
        target = torch.cat([target, torch.ones_like(known)])
        loss = critic_loss(risk, target, weight)
        self.descend("risk", loss)
        soft_update(self.target_params, self.critic_params, self.config.risk_tau)
        ordinary, bad = risk.detach().amax(0).split([self.batch_size, self.extra])
        return {"risk_loss": loss.detach(), "risk": ordinary.mean(), "risk_violating": bad.mean()}

    @torch.no_grad()
    def _risk_target(self, rows: Tensors) -> Tensor:
        """Targets y_risk [n] of the safety critic."""
        x = torch.cat([self.policy.encoder.norm(rows["next_seen"]), rows["next_action"]], 1)
        later = torch.sigmoid(self.target(x).squeeze(-1)).amax(0)
        gamma = self.config.risk_gamma ** (1 / self.config.ticks)
        return risk_target(rows["violated"], rows["goes_on"], gamma, later)

    def _recovery_step(self, rows: Tensors, slots: Tensor) -> dict[str, Tensor]:
        with frozen(self.critic_params):
            seen = self.policy.encoder.norm(torch.cat([rows["seen"], self.seen[slots]]))
            loss = self.policy.risks_of(seen, self.policy.recover(seen)).amax(0).mean()
            self.descend("recovery", loss)
        return {"recovery_risk": loss.detach()}

    def fit(self, rows: Tensors) -> None:
        self.task.fit(rows)
        self.policy.encoder.fit(rows)


def reflexive(base: Policy, config: Config) -> ReflexOverride:
    """An untrained reflex around the task policy `base`."""
    node = {
        "_target_": "policies.wrappers.reflex_override.ReflexOverride",
        "base": base.node,
        "ticks": config.ticks,
        "above": config.above,
        "release": config.release,
        "least": config.least,
        "hidden": list(config.hidden),
    }
    made: ReflexOverride = build(node, spec=base.spec)
    made.base = base
    return made


def risk_target(violated: Tensor, goes_on: Tensor, gamma: float, later: Tensor) -> Tensor:
    """Target of the safety critic, c + (1 - c) m gamma later; all [n]."""
    return violated + (1 - violated) * goes_on * gamma * later
