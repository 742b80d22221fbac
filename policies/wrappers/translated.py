"""Translated: base class of policies that put what another one sees and does into other terms.

PhysicalUnits: a policy in physical units around a policy that acts on normalised values.

With the maps A_k (`core.affine.Affine`) of the action and of the observations,

    a = A_action(base(A_o^-1(o), z)),   loss(o, a) = base.loss(A_o^-1(o), A_action^-1(a))

Nothing is clamped here: physical limits are the business of a robot's safety chain.

Mapped: a policy with names and units of its own, as a policy of an environment or a robot.

The mapping (`embodied.datasets.mapping`) says which observation here is which one there, and which
physical values there are the actions -1 and +1 here:

    a = A^-1(base(o_there(o), z))

An action beyond +-1 is handed on as it is: what the environment or the safety chain does with it is
their business.

Told: a policy of several tasks that is told which one, by one sentence or by an observed text.

The wrapped policy has the observation `instruction`, e(s) of a sentence s (`Spec.listens`):

    a = base((o, e(s)), z)
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.bounds import Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.device import device_of
from embodied.core.policy import Policy
from embodied.core.spec import (
    INSTRUCTION,
    NORMALIZED,
    Leaf,
    Spec,
    SpecMismatch,
    hidden,
    require_same,
)
from embodied.core.tensors import HISTORY, Tensors, history_steps, nest, under, with_history
from embodied.core.text import sentences
from embodied.datasets.mapping import (
    Mapping,
    inverse_order,
    listed,
    permuted,
    require_actions,
    require_fit,
    require_names,
    said,
)
from embodied.nn.sentences import instruction, require_task
from embodied.policies.abilities import FiltersLatents, HasDataRanges, with_real_time_chunking


class Translated(Policy):
    """Noise and chunk are those of the trained `base`. A subclass has `act` and `around`."""

    config: Any
    base: Policy

    def __init__(self, config: Any, spec: Spec, there: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.base = build(config.base, Policy, spec=there)
        self.chunk = self.base.chunk
        self.noise_steps = self.base.noise_steps

    @classmethod
    def translating(cls, base: Policy, spec: Spec, **settings: Any) -> Self:
        """A policy of `spec` around the trained `base`, whose parameters are shared."""
        target = f"{cls.__module__}.{cls.__qualname__}"
        policy = build({"_target_": target, "base": base.node, **settings}, cls, spec=spec)
        policy.base = base
        return policy

    def around(self, base: Policy) -> Self:
        """The same translation of another base with the same spec."""
        raise NotImplementedError(f"{type(self).__name__} does not implement around")

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.chunk = self.base.chunk  # some policies replan every step outside of training
        return self

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return self.base.sample_noise(n, explore)

    def inference_policy(self) -> Policy:
        inner = self.base.inference_policy()
        return self if inner is self.base else self.around(inner)

    def with_real_time_chunking(self, mode: str) -> Policy:
        return self.around(with_real_time_chunking(self.base, mode))


@dataclass(frozen=True, kw_only=True)
class PhysicalUnitsConfig:
    """Settings of a policy in physical units; other observations reach the base as they are.

    Give `reach` if the data lie partly outside of [-1, 1] (quantiles, mean and std): the base then
    clamps nothing, and `reach` bounds the intermediate predictions of its sampler.
    """

    base: Node  # node of the policy on normalised values
    action: Affine  # physical values of its -1 and +1, per element
    obs: dict[str, Affine] = field(default_factory=dict[str, Affine])  # of observations
    reach: Positive | None = None  # largest normalised action (null: base acts in [-1, 1])


class PhysicalUnits(Translated):
    """Observations, actions and `spec` are physical; noise, carry and chunk are the base's."""

    def __init__(self, config: PhysicalUnitsConfig, spec: Spec) -> None:
        super().__init__(config, spec, normalized_spec(spec, config))

    @classmethod
    def of(
        cls,
        base: Policy,
        spec: Spec,
        action: Affine,
        obs: abc.Mapping[str, Affine] | None = None,
        reach: float | None = None,
    ) -> Self:
        """A policy with the physical `spec` around the trained `base`, whose parameters it takes.

        ConfigError if the base's spec is not `spec` in normalised values.
        """
        maps = {name: each.to_json() for name, each in (obs or {}).items()}
        return cls.translating(base, spec, action=action.to_json(), obs=maps, reach=reach)

    @property
    def action_range(self) -> Affine:
        """The physical values of the base's -1 and +1."""
        return self.config.action

    def data_ranges(self) -> dict[str, Tensor]:
        seen = {f"obs/{name}": each.data_range for name, each in self.config.obs.items()}
        return {"action": self.config.action.data_range, **seen}

    def initial(self, n: int) -> Tensors:
        return self.base.initial(n)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        # Past observations in the carry are physical too.
        given = self.normalized(with_history(obs, carry))
        seen, carry = self.base.observe(given, carry, noise)
        actions, carry = self.base.act(seen, carry, noise)
        return self.config.action.to_physical(actions), carry

    def normalized(self, obs: Tensors) -> Tensors:
        """Physical observations, past ones too, as the base sees them."""
        found = dict(obs)
        for key, value in obs.items():
            units = self.config.obs.get(key.removeprefix(HISTORY))
            if units is not None:
                found[key] = units.to_unit(value).float()
        return found

    def loss(self, batch: Tensors) -> Tensor:
        return self.base.loss(self._normalized_batch(batch))

    def fit(self, rows: Tensors) -> None:
        """Set what else the base normalises (the maps are settings, and stay)."""
        self.base.fit(self._normalized_batch(rows))

    def _normalized_batch(self, rows: Tensors) -> Tensors:
        obs = self.normalized(under(rows, "obs"))
        action = self.config.action.to_unit(rows["action"]).float()
        return {**rows, **nest(obs, "obs"), "action": action}

    def around(self, base: Policy) -> Self:
        config = self.config
        made = type(self).of(base, self.spec, config.action, config.obs, config.reach)
        return made.train(self.training)


