"""Networks of PyTorch as native code sees them (linear.h): their tensors and Adam's moments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from embodied.nn import native
from embodied.nn.networks import Ensemble
from embodied.nn.optim import Adam

ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.Tanh, nn.ReLU)  # by their numbers in linear.h
NAMES = ("tanh", "relu")
Moments = Mapping[int, tuple[Tensor, Tensor]]
"""Mean and mean square of the gradients, by the `id` of the parameter."""
FLOAT = 4  # bytes


class Parameter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("square", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("rate", ctypes.c_int64),
    )


class Network(ctypes.Structure):
    _fields_ = (
        ("parameters", ctypes.POINTER(Parameter)),
        *((name, ctypes.c_int64) for name in ("count", "activation", "turned")),
    )


def moments(optimizers: Iterable[Adam]) -> Moments:
    """The moments of all parameters, after `Adam.prepare`."""
    return {id(p): found for adam in optimizers for p, found in adam.moments()}


def parameter(p: Tensor, known: Moments, rate: int) -> Parameter:
    """`rate`: the number of its learning rate. Without moments it is not trained."""
    parts = (p.detach(), *known.get(id(p), ()))
    places = [native.address(part) for part in parts] + [None] * (3 - len(parts))
    shape = tuple(p.shape) if p.ndim == 2 else (1, p.numel())
    return Parameter(*places, *shape, rate)


def dense(net: nn.Sequential, known: Moments, rate: int) -> ctypes.Array[Parameter]:
    """The parameters of linear layers."""
    found = [parameter(p, known, rate) for p in net.parameters()]
    return (Parameter * len(found))(*found)


def network(net: nn.Sequential, known: Moments, rate: int) -> Network:
    """A network of linear layers."""
    array = dense(net, known, rate)
    return Network(array, len(array), activation_of(net), False)


def members(ensemble: Ensemble, known: Moments, rate: int) -> list[Network]:
    """The networks of an ensemble, whose parameters are [E, in, out]."""
    parameters = [p for pair in zip(ensemble.weights, ensemble.biases, strict=True) for p in pair]
    kind = NAMES.index(ensemble.activation)
    found: list[Network] = []
    for member in range(ensemble.n):
        parts = [_member(p, known, rate, member) for p in parameters]
        found.append(Network((Parameter * len(parts))(*parts), len(parts), kind, True))
    return found


def _member(p: Tensor, known: Moments, rate: int, member: int) -> Parameter:
    parts = (p.detach(), *known.get(id(p), ()))
    first = member * p[0].numel() * FLOAT
    places = [native.address(part) + first for part in parts] + [None] * (3 - len(parts))
    return Parameter(*places, p.shape[1], p.shape[2], rate)


def activation_of(net: nn.Sequential) -> int:
    """The number of its activation in linear.h."""
    return ACTIVATIONS.index(type(net[1])) if len(net) > 1 else 0


def plain(net: nn.Sequential) -> bool:
    """Whether a network is float32 layers with one supported activation between all of them."""
    linear, between = list(net)[::2], list(net)[1::2]
    right = all(
        isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32 for layer in linear
    )
    kinds = {type(layer) for layer in between}
    return right and len(kinds) <= 1 and kinds <= set(ACTIVATIONS)


def plain_members(ensemble: Ensemble) -> bool:
    """Whether an ensemble is float32 layers with a supported activation between all of them."""
    floats = all(p.dtype == torch.float32 for p in ensemble.parameters())
    return floats and not ensemble.layer_norm and ensemble.activation in NAMES
