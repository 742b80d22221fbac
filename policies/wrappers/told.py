"""Told: a policy of several tasks that is told which one, by one sentence or by an observed text.

The wrapped policy has the observation `instruction`, e(s) of a sentence s (`Spec.listens`):

    a = base((o, e(s)), z)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from embodied.core.affine import Affine
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import INSTRUCTION, Spec
from embodied.core.tensors import HISTORY, Tensors, history_steps
from embodied.core.text import sentences
from embodied.nn.sentences import instruction, require_task
from embodied.policies.abilities import HasDataRanges
from embodied.policies.wrappers.translated import Translated

PAST = HISTORY + INSTRUCTION


def with_task(policy: Policy, task: str | None, here: Spec | None = None) -> Policy:
    """`policy` as one without the observation `instruction`: it does `task`, or (None) what the
    text says that is observed in an environment of the Spec `here`. A policy that needs no
    instruction is returned as it is. ConfigError for a task that it does not know, or none."""
    spec = policy.spec
    if task is not None and not (spec.tasks or spec.text):
        raise ConfigError(f"this policy has no tasks in words, so task={task} has no effect")
    seen = {} if here is None else {k: leaf for k, leaf in here.obs.items() if leaf.is_text}
    if task is not None or not seen:
        require_task(spec, task)
    if not spec.listens:
        return policy
    own = {name: leaf for name, leaf in spec.obs.items() if name != INSTRUCTION}
    own |= dict([*seen.items()][:1])
    return Told.of(policy, task, replace(spec, obs=own, text=task or "", tasks=()))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a policy that is told what to do."""

    base: Node  # node of the wrapped policy
    there: Node  # its Spec, as in spec.json
    task: str | None = None  # one of its tasks (null: the one that the observed text says)


class Told(Translated):
    """Noise, carry and chunk are the base's. Its past observations hold the present instruction: it
    stays the same for an episode. ConfigError for an observed text that is none of the tasks."""

    known: Tensor  # [T, ...]: `instruction` of each of `tasks`, so that acting needs no encoder

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        there = Spec.from_json(config.there)
        self.spec = spec
        self.config = config
        self.tasks = there.tasks if config.task is None else (config.task,)
        self.base = build(config.base, Policy, spec=there)
        self.register_buffer("known", there.obs[INSTRUCTION].zeros(len(self.tasks)))
        self.past = history_steps(self.base.initial(1)).get(INSTRUCTION, 0)
        self.noise_steps = self.base.noise_steps
        self.chunk = self.base.chunk

    @classmethod
    def of(cls, base: Policy, task: str | None, spec: Spec, known: Tensor | None = None) -> Self:
        """The trained `base`, whose parameters are shared. `known` is computed where it is None."""
        node: Node = {
            "_target_": f"{cls.__module__}.{cls.__qualname__}",
            "base": base.node,
            "there": base.spec.to_json(),
            "task": task,
        }
        policy = build(node, cls, spec=spec)
        policy.base = base
        device = next((each.device for each in base.parameters()), torch.device("cpu"))
        found = instruction(base.spec, policy.tasks) if known is None else known
        policy.known = found.to(device)
        return policy.train(base.training)

    @property
    def action_range(self) -> Affine | None:
        """The range that normalised the base's actions, where it has one."""
        return getattr(self.base, "action_range", None)

    def data_ranges(self) -> dict[str, Tensor]:
        """Those of the base, without the instruction."""
        found = self.base.data_ranges() if isinstance(self.base, HasDataRanges) else {}
        return {name: value for name, value in found.items() if name != f"obs/{INSTRUCTION}"}

    def initial(self, n: int) -> Tensors:
        """The base's carry without past instructions."""
        return _without_past(self.base.initial(n))

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """Actions [n, chunk, A], and the base's carry."""
        told = self._told(obs, noise.shape[0])
        seen = {**obs, INSTRUCTION: told}
        if self.past:
            seen[PAST] = told[:, None].expand(-1, self.past, *told.shape[1:])
        seen, carry = self.base.observe(seen, carry, noise)
        actions, carry = self.base.act(seen, carry, noise)
        return actions, _without_past(carry)

    def _told(self, obs: Tensors, n: int) -> Tensor:
        """The observation `instruction` [n, ...]."""
        said = sentences(obs, self.spec.obs) if self.config.task is None else None
        if said is None:
            return self.known.expand(n, *self.known.shape[1:])
        for sentence in set(said) - set(self.tasks):
            require_task(self.base.spec, sentence)
        return self.known[[self.tasks.index(sentence) for sentence in said]]

    def fit(self, rows: Tensors) -> None:
        """Nothing: the base keeps the normalisers that it was trained with."""

    def around(self, base: Policy) -> Self:
        return type(self).of(base, self.config.task, self.spec, self.known)


def _without_past(carry: Tensors) -> Tensors:
    return {key: value for key, value in carry.items() if not key.endswith(PAST)}