def normalized_spec(spec: Spec, config: PhysicalUnitsConfig) -> Spec:
    """The base's spec: `spec` with normalised actions and observations; ConfigError."""
    act = spec.act
    size = config.action.size
    if act.size != size or not act.is_continuous:
        raise ConfigError(
            f"action.low has {size} numbers, but the action is {act.dtype}{list(act.shape)}"
        )
    for name, each in config.obs.items():
        leaf = spec.obs.get(name)
        if leaf is None or leaf.size != each.size:
            shape = "absent" if leaf is None else list(leaf.shape)
            raise ConfigError(f"obs.{name} has {each.size} numbers, but the observation is {shape}")
    reach = config.reach
    if reach is None:
        inner = Leaf(act.shape, low=-1.0, high=1.0, names=act.names)
    else:
        inner = Leaf(act.shape, low=-reach, high=reach, unit=NORMALIZED, names=act.names)
    obs = {
        name: Leaf(leaf.shape, unit=NORMALIZED, names=leaf.names) if name in config.obs else leaf
        for name, leaf in spec.obs.items()
    }
    return replace(spec, obs=obs, act=inner)


@dataclass(frozen=True, kw_only=True)
class MappedConfig:
    """Settings of a policy with names and units of another project."""

    base: Node  # node of the wrapped policy
    there: Node  # its Spec, as in spec.json
    mapping: Node  # settings of a mapping file, with the range of its actions


class Mapped(Translated):
    """Noise, carry and chunk are the base's. Observations that it does not see are ignored."""

    def __init__(self, config: MappedConfig, spec: Spec) -> None:
        there = Spec.from_json(config.there)
        mapping = Mapping.parse(config.mapping)
        names = names_here(spec, there, mapping)
        mapping = mapping.ordered(spec, there)
        order = mapping.action_order(spec.act, there.act)
        if not isinstance(mapping.action, Affine):
            raise ConfigError("mapping: action should be {low: [...], high: [...]} here")
        super().__init__(config, spec, there)
        self.mapping = mapping
        self.names = names
        self.order = order
        self.action: Affine = mapping.action

    @classmethod
    def of(cls, base: Policy, spec: Spec, mapping: Mapping) -> Self:
        """The trained `base`, whose parameters are shared, in the terms of `spec`; ConfigError."""
        there, node = base.spec.to_json(), with_range(mapping, base).to_json()
        return cls.translating(base, spec, there=there, mapping=node).train(base.training)

    def data_ranges(self) -> dict[str, Tensor]:
        """Those of the base, in the names and units of here."""
        found = self.base.data_ranges() if isinstance(self.base, HasDataRanges) else {}
        sources = {f"obs/{name}": self.mapping.source(name) for name in self.names}
        made = {
            name: source.here(found[f"obs/{source.name}"])
            for name, source in sources.items()
            if f"obs/{source.name}" in found
        }
        if "action" in found:
            made["action"] = permuted(self.action.to_unit(found["action"]), self.order)
        return made

    def initial(self, n: int) -> Tensors:
        """The base's carry, with past observations by the names and in the units of here."""
        carry = self.base.initial(n)
        past = under(carry, "history")
        known = [name for name in self.names if self.mapping.source(name).name in past]
        return {**_without_history(carry), **nest(self.mapping.obs_here(past, known), "history")}

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        seen = self._there(with_history(obs, carry))
        seen, kept = self.base.observe(seen, _without_history(carry), noise)
        actions, kept = self.base.act(seen, kept, noise)
        unit = permuted(self.action.to_unit(actions), self.order)
        unit = unit.reshape(*actions.shape[:2], *self.spec.act.shape)
        return unit, {**_without_history(kept), **nest(under(carry, "history"), "history")}

    def _there(self, obs: Tensors) -> Tensors:
        """Observations, past ones too, by the names and in the units of there."""
        past = under(obs, "history")
        past = self.mapping.obs_there(past, past)
        return {**self.mapping.obs_there(obs, self.names), **nest(past, "history")}

    def loss(self, batch: Tensors) -> Tensor:
        obs = self._there(under(batch, "obs"))
        action = permuted(batch["action"], inverse_order(self.order))
        action = self.action.to_physical(action)
        shape = (*action.shape[: action.ndim - len(self.spec.act.shape)], *self.base.spec.act.shape)
        return self.base.loss({**batch, **nest(obs, "obs"), "action": action.reshape(shape)})

    def fit(self, rows: Tensors) -> None:
        """Nothing: the base keeps the normalisers that it was trained with."""

    def around(self, base: Policy) -> Self:
        return type(self).of(base, self.spec, self.mapping)


