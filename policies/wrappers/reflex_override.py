"""ReflexOverride: a low-rate task policy with a recovery policy that can override its actions.

The policy of BRESA (2025), based on Recovery RL (Thananjeyan et al., 2021). A decision of the task
policy is held for `decision_steps` control steps. The safety critic computes

    eps = max_j sigmoid(Q_j(s, a))        s: current state, a: action about to be executed

and if eps exceeds `threshold`, the recovery policy's action is executed instead, until the task
policy proposes a safe action. Both the proposed and the executed action are stored.

`rate` is how often that is checked: "control", at every control step (BRESA), or "decision", once
per decision, whose action is then held either way (Recovery RL). With "decision" a transition is a
whole decision: an action chunk that repeats one action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from embodied.core.bounds import Bound, Count, PositiveFraction, Units
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.nn.networks import Ensemble, mlp
from embodied.policies.networks.encoders import Encoder
from embodied.policies.wrappers.reflex_rule import reflexing

RANDOM = "embodied.policies.random.Random"
UNKNOWN = -2.0  # initial logit of the safety critic: safe, so that no reflex is active at first
Share = Annotated[float, Bound(above=0.0, below=1.0)]
Stiffness = Annotated[float, Bound(-1.0, 1.0)]
Rate = Literal["control", "decision"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a task policy with a reflex."""

    base: Node  # node of the task policy
    rate: Rate = "control"  # how often the reflex acts: each control step, or each decision
    decision_steps: Count = 5  # control steps of a decision of the task policy
    threshold: Share = 0.5  # risk at which the reflex starts
    release_ratio: PositiveFraction = 0.7  # the reflex ends at this share of `threshold`
    min_duration_steps: Count = 3  # shortest reflex in control steps
    hidden: tuple[Units, ...] = (128, 128)  # layers of the safety critic and the recovery policy
    reflex_obs: str | None = None  # observation that only these two see (null: both see everything)
    held_stiffness: tuple[Stiffness, ...] = ()  # last elements, for the reflex only (empty: none)


