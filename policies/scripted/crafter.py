"""Scripted demonstrator for Crafter: collects wood, places a table, makes a wooden pickaxe.

It observes what a policy observes (the 7 x 9 cells in view and the inventory) and has no memory: it
takes the shortest path in view to what it needs next, and goes straight on if none is in view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.bounds import Fraction
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

# Symbols and actions of the environment; directions are left, right, up, down.
FREE = (2, 4, 5)  # grass, path, sand
TREE = 6
TABLE = 11
NOOP = 0
MOVE = 1
DO = 5
PLACE_TABLE = 8
MAKE_PICKAXE = 11
WAYS = ((0, -1), (0, 1), (-1, 0), (1, 0))  # (down, right)
ENOUGH = 3  # wood for a table and a pickaxe
FAR = 1000.0


@dataclass(frozen=True)
class Config:
    """Settings of the woodcutter."""

    unsteady: Fraction = 0.05  # share of random actions


class Woodcutter(Policy):
    """Noise is [n, 3], uniform: whether to slip, what to do then, where to turn."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        missing = {"symbols", "facing", "inventory"} - set(spec.obs)
        if missing:
            raise ConfigError(
                f"this demonstrator needs the observations {', '.join(sorted(missing))}; "
                "set env.observe=[symbols,inventory]"
            )
        names = spec.obs["inventory"].names
        self.wood = names.index("wood")
        self.pickaxe = names.index("wood_pickaxe")
        self.spec = spec
        self.unsteady = config.unsteady
        high = spec.act.high
        assert isinstance(high, int | float)
        self.actions = int(high) + 1

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.rand(n, 3)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        cells = obs["symbols"].long()
        facing = obs["facing"][:, 0].long()
        wood = obs["inventory"][:, self.wood]
        done = obs["inventory"][:, self.pickaxe] > 0
        table = cells == TABLE
        middle = table.shape[1] // 2, table.shape[2] // 2
        close = table[:, middle[0] - 1 : middle[0] + 2, middle[1] - 1 : middle[1] + 2]
        beside = torch.stack([cells[:, middle[0] + y, middle[1] + x] for y, x in WAYS], 1)
        free = _is_free(beside)
        ahead = beside.gather(1, facing[:, None]).squeeze(1)
        ready = table.flatten(1).any(1) & (wood >= 1)
        target = torch.where(ready[:, None, None], table, cells == TREE)
        action = _walk(target, cells, free, facing, noise[:, 2])
        action = torch.where(~ready & (ahead == TREE), DO, action)
        building = ~ready & (wood >= ENOUGH)
        roam = MOVE + _turn(free, facing, noise[:, 2])
        action = torch.where(building, torch.where(_is_free(ahead), PLACE_TABLE, roam), action)
        action = torch.where(close.flatten(1).any(1) & (wood >= 1), MAKE_PICKAXE, action)
        action = torch.where(done, NOOP, action)
        slip = (noise[:, 1] * self.actions).long().clamp(max=self.actions - 1)
        return torch.where(noise[:, 0] < self.unsteady, slip, action)[:, None], carry


def _is_free(cells: Tensor) -> Tensor:
    return torch.isin(cells, torch.tensor(FREE, device=cells.device))


def _walk(target: Tensor, cells: Tensor, free: Tensor, facing: Tensor, noise: Tensor) -> Tensor:
    """Moves [n] along the shortest way to the nearest target in view [n, 7, 9], or straight on."""
    distance = _distances(target, _is_free(cells))
    y, x = cells.shape[1] // 2, cells.shape[2] // 2
    beside = torch.stack([distance[:, y + down, x + right] for down, right in WAYS], 1)
    nearest, way = beside.min(1)
    return MOVE + torch.where(nearest < FAR, way, _turn(free, facing, noise))


def _distances(target: Tensor, free: Tensor) -> Tensor:
    """Steps from every cell [n, h, w] to the nearest target over free cells; FAR: no way."""
    distance = torch.where(target, 0.0, FAR)
    for _ in range(target.shape[1] * target.shape[2] // 2):
        padded = torch.nn.functional.pad(distance, (1, 1, 1, 1), value=FAR)
        around = (padded[:, 1:-1, :-2], padded[:, 1:-1, 2:], padded[:, :-2, 1:-1])
        best = torch.stack([*around, padded[:, 2:, 1:-1]]).amin(0)
        distance = torch.where(free, (best + 1).clamp(max=FAR), distance)
    return distance


def _turn(free: Tensor, facing: Tensor, noise: Tensor) -> Tensor:
    """A way to roam [n]: where it looks if it can go there, mostly; else one of the free ways."""
    ahead = free.gather(1, facing[:, None]).squeeze(1)
    onward = ahead & (noise > 0.03)
    # Of the k free ways the one that the noise points at; any way at all where none is free.
    weights = torch.where(free.any(1, keepdim=True), free.float(), torch.ones_like(free.float()))
    shares = weights.cumsum(1) / weights.sum(1, keepdim=True)
    point = torch.where(ahead, noise / 0.03, noise)
    other = (shares <= point[:, None]).sum(1).clamp(max=3)
    return torch.where(onward, facing, other)