def _without_history(carry: Tensors) -> Tensors:
    return {key: value for key, value in carry.items() if not key.startswith(HISTORY)}


def load_mapped(
    path: Path | str, spec: Spec, mapping: Mapping | None = None, device: torch.device | str = "cpu"
) -> Policy:
    """The policy of a run or checkpoint folder, as one for `spec`.

    SpecMismatch or ConfigError, as in `joined`.
    """
    return joined(checkpoint.load_policy(path, device=device), spec, mapping, path)


def joined(policy: Policy, spec: Spec, mapping: Mapping | None, path: Path | str) -> Policy:
    """The trained `policy` of the folder `path` as one for `spec`. Without a mapping the specs must
    be the same; in a model of latents a policy that filters them is the one inside of it.
    SpecMismatch or ConfigError, in one line."""
    if isinstance(policy, FiltersLatents) and {*spec.obs} == {*policy.latent_policy.spec.obs}:
        policy = policy.latent_policy
    if mapping is not None:
        return Mapped.of(policy, spec, mapping).eval()
    try:
        require_same(spec, policy.spec, "environment", f"checkpoint {checkpoint.find(path)}")
    except SpecMismatch as error:
        raise SpecMismatch(f"{error}; mapping=FILE names what belongs together") from error
    return policy


def with_range(mapping: Mapping, base: Policy) -> Mapping:
    """`mapping` with the range of its actions: its own, or that which normalised the base's."""
    if isinstance(mapping.action, Affine):
        return mapping
    known = getattr(base, "action_range", None)
    if not isinstance(known, Affine):
        raise ConfigError(
            f"the mapping says action: {mapping.action}, and the policy does not know its range: "
            "write action: {low: [...], high: [...]}, the physical values of -1 and +1"
        )
    return replace(mapping, action=known)


def names_here(here: Spec, there: Spec, mapping: Mapping) -> tuple[str, ...]:
    """The observations of `here` that the policy of `there` sees; ConfigError, in one line."""
    require_names(here, mapping)
    require_actions(here, there, mapping)
    sources = {mapping.source(name).name: name for name in here.obs}
    sources |= {source.name: name for name, source in mapping.obs.items()}
    found: list[str] = []
    for name, leaf in there.obs.items():
        if hidden(name):
            continue
        if name not in sources:
            raise ConfigError(
                f"mapping: obs has nothing for the policy's {name} {said(leaf)}; write "
                f"NAME_HERE: {name} (here: {listed(here)})"
            )
        require_fit(sources[name], here, name, there)
        found.append(sources[name])
    return tuple(found)


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
class ToldConfig:
    """Settings of a policy that is told what to do."""

    base: Node  # node of the wrapped policy
    there: Node  # its Spec, as in spec.json
    task: str | None = None  # one of its tasks (null: the one that the observed text says)


class Told(Translated):
    """Noise, carry and chunk are the base's. Its past observations hold the present instruction: it
    stays the same for an episode. ConfigError for an observed text that is none of the tasks."""

    known: Tensor  # [T, ...]: `instruction` of each of `tasks`, so that acting needs no encoder

    def __init__(self, config: ToldConfig, spec: Spec) -> None:
        there = Spec.from_json(config.there)
        super().__init__(config, spec, there)
        self.tasks = there.tasks if config.task is None else (config.task,)
        self.register_buffer("known", there.obs[INSTRUCTION].zeros(len(self.tasks)))
        self.past = history_steps(self.base.initial(1)).get(INSTRUCTION, 0)

    @classmethod
    def of(cls, base: Policy, task: str | None, spec: Spec, known: Tensor | None = None) -> Self:
        """The trained `base`, whose parameters are shared. `known` is computed where it is None."""
        policy = cls.translating(base, spec, there=base.spec.to_json(), task=task)
        device = device_of(base)
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
