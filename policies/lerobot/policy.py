"""LeRobotPolicy: what the policies of LeRobot's checkpoints share: names, units and history.

A LeRobot policy takes named features in physical units, normalises them with the statistics of its
training data, and returns a chunk of actions in physical units:

    x' = (x - low) / scale - offset,     a = (a' + offset) scale + low

A policy with `obs_steps` > 1 also takes the observations of the steps before. They are part of a
decision's observation, `history/NAME` [n, obs_steps - 1, ...], oldest first; at the beginning of an
episode the first observation is repeated.

With `action`, the physical values of -1 and +1, the policy acts in an environment: in [-1, 1], and
its actions are clipped as the environment would. Without, it acts in physical units, unclipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn

from embodied.core.affine import Affine
from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import HISTORY, Tensors
from embodied.policies.generative.chunk_sampler import ObservesHistory

CONSTANT = 1e-6  # an element of the actions with a smaller scale does not vary


@dataclass(frozen=True)
class Input:
    """A feature that a LeRobot policy takes."""

    obs: str  # name of our observation
    kind: Literal["state", "env", "image"]  # what the feature is
    shape: tuple[Count, ...]  # LeRobot's (of an image: channels, height, width)
    units: Affine | None = None  # values here of LeRobot's -1 and +1 (null: the same units)


class Normalization(nn.Module):
    """An affine map per element, of `shape` (images: one per channel)."""

    low: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.low) / self.scale - self.offset

    def inverse(self, x: Tensor) -> Tensor:
        return (x + self.offset) * self.scale + self.low


class LeRobotPolicy(ObservesHistory):
    """Base class: prepares the inputs, keeps the history, and gives actions their units.

    It stays in evaluation mode when it is trained, so that batch normalisation keeps the statistics
    that came with the checkpoint.
    """

    middle: Tensor
    radius: Tensor

    def __init__(
        self, spec: Spec, inputs: Mapping[str, Input], action: Affine | None, obs_steps: int
    ) -> None:
        super().__init__()
        if not spec.act.is_continuous or len(spec.act.shape) != 1:
            raise ConfigError("a LeRobot policy needs a vector of continuous actions")
        require_inputs(inputs, spec)
        self.spec = spec
        self.inputs = inputs
        self.past = obs_steps - 1
        self.names = sorted({each.obs for each in inputs.values()})
        shapes = [i.shape if i.kind != "image" else (i.shape[0], 1, 1) for i in inputs.values()]
        self.normalize = nn.ModuleList(Normalization(shape) for shape in shapes)
        self.unnormalize = Normalization(spec.act.shape)
        self.physical = action is None
        if action is not None and action.size != spec.act.size:
            raise ConfigError(f"action.low has {action.size} values, not {spec.act.size}")
        ends = ((0.0,), (1.0,)) if action is None else (action.low, action.high)
        low, high = (torch.tensor(end, dtype=torch.float64) for end in ends)
        for name, values in {"middle": (high + low) / 2, "radius": (high - low) / 2}.items():
            self.register_buffer(name, values.to(torch.get_default_dtype()), persistent=False)

    def train(self, mode: bool = True) -> Self:
        del mode
        return super().train(False)

    def prepared(self, obs: Tensors) -> list[tuple[str, Tensor]]:
        """The kind and the normalised values [n, obs_steps, ...] of every input."""
        pairs = zip(self.inputs.values(), self.normalize, strict=True)
        return [(each.kind, norm(self._values(each, obs))) for each, norm in pairs]

    def _values(self, wanted: Input, obs: Tensors) -> Tensor:
        values = obs[wanted.obs][:, None]
        if self.past:
            now = values.expand(-1, self.past, *values.shape[2:])
            past = obs.get(HISTORY + wanted.obs, now)  # at the first step, or without a memory
            values = torch.cat([past.to(values.dtype), values], 1)
        values = values.to(self.middle.dtype)
        if wanted.kind == "image":
            # Contiguous: convolutions of another memory layout round differently.
            return values.permute(0, 1, 4, 2, 3).contiguous() / 255
        return values.flatten(2)

    def units(self, normalized: Tensor) -> Tensor:
        """Actions [..., A] of this policy, of the network's."""
        actions = self.unnormalize.inverse(normalized)
        if self.physical:
            return actions
        return ((actions - self.middle) / self.radius).clamp(-1, 1)

    def range(self, actions: Tensor) -> Tensor:
        """The network's actions [..., A], of this policy's: the inverse of `units`."""
        if not self.physical:
            actions = actions * self.radius + self.middle
        scale = self.unnormalize.scale
        constant = scale.abs() < CONSTANT  # in the training data
        found = (actions - self.unnormalize.low) / torch.where(constant, 1.0, scale)
        return torch.where(constant, 0.0, found) - self.unnormalize.offset

    def data_ranges(self) -> dict[str, Tensor]:
        """See `policies.abilities.HasDataRanges`; empty for a policy that acts in [-1, 1]."""
        if not self.physical:
            return {}
        found = {"action": _range_of(self.unnormalize)}
        pairs = zip(self.inputs.values(), self.normalize, strict=True)
        numbers = ((each.obs, norm) for each, norm in pairs if each.kind != "image")
        return found | {f"obs/{name}": _range_of(cast(Normalization, n)) for name, n in numbers}


def _range_of(map: Normalization) -> Tensor:
    """The values [2, size] that are normalised to -1 and to +1."""
    one = torch.ones_like(map.low)
    return torch.stack([map.inverse(-one).flatten(), map.inverse(one).flatten()]).double()


def require_inputs(inputs: Mapping[str, Input], spec: Spec) -> None:
    """ConfigError if an observation of `inputs` is missing or has another shape."""
    for name, wanted in inputs.items():
        leaf = spec.obs.get(wanted.obs)
        if leaf is None:
            raise ConfigError(
                f"the policy needs {name}, and there is no observation {wanted.obs}; there are "
                f"{', '.join(sorted(spec.obs))} (mapping: obs: {{OURS: {name}}})"
            )
        image = wanted.kind == "image"
        shape = (*wanted.shape[1:], wanted.shape[0]) if image else wanted.shape
        if leaf.is_image != image or (leaf.shape != shape if image else leaf.size != shape[0]):
            raise ConfigError(
                f"the policy needs {name} as {'uint8' if image else 'float32'}{list(shape)}, and "
                f"{wanted.obs} is {leaf.dtype}{list(leaf.shape)}: map another observation to it"
            )
