"""Rows, datasets and a world of named numbers for tests of rewards: a tool, a cube and a goal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core.build import build
from embodied.core.env import Step
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.writer import EpisodeWriter

NAMES = tuple(f"{what}_{axis}" for what in ("tool", "cube", "goal") for axis in "xyz")
SPEC = Spec(
    {"state": Leaf((9,), names=NAMES), "other": Leaf((2,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1
)


def make(node: dict[str, Any], spec: Spec = SPEC, folder: Any = None, **more: Any) -> Any:
    context: dict[str, Any] = {"gamma": 0.9, "num_envs": 2, "device": torch.device("cpu")}
    return build(node, Reward, spec=spec, seed=0, folder=folder, **(context | more))


def state(tool: float, cube: float = 0.0, goal: float = 0.0) -> Tensor:
    """All three on the x axis."""
    values = torch.zeros(9)
    values[[0, 3, 6]] = torch.tensor([tool, cube, goal])
    return values


def rows(now: Tensor, then: Tensor, discount: float | list[float] = 0.9, **more: Any) -> Tensors:
    """Rows from states [N, 9] to states [N, 9]; the world pays 0.5 each."""
    n = len(now)
    discounts = [discount] * n if isinstance(discount, float) else discount
    return {
        "obs/state": now,
        "obs/other": torch.zeros(n, 2),
        "action": torch.zeros(n, 2),
        "reward": torch.full((n,), 0.5),
        "discount": torch.tensor(discounts),
        "next_obs/state": then,
        "next_obs/other": torch.zeros(n, 2),
        **more,
    }


def drawn(n: int, seed: int = 0) -> Tensors:
    """Random rows."""
    g = torch.Generator().manual_seed(seed)
    now, then = torch.randn(2, n, 9, generator=g)
    action = torch.rand(n, 2, generator=g) * 2 - 1
    return rows(now, then, action=action, reward=torch.rand(n, generator=g))


def write_episodes(
    path: Path, spec: Spec, episodes: Sequence[Tensors], won: bool = True, **how: Any
) -> str:
    """A dataset of episodes with these observations (leaves [T + 1, ...]), which end in success, or
    are cut off without it."""
    with EpisodeWriter(path, spec, **how) as writer:
        for seen in episodes:
            count = len(next(iter(seen.values()))) - 1
            last = torch.arange(count) == count - 1
            now = {f"obs/{name}": value[:-1] for name, value in seen.items()}
            then = {f"next_obs/{name}": value[-1] for name, value in seen.items()}
            end = {"reward": (last & won).float(), "terminated": last & won, "success": last & won}
            action = torch.zeros(count, spec.act.size)
            writer.add({**now, **then, **end, "action": action, "truncated": last & (not won)})
    return str(path)


def step(n: int, ended: list[bool] | None = None, success: list[bool] | None = None) -> Step:
    """What a world says of a step, for `note`."""
    over = torch.tensor(ended or [False] * n)
    never = torch.zeros_like(over)
    log = {} if success is None else {"success": torch.tensor(success)}
    return Step({}, {}, torch.zeros(n), over, never, log)
