"""PhysicalUnits: a policy in physical units around a policy that acts on normalised values.

With the maps A_k (`core.affine.Affine`) of the action and of the observations,

    a = A_action(base(A_o^-1(o), z)),   loss(o, a) = base.loss(A_o^-1(o), A_action^-1(a))

Nothing is clamped here: physical limits are the business of a robot's safety chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from embodied.core.affine import Affine
from embodied.core.bounds import Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.spec import NORMALIZED, Leaf, Spec
from embodied.core.tensors import HISTORY, Tensors, nest, under, with_history
from embodied.policies.wrappers.translated import Translated


@dataclass(frozen=True, kw_only=True)
class Config:
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

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.base = build(config.base, Policy, spec=normalized_spec(spec, config))
        self.chunk = self.base.chunk
        self.noise_steps = self.base.noise_steps

    @classmethod
    def of(
        cls,
        base: Policy,
        spec: Spec,
        action: Affine,
        obs: Mapping[str, Affine] | None = None,
        reach: float | None = None,
    ) -> Self:
        """A policy with the physical `spec` around the trained `base`, whose parameters it takes.

        ConfigError if the base's spec is not `spec` in normalised values.
        """
        node: dict[str, Any] = {
            "_target_": f"{cls.__module__}.{cls.__qualname__}",
            "base": base.node,
            "action": action.to_json(),
            "obs": {name: each.to_json() for name, each in (obs or {}).items()},
            "reach": reach,
        }
        policy = build(node, cls, spec=spec)
        policy.base = base
        return policy

    @property
    def action_range(self) -> Affine:
        """The physical values of the base's -1 and +1."""
        return self.config.action

    def data_ranges(self) -> dict[str, Tensor]:
        """See `policies.abilities.HasDataRanges`."""
        seen = {f"obs/{name}": each.data_range for name, each in self.config.obs.items()}
        return {"action": self.config.action.data_range, **seen}

    def initial(self, n: int) -> Tensors:
        return self.base.initial(n)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """Physical actions [n, chunk, *shape], and the base's carry."""
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
        """The base's imitation loss [n] of a batch in physical units."""
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


def normalized_spec(spec: Spec, config: Config) -> Spec:
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