class ReflexOverride(PolicyWrapper):
    """Task policy with a safety reflex; noise is the base's. The transition of a tick holds the
    proposed action (`row/action`), the `executed` one, and whether the `reflex` acted (0 or 1)."""

    armed: Tensor
    held: Tensor
    trained_task: bool = False

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.on = config.threshold
        self.off = config.threshold * config.release_ratio
        by_decision = config.rate == "decision"
        self.chunk = config.decision_steps if by_decision else 1
        self.held_calls = 1 if by_decision else config.decision_steps
        """Calls of `act` that a decision lasts."""
        self.min_calls = -(-config.min_duration_steps // self.chunk)
        self.base = build(config.base, Policy, spec=task_spec(spec, config))
        if self.base.chunk != 1 or self.base.initial(1) or not spec.act.is_continuous:
            raise ConfigError("the reflex needs single continuous actions: policy=gaussian")
        self.encoder = Encoder(reflex_leaves(spec, config))
        self.encoder.only_vectors()  # the robot process evaluates it without torch
        size = spec.act.size
        self.risks = Ensemble(2, self.encoder.size + size, config.hidden)
        torch.nn.init.constant_(self.risks.biases[-1], UNKNOWN)
        self.recovery = mlp(self.encoder.size, config.hidden, size)
        self.register_buffer("armed", torch.tensor(False))
        self.register_buffer("held", torch.tensor(config.held_stiffness), persistent=False)

    def propose(self, obs: Tensors, noise: Tensor) -> Tensor:
        """The task policy's decision [n, A], with the held stiffness."""
        action = self.base.act(obs, {}, noise)[0].squeeze(1)
        if not len(self.held):
            return action
        return torch.cat([action, self.held.expand(len(action), -1)], 1)

    def risk(self, obs: Tensors, action: Tensor) -> Tensor:
        """Risk [n] of actions [n, A]: the maximum of two networks."""
        return self.risks_of(self.encoder(obs), action).amax(0)

    def risks_of(self, seen: Tensor, action: Tensor) -> Tensor:
        """Risks [2, n] of encoded observations `seen` and actions [n, A]."""
        return torch.sigmoid(self.risk_logits(seen, action))

    def risk_logits(self, seen: Tensor, action: Tensor) -> Tensor:
        """Log-odds [2, n] of `risks_of`."""
        return self.risks(torch.cat([seen, action], 1)).squeeze(-1)

    def recover(self, seen: Tensor) -> Tensor:
        """Actions [n, A] of the recovery policy for encoded observations `seen`."""
        return torch.tanh(self.recovery(seen))

    def initial(self, n: int) -> Tensors:
        device = self.armed.device
        zeros = torch.zeros(n, self.spec.act.size, device=device)
        return {
            "left": torch.zeros(n, dtype=torch.int64, device=device),
            "age": torch.zeros(n, dtype=torch.int64, device=device),
            "row/action": zeros,
            "row/executed": zeros,
            "row/reflex": zeros[:, 0],
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.base.sample_noise(n, explore)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        fresh = carry["left"] <= 0
        age = carry["age"]
        action = torch.where(fresh[:, None], self.propose(obs, noise), carry["row/action"])
        seen = self.encoder(obs)
        risk = self.risks_of(seen, action).amax(0)
        acting = self.armed & reflexing(risk, age > 0, age, self.on, self.off, self.min_calls)
        executed = torch.where(acting[:, None], self.recover(seen), action)
        left = torch.where(fresh, self.held_calls, carry["left"]) - 1
        return executed[:, None].expand(-1, self.chunk, -1), {
            "left": left.masked_fill(acting, 0),  # after the reflex the task policy decides again
            "age": torch.where(acting, age + 1, 0),
            "row/action": action,
            "row/executed": executed,
            "row/reflex": acting.float(),
        }

    def use_task_of(self, other: Policy) -> None:
        """Take over the trained task policy of `other`, as it is."""
        if not isinstance(other, ReflexOverride) or other.base.spec != self.base.spec:
            raise ConfigError(
                "task_run should be a run of learner=bresa in this environment, with the same "
                "reflex_obs and held_stiffness"
            )
        self.base = other.base.requires_grad_(False)
        self.trained_task = True
        self.config = replace(self.config, base=other.base.node)
        self.node = {**self.node, "base": other.base.node}

    def warmup_policy(self) -> Policy:
        """Uniform decisions, held for as many steps; this policy where the task is trained."""
        if self.trained_task:
            return self
        node = {**self.node, "base": {"_target_": RANDOM}}
        return build(node, type(self), spec=self.spec).to(self.armed.device)

    def without_reflex(self) -> Policy:
        """The task policy alone, at its own rate: where the robot's safety chain has the reflex."""
        dt = self.spec.dt * self.config.decision_steps
        policy = build(self.config.base, Policy, spec=replace(self.base.spec, dt=dt))
        policy.load_state_dict(self.base.state_dict())
        return policy.to(self.armed.device).train(self.training)

    def fit(self, rows: Tensors) -> None:
        self.base.fit(rows)
        self.encoder.fit(rows)


def reflex_leaves(spec: Spec, config: Config) -> dict[str, Leaf]:
    """The observations that the safety critic and the recovery policy see; ConfigError."""
    name = config.reflex_obs
    if name is None:
        return dict(spec.obs)
    if name not in spec.obs or len(spec.obs) < 2:
        raise ConfigError(
            f"reflex_obs={name}: the observations are {sorted(spec.obs)}; one is needed for the "
            "reflex, others for the task policy"
        )
    return {name: spec.obs[name]}


def task_spec(spec: Spec, config: Config) -> Spec:
    """The spec of the task policy: without the reflex's own observation and the held stiffness."""
    reflex_leaves(spec, config)
    kept = {name: leaf for name, leaf in spec.obs.items() if name != config.reflex_obs}
    act = spec.act
    held = len(config.held_stiffness)
    if held:
        if held >= act.size:
            raise ConfigError(
                f"held_stiffness={list(config.held_stiffness)} should be fewer numbers than the "
                f"action's {act.size}"
            )
        act = replace(act, shape=(act.size - held,), names=act.names[: act.size - held])
    return replace(spec, obs=kept, act=act)
