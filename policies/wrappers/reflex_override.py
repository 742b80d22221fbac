"""ReflexOverride: a low-rate task policy with a recovery policy that can override it at every tick.

The policy of BRESA (2025), based on Recovery RL (Thananjeyan et al., 2021). A decision of the task
policy is held for `ticks` control ticks; at each of them the safety critic computes

    eps = max_j sigmoid(Q_j(s, a))        s: current state, a: action about to be executed

and if eps exceeds `above`, the recovery policy's action is executed instead, until the task policy
proposes a safe action. Both the proposed and the executed action are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.moved import attributes
from embodied.nn.ensemble import Ensemble
from embodied.nn.networks import mlp
from policies.networks.encoders import Encoder
from policies.wrappers.reflex_rule import reflexing

RANDOM = "policies.random.Random"
UNKNOWN = (
    -2.0
)  # initial logit of the safety critic (safe), so that the reflex does not start active


@dataclass(frozen=True, kw_only=True)
class Config:
    """`base`: the task policy, which decides every `ticks` ticks. The reflex starts when the risk
    exceeds `above`, ends at `release * above`, and lasts at least `least` ticks. `hidden`: layers
    of the safety critic and the recovery policy."""

    base: Node
    ticks: int = 5
    above: float = 0.5
    release: float = 0.7
    least: int = 3
    hidden: tuple[int, ...] = (128, 128)


class ReflexOverride(PolicyWrapper):
    """Task policy with a safety reflex; noise is the base's. The transition of a tick holds the
    proposed action (`row/action`), the `executed` one, and whether the `reflex` acted (0 or 1)."""

    chunk = 1
    armed: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if not 0 < config.above < 1 or not 0 < config.release <= 1:
            raise ConfigError("the reflex needs 0 < above < 1 and 0 < release <= 1")
        if config.ticks < 1 or config.least < 1:
            raise ConfigError("the reflex needs ticks and least of at least 1")
        self.spec, self.config = spec, config
        self.on, self.off = config.above, config.above * config.release
        self.base: Policy = build(config.base, spec=spec)
        if self.base.chunk != 1 or self.base.initial(1) or spec.act.dtype != "float32":
            raise ConfigError("the reflex needs single continuous actions: policy=gaussian")
        self.encoder = Encoder(spec.obs)
        self.encoder.only_vectors()  # the robot process evaluates it without torch
        size = spec.act.size
        self.risks = Ensemble(2, self.encoder.size + size, config.hidden)
        torch.nn.init.constant_(self.risks.biases[-1], UNKNOWN)
        self.recovery = mlp(self.encoder.size, config.hidden, size)
        self.register_buffer("armed", torch.tensor(False))

    def risk(self, obs: Tensors, action: Tensor) -> Tensor:
        """Risk [n] of actions [n, A]: the maximum of two networks."""
        return self.risks_of(self.encoder(obs), action).amax(0)

    def risks_of(self, seen: Tensor, action: Tensor) -> Tensor:
        """Risks [2, n] of encoded observations `seen` and actions [n, A]."""
        return torch.sigmoid(self.risks(torch.cat([seen, action], 1)).squeeze(-1))

    def recover(self, seen: Tensor) -> Tensor:
        """Actions [n, A] of the recovery policy for encoded observations `seen`."""
        return torch.tanh(self.recovery(seen))

    def initial(self, n: int) -> Tensors:
        device, size = self.armed.device, self.spec.act.size
        zeros = torch.zeros(n, size, device=device)
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
        fresh, age = carry["left"] <= 0, carry["age"]
        action = self.base.act(obs, {}, noise)[0].squeeze(1)
        action = torch.where(fresh[:, None], action, carry["row/action"])
        seen, config = self.encoder(obs), self.config
        risk = self.risks_of(seen, action).amax(0)
        acting = self.armed & reflexing(risk, age > 0, age, self.on, self.off, config.least)
        executed = torch.where(acting[:, None], self.recover(seen), action)
        left = torch.where(fresh, config.ticks, carry["left"]) - 1
        return executed[:, None], {
            "left": left.masked_fill(acting, 0),  # after the reflex the task policy decides again
            "age": torch.where(acting, age + 1, 0),
            "row/action": action,
            "row/executed": executed,
            "row/reflex": acting.float(),
        }

    def warmup_policy(self) -> Policy:
        """A policy with uniform decisions, held for the same number of ticks."""
        node = {**self.node, "base": {"_target_": RANDOM}}
        return build(node, spec=self.spec).to(self.armed.device)

    def fit(self, rows: Tensors) -> None:
        self.base.fit(rows)
        self.encoder.fit(rows)


__getattr__ = attributes(__name__)
