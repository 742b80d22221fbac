"""Translation: observations and actions between names and units here and those of a server."""

from __future__ import annotations

from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from embodied.core.affine import Affine
from embodied.core.build import ConfigError
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import HISTORY, Tensors
from embodied.datasets.mapping import Mapping


@dataclass(frozen=True)
class Translation:
    """`sources`: for each observation here, its name there, and here = there * scale + offset;
    `action`: the values there that are -1 and +1 here (None: the same there); `prompt`."""

    sources: AbstractMapping[str, tuple[str, float, float]]
    action: Affine | None
    prompt: str | None

    @classmethod
    def of(
        cls, spec: Spec, mapping: AbstractMapping[str, Any] | None, prompt: str | None
    ) -> Translation:
        """The translation of a `mapping` node (None: the same names and units); ConfigError."""
        parsed = Mapping() if mapping is None else Mapping.parse(mapping, "policy.mapping")
        names = [name for name in spec.obs if not hidden(name)]
        given = (mapping or {}).get("obs") or {}
        sources: dict[str, tuple[str, float, float]] = {}
        for name in names:
            source = parsed.source(name)
            sources[name] = (_full_name(given.get(name), name), source.scale, source.offset)
        return cls(sources, parsed.action if isinstance(parsed.action, Affine) else None, prompt)

    def observations(self, obs: Tensors) -> dict[str, Any]:
        """The arrays that are sent, by their names there."""
        sent: dict[str, Any] = {}
        for name, (there, scale, offset) in self.sources.items():
            value = obs[name]
            if (scale, offset) != (1.0, 0.0):
                value = (value - offset) / scale
            sent[there] = np.ascontiguousarray(value.detach().cpu().numpy())
        return sent

    def carry_there(self, carry: Tensors) -> Tensors:
        """A carry as it is sent: past observations by their names and in the units there."""
        found: Tensors = {}
        for key, value in carry.items():
            start, history, name = key.rpartition(HISTORY)
            if not history:
                found[key] = value
                continue
            there, scale, offset = self.sources[name]
            same = (scale, offset) == (1.0, 0.0)
            found[start + history + there] = value if same else (value - offset) / scale
        return found

    def carry_here(self, carry: Tensors) -> Tensors:
        """The inverse of `carry_there`; an observation that is not used here is refused."""
        names = {there: name for name, (there, _, _) in self.sources.items()}
        found: Tensors = {}
        for key, value in carry.items():
            start, history, there = key.rpartition(HISTORY)
            if not history:
                found[key] = value
                continue
            if there not in names:
                raise ConfigError(f"the policy needs {there}, and nothing here is mapped to it")
            name = names[there]
            _, scale, offset = self.sources[name]
            same = (scale, offset) == (1.0, 0.0)
            found[start + history + name] = value if same else value * scale + offset
        return found

    def text(self) -> dict[str, str]:
        """The task in words, as openpi's policies take it."""
        return {} if self.prompt is None else {"prompt": self.prompt}

    def actions(self, there: Tensor) -> Tensor:
        """Actions in units of here; nothing is clamped."""
        return there if self.action is None else self.action.to_unit(there)


def _full_name(given: Any, name: str) -> str:
    """The name there as it was written: servers of LeRobot's policies take `observation.state`."""
    if isinstance(given, AbstractMapping):
        return str(given["name"])
    return name if given is None else str(given)
