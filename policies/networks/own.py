"""Networks and feature extractors that a Python program gives, or that settings name by class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.build import GIVEN, ConfigError, resolve
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors


def own_network(name: str, inputs: int, outputs: int) -> nn.Module:
    """What `name` stands for, as a network from [n, inputs] to [n, outputs]: a copy of a module, or
    what a class or function makes of the two numbers. ConfigError if it does not fit."""
    net = own_module(name, lambda make: make(inputs, outputs), f"observations [n, {inputs}]")
    made = _tried(net, torch.zeros(2, inputs), name, f"observations [n, {inputs}]")
    if made.shape != (2, outputs):
        raise ConfigError(
            f"{name} returns {list(made.shape)} for 2 observations, not {[2, outputs]}"
        )
    return net


class OwnFeatures(nn.Module):
    """What `name` stands for, as a network from observations by name (each [n, *shape], as the
    environment shows them) to features [n, size]: a class or function makes it of the leaves."""

    def __init__(self, name: str, leaves: Mapping[str, Leaf]) -> None:
        super().__init__()
        self.names = tuple(leaves)
        what = f"the observations {', '.join(self.names)} by name"
        self.net = own_module(name, lambda make: make(dict(leaves)), what)
        zeros = {key: leaf.zeros(2, torch.device("cpu")) for key, leaf in leaves.items()}
        made = _tried(self.net, zeros, name, what)
        if made.ndim != 2:
            raise ConfigError(f"{name} returns {list(made.shape)}, not features [n, F]")
        self.size = made.shape[1]

    def forward(self, obs: Tensors) -> Tensor:
        return self.net({name: obs[name] for name in self.names})


def own_module(name: str, make: Callable[[Any], Any], what: str) -> nn.Module:
    """The module of `name`: a copy of one, or what `make` makes with a class or function."""
    if name.startswith("embodied."):  # files may not choose among all modules here
        raise ConfigError(f"{name} is no network of yours: name a class of your own package")
    thing = GIVEN[name] if name in GIVEN else resolve(name, nn.Module)
    if isinstance(thing, nn.Module):
        return copy.deepcopy(thing)
    try:
        made = make(thing)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be made for {what}: {_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{name} returned a {type(made).__name__}, not a torch module")
    return made


def _tried(net: nn.Module, inputs: Any, name: str, what: str) -> Tensor:
    """What `net` returns for two observations."""
    try:
        with torch.no_grad():
            made = net.eval()(inputs)
    except Exception as error:  # any error of a user's own forward
        raise ConfigError(f"{name} does not take {what}: {_line(error)}") from error
    net.train()
    if not isinstance(made, Tensor):
        raise ConfigError(f"{name} returns a {type(made).__name__}, not a tensor")
    return made


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
