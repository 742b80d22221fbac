"""UserModule: a torch module given in Python as a deterministic policy with exploration noise.

    a = clip(tanh(module(normalised observation)) + std e, -1, 1)

A module has no name that another process could build it by. The process that trains or loads such a
policy says what `module` stands for: `register(name, module)`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from embodied.core.bounds import Count, NonNegative
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.policies import deterministic

MODULES: dict[str, nn.Module] = {}
"""The modules that this process was given, by name."""


@dataclass(frozen=True)
class Config:
    """Settings of a policy around a registered torch module."""

    module: str  # name that it was registered by
    chunk: Count = 1  # actions of one decision
    std: NonNegative = 0.1  # of the exploration noise, in units of half the action range


class UserModule(deterministic.Deterministic):
    """`module` maps observations [n, D], normalised and flattened, to [n, chunk * A] numbers."""

    def __init__(self, config: Config, spec: Spec) -> None:
        if config.module not in MODULES:
            raise ConfigError(
                f"this policy is the torch module {config.module!r} of the Python program that "
                "trained it: give it again, em.load(RUN, module=...)"
            )
        whole = deterministic.Config(chunk=config.chunk, std=config.std, hidden=(1,))
        super().__init__(whole, spec)
        self.net = copy.deepcopy(MODULES[config.module])
        self._require_fit(config.module)

    def _require_fit(self, name: str) -> None:
        """ConfigError unless the module maps [n, D] to [n, chunk * A]."""
        wanted = (2, self.size)
        try:
            made = self.net(torch.zeros(2, self.encoder.size))
        except Exception as error:  # any error of a user's own forward
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"{name} does not take observations [n, {self.encoder.size}]: {line}"
            ) from error
        if not isinstance(made, torch.Tensor) or tuple(made.shape) != wanted:
            shape = list(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
            raise ConfigError(f"{name} returns {shape} for 2 observations, not {list(wanted)}")


def register(module: nn.Module, name: str = "") -> str:
    """Make `module` known to settings of this process; returns its name (default: its class's)."""
    name = name or type(module).__name__
    MODULES[name] = module
    return name
