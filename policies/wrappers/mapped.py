"""Mapped: a policy with names and units of its own, as a policy of an environment or a robot.

The mapping (`embodied.datasets.mapping`) says which observation here is which one there, and which
physical values there are the actions -1 and +1 here:

    a = A^-1(base(o_there(o), z))

An action beyond +-1 is handed on as it is: what the environment or the safety chain does with it is
their business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import Spec, SpecMismatch, hidden, require_same
from embodied.core.tensors import HISTORY, Tensors, nest, under, with_history
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
from embodied.policies.abilities import FiltersLatents, HasDataRanges
from embodied.policies.wrappers.translated import Translated


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a policy with names and units of another project."""

    base: Node  # node of the wrapped policy
    there: Node  # its Spec, as in spec.json
    mapping: Node  # settings of a mapping file, with the range of its actions


class Mapped(Translated):
    """`spec` is that of here; noise, carry and chunk are the base's. Observations of here that the
    base does not see are ignored."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        there = Spec.from_json(config.there)
        self.mapping = Mapping.parse(config.mapping)
        self.spec = spec
        self.config = config
        self.names = names_here(spec, there, self.mapping)
        self.mapping = self.mapping.ordered(spec, there)
        self.order = self.mapping.action_order(spec.act, there.act)
        if not isinstance(self.mapping.action, Affine):
            raise ConfigError("mapping: action should be {low: [...], high: [...]} here")
        self.action: Affine = self.mapping.action
        self.base = build(config.base, Policy, spec=there)
        self.chunk = self.base.chunk
        self.noise_steps = self.base.noise_steps

    @classmethod
    def of(cls, base: Policy, spec: Spec, mapping: Mapping) -> Self:
        """The trained `base`, whose parameters are shared, in the terms of `spec`; ConfigError."""
        node: dict[str, Any] = {
            "_target_": f"{cls.__module__}.{cls.__qualname__}",
            "base": base.node,
            "there": base.spec.to_json(),
            "mapping": with_range(mapping, base).to_json(),
        }
        policy = build(node, cls, spec=spec)
        policy.base = base
        return policy.train(base.training)

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
        """Actions [n, chunk, A] of here, and the base's carry."""
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
        """The base's imitation loss [n] of a batch of here."""
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
    """The observations of `here` that the policy of `there` sees; ConfigError where the two do not
    fit, in one line that says what to write."""
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
