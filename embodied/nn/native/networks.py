"""Networks of PyTorch as native code sees them (linear.h): their tensors and Adam's moments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core.tensors import Tensors, under
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
        *((name, ctypes.c_int64) for name in ("count", "activation", "turned", "normed")),
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
    """A network of linear layers, with LayerNorm between them or without."""
    array = dense(net, known, rate)
    return Network(array, len(array), activation_of(net), False, has_norms(net))


def members(ensemble: Ensemble, known: Moments, rate: int) -> list[Network]:
    """The networks of an ensemble, whose parameters are [E, in, out]."""
    parameters: list[Tensor] = []
    for i, pair in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
        parameters += pair
        if i < len(ensemble.scales):
            parameters += [ensemble.scales[i], ensemble.shifts[i]]
    kind = NAMES.index(ensemble.activation)
    normed = len(ensemble.scales) > 0
    found: list[Network] = []
    for member in range(ensemble.n):
        parts = [_member(p, known, rate, member) for p in parameters]
        found.append(Network((Parameter * len(parts))(*parts), len(parts), kind, True, normed))
    return found


def _member(p: Tensor, known: Moments, rate: int, member: int) -> Parameter:
    parts = (p.detach(), *known.get(id(p), ()))
    first = member * p[0].numel() * FLOAT
    places = [native.address(part) + first for part in parts] + [None] * (3 - len(parts))
    return Parameter(*places, p.shape[1], p.shape[2], rate)


def activation_of(net: nn.Sequential) -> int:
    """The number of its activation in linear.h."""
    kinds = [type(layer) for layer in net if type(layer) in ACTIVATIONS]
    return ACTIVATIONS.index(kinds[0]) if kinds else 0


def has_norms(net: nn.Sequential) -> bool:
    return any(isinstance(layer, nn.LayerNorm) for layer in net)


def plain(net: nn.Sequential, norms: bool = False) -> bool:
    """Whether a network is float32 layers with one supported activation between all of them;
    `norms`: or with LayerNorm, then an activation."""
    if any(p.dtype != torch.float32 for p in net.parameters()):
        return False
    between = 2 if norms and has_norms(net) else 1
    *hidden, last = net
    groups = [hidden[at : at + 1 + between] for at in range(0, len(hidden), 1 + between)]
    kinds = {type(group[-1]) for group in groups}
    right = all(
        len(group) == 1 + between
        and type(group[0]) is nn.Linear
        and (between == 1 or type(group[1]) is nn.LayerNorm)
        for group in groups
    )
    return right and type(last) is nn.Linear and len(kinds) <= 1 and kinds <= set(ACTIVATIONS)


def plain_members(ensemble: Ensemble) -> bool:
    """Whether an ensemble is float32 layers with a supported activation between all of them."""
    floats = all(p.dtype == torch.float32 for p in ensemble.parameters())
    return floats and ensemble.activation in NAMES


def is_vectors(encoder: Any) -> bool:
    """Whether it only normalizes vectors, which native code does too."""
    return not (encoder.images or encoder.sets or encoder.symbols is not None)


def norm_places(encoder: Any) -> tuple[int, ...]:
    """The addresses of the encoder's normaliser; none where `features` has normalised."""
    if not is_vectors(encoder):
        return ()
    return tuple(
        native.address(x) for x in (encoder.norm.mean, encoder.norm.std, encoder.norm.limit)
    )


def features(encoder: Any, obs: Tensors) -> Tensor:
    """What native code reads of observations: vectors as they are, else what the encoder makes."""
    return encoder.flat(obs) if is_vectors(encoder) else encoder(obs)


def transitions(policy: Any, critic: Any, batch: Tensors) -> Tensors:
    """The inputs of an off-policy update [n, ...], one row per transition."""
    inputs: Tensors = {key: batch[key] for key in ("action", "reward", "discount")}
    for prefix, name in (("", "obs"), ("next_", "next_obs")):
        obs = under(batch, name)
        for part, encoder in (("actor", policy.encoder), ("critic", critic.encoder)):
            inputs[f"{prefix}{part}_input"] = features(encoder, obs)
    return {key: leaf.contiguous() for key, leaf in inputs.items()}
