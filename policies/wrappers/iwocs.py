"""Iwocs: acts as the most pessimistic of several policies, each trained for parameters that were
the worst ones of the set before it.

IWOCS (Zouitine et al., 2023). Member j is trained at parameters psi_j by an ordinary method. With
Q_j, the values of its policy pi_j there, and T_j, its predictor of the next observation,

    a = pi_j(o),   j = argmin { Q_i(o, pi_i(o)) : e_i <= rho },   e_i = |T_i(o-, a-) - o|

where o- and a- are the observation and the action before. A member whose prediction misses by more
than rho is not of these parameters and is left out; where all are, and in the first step of an
episode, the base acts, a policy that was trained for all parameters. The error e is a mean over the
elements of the vector observations, in the units of the member's normaliser (the paper: a sum).

    embodied eval BASE policy=iwocs "policy.members=[RUN,RUN]"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from embodied.core import checkpoint
from embodied.core.bounds import Count, NonNegative
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors
from embodied.nn.networks import QFunction, mlp
from embodied.policies import gaussian
from embodied.policies.encoded import require_continuous

CRITIC = {"_target_": "embodied.learners.critics.Critic", "n": 2, "hidden": [256, 256]}


@dataclass(frozen=True)
class MemberConfig(gaussian.Config):
    """Settings of a member of IWOCS."""

    critic: Node = field(default_factory=CRITIC.copy)  # node of a QFunction: its policy's values
    predictor: tuple[Count, ...] = (256, 256)  # units of the predictor's hidden layers


class Member(gaussian.Gaussian):
    """A Gaussian policy with the values of its actions, without an entropy bonus, and a predictor
    of its next vector observations; `learner=iwocs` trains all three."""

    value: Any  # a QFunction

    def __init__(self, config: MemberConfig, spec: Spec) -> None:
        super().__init__(config, spec)
        if self.chunk > 1 or not self.encoder.vectors:
            raise ConfigError("iwocs_member has one action per decision and observes vectors")
        self.actor_parameters = [*self.parameters()]
        seen = {name: leaf for name, leaf in spec.obs.items() if not hidden(name)}
        self.value = build(config.critic, QFunction, spec=replace(spec, obs=seen), size=self.size)
        flat = len(self.encoder.norm.mean)
        self.predictor = mlp(flat + self.size, config.predictor, flat)

    def error(self, seen: Tensor, action: Tensor, following: Tensor) -> Tensor:
        """The mean error [n] of the vector observations `following` [n, D] that are predicted for
        `action` [n, size] at `seen` [n, D], in units of the normaliser."""
        norm = self.encoder.norm
        before = norm(seen)
        change = self.predictor(torch.cat([before, action], 1))
        return (before + change - norm(following)).abs().mean(1)

    def fit(self, rows: Tensors) -> None:
        super().fit(rows)
        self.value.encoder.fit(rows)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the choice among members."""

    base: Node  # node of the policy that acts where no member is admissible
    members: tuple[Node | str, ...]  # nodes of members; in embodied eval their run folders
    rho: NonNegative = 0.3  # largest error of the prediction of an admissible member


class Iwocs(PolicyWrapper):
    """Noise [n, ...] is that of the base and of every member, side by side. The carry holds the
    last vector observations and the last action."""

    for_evaluation = True
    base: Policy
    members: nn.ModuleList

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        require_continuous(spec)
        if not config.members or any(isinstance(each, str) for each in config.members):
            raise ConfigError('policy.members names runs of learner=iwocs, in "embodied eval" only')
        self.spec = spec
        self.config = config
        self.base = build(config.base, Policy, spec=spec)
        nodes = cast(tuple[Node, ...], config.members)
        self.members = nn.ModuleList(build(node, Member, spec=spec) for node in nodes)
        if self.base.chunk > 1 or self.base.augments or self.base.initial(1):
            raise ConfigError("iwocs needs a base with one action per decision and no memory")
        self.widths = [
            policy.sample_noise(1).flatten(1).shape[1] for policy in (self.base, *self.each)
        ]

    @property
    def each(self) -> list[Member]:
        return cast(list[Member], [*self.members])

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """Build `node` around the trained `base`; its `members` are run folders."""
        members = [checkpoint.load_policy(path, base.spec) for path in node["members"]]
        if not all(isinstance(member, Member) for member in members):
            raise ConfigError(
                "policy.members: runs of learner=iwocs policy=iwocs_member are needed"
            )
        made = super().wrap(base, {**node, "members": [each.node for each in members]}, inner)
        for own, member in zip(made.each, members, strict=True):
            own.load_state_dict(member.state_dict())
        return made

    def initial(self, n: int) -> Tensors:
        mean = self.each[0].encoder.norm.mean
        return {
            "seen": mean.new_zeros(n, len(mean)),
            "acted": mean.new_zeros(n, self.spec.act.size),
            "unseen": mean.new_ones(n, dtype=torch.bool),
        }

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        policies = (self.base, *self.each)
        return torch.cat([each.sample_noise(n, explore).flatten(1) for each in policies], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        base_noise, *parts = noise.split(self.widths, 1)
        shape = self.base.sample_noise(1).shape[1:]
        usual, _ = self.base.act(obs, {}, base_noise.unflatten(1, shape))
        actions: list[Tensor] = []
        values: list[Tensor] = []
        far: list[Tensor] = []
        now = self.each[0].encoder.flat(obs)
        for member, part in zip(self.each, parts, strict=True):
            action, _ = member.act(obs, {}, part)
            actions.append(action)
            values.append(member.value(obs, action.flatten(1)).amin(0))
            far.append(member.error(carry["seen"], carry["acted"], now))
        fits = (torch.stack(far) <= self.config.rho) & ~carry["unseen"]
        index, known = most_pessimistic(torch.stack(values), fits)
        chosen = torch.stack(actions)[index, torch.arange(len(now), device=now.device)]
        chosen = torch.where(known.view(-1, *[1] * (chosen.ndim - 1)), chosen, usual)
        unseen = torch.zeros_like(carry["unseen"])
        return chosen, {"seen": now, "acted": chosen.flatten(1), "unseen": unseen}


def most_pessimistic(values: Tensor, fits: Tensor) -> tuple[Tensor, Tensor]:
    """The member [n] (int64) with the least of `values` [K, n] among those that fit, `fits` [K, n]
    (bool), and whether there is one [n] (bool)."""
    index = values.masked_fill(~fits, torch.inf).argmin(0)
    return index, fits.any(0)
