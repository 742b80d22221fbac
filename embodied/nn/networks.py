"""MLPs, ensembles of MLPs and sinusoidal time embeddings."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.build import ConfigError, given_thing
from embodied.core.tensors import Tensors
from embodied.nn.normalizers import MeanStdNormalizer

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "mish": nn.Mish,
    "silu": nn.SiLU,
}


def mlp(
    size: int, hidden: Sequence[int], out: int, activation: str = "relu", layer_norm: bool = False
) -> nn.Sequential:
    """Linear layers, each but the last followed by LayerNorm (optional) and an activation."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Linear(size, width))
        if layer_norm:
            layers.append(nn.LayerNorm(width))
        layers.append(ACTIVATIONS[activation]())
        size = width
    return nn.Sequential(*layers, nn.Linear(size, out))


def own_network(name: str, inputs: int, outputs: int) -> Any:
    """A network [n, inputs] to [n, outputs] that a Python program gave: a copy of the module
    `name`, or what this class or function makes of the two numbers. ConfigError."""
    thing = given_thing(name)
    try:
        net = copy.deepcopy(thing) if isinstance(thing, nn.Module) else thing(inputs, outputs)
        with torch.no_grad():
            shape = list(net.eval()(torch.zeros(2, inputs)).shape)
    except Exception as error:  # any error of a user's own code
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name} does not take observations [n, {inputs}]: {line}") from error
    if shape != [2, outputs]:
        raise ConfigError(f"{name} returns {shape} for 2 observations, not {[2, outputs]}")
    return net.train()


def orthogonal(net: nn.Sequential, last: float) -> None:
    """Orthogonal weights, gain sqrt(2) in hidden layers and `last` in the last; zero biases."""
    layers: Sequence[nn.Linear] = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last if layer is layers[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class Feedforward:
    """A policy as plain layers: tanh(net(norm(x))), x the concatenated `leaves`.

    `net` is a sequence of Linear, LayerNorm and classes of ACTIVATIONS that ends with a Linear. A
    policy of this form returns it from `feedforward()` and can be exported for use without torch.
    """

    leaves: tuple[str, ...]
    norm: MeanStdNormalizer
    net: nn.Sequential


def per_row(error: Tensor, valid: Tensor) -> Tensor:
    """Mean error [n] over the valid steps; `error` [n, H, ...], `valid` [n, H] (bool)."""
    error = error.flatten(2).mean(2)
    return (error * valid).sum(1) / valid.sum(1).clamp(min=1)


def sinusoid(t: Tensor, size: int) -> Tensor:
    """Sines and cosines [n, size] of times [n] in [0, 1], from 1/100 of a turn to 100 turns."""
    turns = torch.exp(torch.linspace(math.log(0.01), math.log(100.0), size // 2, device=t.device))
    angles = 2 * math.pi * t[:, None].float() * turns
    return torch.cat([angles.sin(), angles.cos()], 1)


class QFunction(nn.Module):
    """Base class of networks that score actions, with their own `encoder` of observations."""

    encoder: Any

    def each(self, obs: Tensors, actions: Tensor, members: Tensor | None = None) -> Tensor:
        """Q-values [E, N, K] of K actions [N, K, D] for each of N observations, by E networks."""
        raise NotImplementedError(f"{type(self).__name__} does not implement each")


class Ensemble(nn.Module):
    """E MLPs: [N, size] or [E, N, size] to [E, N, out].

    Weights are [E, in, out], initialised as in torch's Linear. `layer_norm` normalises every hidden
    layer before its activation, which keeps Q-values of out-of-distribution actions bounded (Ball
    et al., 2023). After `watch`, `active` is the share of hidden units above 0, over all samples,
    in the last pass that trained the weights.
    """

    active: Tensor | None

    def __init__(
        self,
        n: int,
        size: int,
        hidden: Sequence[int],
        out: int = 1,
        layer_norm: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.n = n
        self.layer_norm = layer_norm
        self.activation = activation
        self.activate = ACTIVATIONS[activation]()
        sizes = [size, *hidden, out]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        for i, o in pairwise(sizes):
            self.weights.append(torch.empty(n, i, o))
            self.biases.append(torch.empty(n, 1, o))
        if layer_norm:
            for width in hidden:
                self.scales.append(torch.ones(n, 1, width))
                self.shifts.append(torch.zeros(n, 1, width))
        self.reset_parameters()
        self.register_buffer("active", None, persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1 / math.sqrt(weight.shape[1])
            weight.uniform_(-bound, bound)
            bias.uniform_(-bound, bound)
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            scale.fill_(1.0)
            shift.zero_()

    def watch(self) -> None:
        """Measure `active` from now on."""
        self.active = torch.zeros((), device=self.weights[0].device)

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        """Outputs of all members, or of the first `first` ones (then E = `first`)."""
        if x.ndim == 2:
            x = x.unsqueeze(0).expand(first or self.n, -1, -1)
        parts = (self.weights, self.biases, self.scales, self.shifts)
        weights, biases, scales, shifts = (members(part, first) for part in parts)
        last = len(weights) - 1
        trains = torch.is_grad_enabled() and weights[0].requires_grad
        hidden: list[Tensor] = []  # outputs of the hidden layers, if they are watched
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = affine(x, weight, bias)
            if i < last:
                if self.layer_norm:
                    x = functional.layer_norm(x, x.shape[-1:])
                    x = torch.addcmul(shifts[i], x, scales[i])
                x = torch.relu_(x) if self.activation == "relu" else self.activate(x)
                if self.active is not None and trains:
                    hidden.append(x)
        if self.active is not None and hidden:
            above = torch.stack([(layer > 0).sum() for layer in hidden]).sum()
            self.active.copy_(above / sum(layer.numel() for layer in hidden))  # for CUDA graphs
        return x


def redraw(net: nn.Module) -> None:
    """Draw the parameters of `net` anew, in place. ConfigError for a part without
    `reset_parameters`."""
    reset = getattr(net, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    if next(net.parameters(recurse=False), None) is not None:
        raise ConfigError(f"the parameters of {type(net).__name__} cannot be drawn anew")
    for part in net.children():
        redraw(part)


def members(part: nn.ParameterList, first: int | None) -> list[Tensor]:
    """The parameters of the first `first` members (None: all). By index: PyTorch 2.11 cannot
    compile `[*part]`."""
    return [part[i] if first is None else part[i][:first] for i in range(len(part))]


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W + b per network: [E, N, in], [E, in, out], [E, 1, out] to [E, N, out]."""
    if weight.shape[2] == 1:
        # With one output, batched matrix products are six times slower on a CPU.
        # Not mT: it cannot be exported.
        return (x * weight.transpose(1, 2)).sum(2, keepdim=True) + bias
    return torch.baddbmm(bias, x, weight)
