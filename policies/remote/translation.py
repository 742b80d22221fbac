"""Translation: observations and actions between names and units here and those of a server."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from embodied.core.affine import Affine
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import HISTORY, Tensors
from embodied.datasets.mapping import Mapping, Source, permuted


@dataclass(frozen=True)
class Translation:
    """`sources`: for each observation here, its name there as it was written, and its source;
    `action`: the values there that are -1 and +1 here (None: the same there); `order`: for each
    element of the action here its place there (empty: the same); `prompt`."""

    sources: AbstractMapping[str, tuple[str, Source]]
    action: Affine | None
    prompt: str | None
    order: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        spec: Spec,
        mapping: AbstractMapping[str, Any] | None,
        prompt: str | None,
        served: Spec | None = None,
    ) -> Translation:
        """The translation of a `mapping` node (None: the same names and units) to what the server
        says it serves (None: it says nothing); ConfigError."""
        parsed = Mapping() if mapping is None else Mapping.parse(mapping, "policy.mapping")
        names = [name for name in spec.obs if not hidden(name)]
        given = (mapping or {}).get("obs") or {}
        # Where a server names no elements, those that the mapping lists are its own.
        known = {} if served is None else served.obs
        own = {
            parsed.source(name).name: known.get(
                _full_name(given.get(name), name), Leaf(spec.obs[name].shape)
            )
            for name in names
        }
        act = Leaf(spec.act.shape) if served is None else served.act
        ordered = parsed.ordered(spec, Spec(own, act, spec.dt))
        sources = {
            name: (_full_name(given.get(name), name), ordered.source(name)) for name in names
        }
        action = parsed.action if isinstance(parsed.action, Affine) else None
        order = parsed.action_order(spec.act, act)
        return cls(sources, action, prompt, order)

    def observations(self, obs: Tensors) -> dict[str, Any]:
        """The arrays that are sent, by their names there."""
        sent: dict[str, Any] = {}
        for name, (there, source) in self.sources.items():
            value = source.there(obs[name])
            sent[there] = np.ascontiguousarray(value.detach().cpu().numpy())
        return sent

    def carry_there(self, carry: Tensors) -> Tensors:
        """A carry as it is sent: past observations by their names and in the units there."""

        def sent(name: str, value: Tensor) -> tuple[str, Tensor]:
            there, source = self.sources[name]
            return there, source.there(value)

        return _with_past(carry, sent)

    def carry_here(self, carry: Tensors) -> Tensors:
        """The inverse of `carry_there`; an observation that is not used here is refused."""
        names = {there: name for name, (there, _) in self.sources.items()}

        def received(there: str, value: Tensor) -> tuple[str, Tensor]:
            if there not in names:
                raise ConfigError(f"the policy needs {there}, and nothing here is mapped to it")
            name = names[there]
            return name, self.sources[name][1].here(value)

        return _with_past(carry, received)

    def text(self) -> dict[str, str]:
        """The task in words, as openpi's policies take it."""
        return {} if self.prompt is None else {"prompt": self.prompt}

    def actions(self, there: Tensor) -> Tensor:
        """Actions in units of here; nothing is clamped."""
        return permuted(there if self.action is None else self.action.to_unit(there), self.order)


def _with_past(carry: Tensors, convert: Callable[[str, Tensor], tuple[str, Tensor]]) -> Tensors:
    """`carry` with its past observations by the name, and with the value, that `convert` gives."""
    found: Tensors = {}
    for key, value in carry.items():
        start, history, name = key.rpartition(HISTORY)
        name, value = convert(name, value) if history else (name, value)
        found[start + history + name] = value
    return found


def _full_name(given: Any, name: str) -> str:
    """The name there as it was written: servers of LeRobot's policies take `observation.state`."""
    if isinstance(given, AbstractMapping):
        return str(given["name"])
    return name if given is None else str(given)
