"""PolicySet: several trained policies, of which one acts in each episode.

PROTECTED (Liu et al., 2024) keeps a small set of policies, none of which is the best against every
attack on their observations, and learns while it is deployed which one to play. The set and its
probabilities p are here; `embodied.learners.finetune.exp3` adapts p.

    embodied train env=E policy=policy_set init=RUN "policy.members=[RUN,RUN]" learner=exp3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, nest, under


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a set of policies; `base` is its first member."""

    base: Node  # node of the first member
    members: tuple[Node | str, ...]  # nodes of the others; their run folders, with init=RUN
    around: Node | None = None  # node of a wrapper put around each member, such as an attack


class PolicySet(PolicyWrapper):
    """Noise [n, ...] is that of every member, side by side, and the uniform number u that chooses
    (-1: the most probable member acts). Every member decides on every observation, so that each
    keeps its own carry, below `I/`. The carry has the episode's `member` [n] (int64; -1: none yet)
    and the `probability` it was chosen with; below `row/` they are the learner's."""

    base: Policy
    probability: Tensor

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        if not config.members or any(isinstance(each, str) for each in config.members):
            raise ConfigError(
                'policy.members names trained runs: init=RUN "policy.members=[RUN,RUN]"'
            )
        self.spec = spec
        self.base = build(self._node(config, config.base), Policy, spec=spec)
        nodes = cast(tuple[Node, ...], config.members)
        self.members = nn.ModuleList(
            build(self._node(config, node), Policy, spec=spec) for node in nodes
        )
        self.chunk = self.base.chunk
        if any(member.chunk != self.chunk for member in self.each):
            raise ConfigError("policy.members: all policies need the same chunk as init=RUN")
        self.shapes = [member.sample_noise(1).shape[1:] for member in self.each]
        self.register_buffer("probability", torch.full((len(self.each),), 1 / len(self.each)))

    @property
    def each(self) -> list[Policy]:
        return [self.base, *cast(list[Policy], [*self.members])]

    @staticmethod
    def _node(config: Config, node: Node) -> Node:
        return node if config.around is None else {**config.around, "base": node}

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """Build `node` around the trained `base`; its `members` are run folders."""
        members = [checkpoint.load_policy(path, base.spec) for path in node["members"]]
        nodes = [member.node for member in members]
        made = build({**node, "base": base.node, "members": nodes}, cls, spec=base.spec)
        for own, trained in zip(made.each, [base, *members], strict=True):
            inside = own.base if node.get("around") else own
            assert isinstance(inside, nn.Module)
            inside.load_state_dict(trained.state_dict())
        return made.requires_grad_(False)

    def initial(self, n: int) -> Tensors:
        none = torch.full((n,), -1, device=self.probability.device)
        chosen = {"member": none, "probability": torch.ones_like(none, dtype=torch.float32)}
        carry = {**chosen, **nest(chosen, "row")}
        for index, member in enumerate(self.each):
            carry |= nest(member.initial(n), str(index))
        return carry

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        u = torch.full((n, 1), -1.0, device=self.probability.device)
        parts = [member.sample_noise(n).reshape(n, -1) for member in self.each]
        return torch.cat([*parts, u.uniform_() if explore else u], 1)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        *parts, u = noise.split([*(shape.numel() for shape in self.shapes), 1], 1)
        new = carry["member"] < 0
        member = torch.where(new, self.choose(u.flatten()), carry["member"])
        probability = torch.where(new, self.probability[member], carry["probability"])
        chosen = {"member": member, "probability": probability}
        kept = {**chosen, **nest(chosen, "row")}
        actions: list[Tensor] = []
        for index, (policy, part) in enumerate(zip(self.each, parts, strict=True)):
            own = part.reshape(len(part), *self.shapes[index])
            seen, state = policy.observe(obs, under(carry, str(index)), own)
            action, state = policy.act(seen, state, own)
            actions.append(action)
            kept |= nest(state, str(index))
        rows = torch.arange(len(member), device=member.device)
        return torch.stack(actions)[member, rows], kept

    def choose(self, u: Tensor) -> Tensor:
        """The members [n] (int64) of uniform numbers u [n]; for -1 the most probable one."""
        edges = self.probability.cumsum(0)[:-1]
        drawn = torch.searchsorted(edges, u.contiguous(), right=True)
        return torch.where(u < 0, self.probability.argmax(), drawn)
