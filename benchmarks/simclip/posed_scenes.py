"""Scenes of environments that can be set to any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.simclip.album import Progress, SceneStore
from embodied.core.build import build
from embodied.core.env import VecEnv


def posed(env_name: str, album: SceneStore, seed: int, tracks: int, shown: Progress) -> None:
    """Add scenes of an environment that can be set to any state."""
    put, way, names = POSES[env_name]
    node: dict[str, object] = {"_target_": "embodied.envs.toy.two_gap.TwoGap"}
    if env_name != "two_gap":
        node = {"_target_": "embodied.envs.gym.Gym", **MADE[env_name]}
    env = build({**node, "num_envs": 1}, VecEnv)
    env.reset(seed)
    row = torch.zeros(1, dtype=torch.int64)
    env.render_batch(row, album.size)  # MuJoCo's free camera looks at the initial positions
    for track in range(max(tracks, 1)):
        states = way(torch.rand(2)) if tracks else torch.rand(20 * album.wanted, 2)
        for state in states:
            if album.full:
                break
            named = put(env, state)
            if tracks or len(album.rare(named, 1)):
                album.add(env.render_batch(row, album.size), named, row + track if tracks else None)
                shown(album.kept)
    assert names <= set(album.named[0])
    env.close()


def _put_pendulum(env: Any, where: Tensor) -> dict[str, Tensor]:
    inner = env.envs[0].unwrapped
    angle = (2 * where[0] - 1) * torch.pi
    inner.state = (torch.stack([angle, 8 * where[1] - 4])).double().numpy()
    inner.last_u = None if where[1] < 0.3 else float(4 * torch.rand(()) - 2)
    return {"cos": angle.cos()[None], "sin": angle.sin()[None]}


def _put_cartpole(env: Any, where: Tensor) -> dict[str, Tensor]:
    x, angle = 4.4 * where[0] - 2.2, 0.35 * (2 * where[1] - 1)
    env.envs[0].unwrapped.state = [float(x), 0.0, float(angle), 0.0]
    return {"x": x[None], "angle": angle[None]}


def _put_inverted(env: Any, where: Tensor) -> dict[str, Tensor]:
    # States near the centre and upright are more frequent.
    x, angle = (
        torch.tensor([1.0, 0.35]) * (2 * where - 1).abs().pow(1.5) * (where - 0.5).sign()
    ).unbind()
    inner = env.envs[0].unwrapped
    inner.set_state(numpy.array([float(x), float(angle)]), numpy.zeros(2))
    return {"x": x[None], "angle": angle[None]}


def _put_point(env: Any, where: Tensor) -> dict[str, Tensor]:
    # Half of the states are near the goal.
    place = where if where[1] < 0.5 else 0.7 * torch.tensor([1.0, 0.5]) + 0.3 * where
    env.place[0] = place
    return {"x": place[:1].clone(), "y": place[1:].clone()}


MADE: dict[str, dict[str, object]] = {
    "pendulum": {"id": "Pendulum-v1"},
    "cartpole": {"id": "CartPole-v1"},
    "inverted_pendulum": {"id": "InvertedPendulum-v5", "kwargs": {"width": 96, "height": 96}},
}
POSES: dict[str, tuple[Callable[..., dict[str, Tensor]], Callable[[Tensor], Tensor], set[str]]] = {
    "pendulum": (
        _put_pendulum,
        lambda r: torch.stack([torch.linspace(0.0, 0.5, 40), torch.full((40,), float(r[0]))], 1),
        {"cos", "sin"},
    ),
    "cartpole": (
        _put_cartpole,
        lambda r: torch.stack([torch.full((40,), float(r[0])), torch.linspace(0.02, 0.5, 40)], 1),
        {"x", "angle"},
    ),
    "inverted_pendulum": (
        _put_inverted,
        lambda r: torch.stack([torch.full((40,), float(r[0])), torch.linspace(0.02, 0.5, 40)], 1),
        {"x", "angle"},
    ),
    "two_gap": (
        _put_point,
        lambda r: torch.stack(
            [torch.linspace(0.05, 0.95, 40), 0.2 * r[0] + torch.linspace(0.1, 0.3, 40)], 1
        ),
        {"x", "y"},
    ),
}
