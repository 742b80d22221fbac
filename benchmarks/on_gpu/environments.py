"""Environments on the GPU: steps per second by number of parallel environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.rows import Row, Scale, attempted, rate
from embodied.core.build import build
from embodied.core.env import VecEnv

ACTIONS = 16  # different ones, so that nothing stays in one state


def quadrotor(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Eager and compiled physics."""
    node = {"_target_": "embodied.envs.quadrotor.hover_env.Quadrotor", "device": str(device)}
    yield from sizes("quadrotor", lambda n: node | {"num_envs": n}, scale)
    if "compile" in scale.backends:
        compiled = node | {"compile": True}
        yield from sizes("quadrotor compiled", lambda n: compiled | {"num_envs": n}, scale)


def maze(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Mazes of 13 x 13, levels drawn on the device."""
    node = {"_target_": "embodied.envs.maze.env.Maze", "side": 13, "blocks": 60, "horizon": 250}
    on_device = node | {"held_out": "zero_shot", "device": str(device)}
    yield from sizes("maze", lambda n: on_device | {"num_envs": n}, scale)


def warp(device: torch.device, scale: Scale) -> Iterator[Row]:
    """FR3 lift on MuJoCo Warp."""
    node = {"_target_": "embodied.envs.fr3.warp_env.Fr3Warp", "task": "lift", "device": str(device)}
    yield from sizes("FR3 lift, MuJoCo Warp", lambda n: node | {"num_envs": n}, scale)


def maniskill(device: torch.device, scale: Scale) -> Iterator[Row]:
    """PickCube on PhysX."""
    node = {
        "_target_": "embodied.envs.maniskill.env.ManiSkill",
        "id": "PickCube-v1",
        "backend": "gpu",
    }
    yield from sizes("ManiSkill PickCube", lambda n: node | {"num_envs": n}, scale)


def sizes(name: str, node: Callable[[int], dict[str, Any]], scale: Scale) -> Iterator[Row]:
    """One row for each number of environments."""
    yield from (
        attempted(f"{name} x{n}", "steps/s", lambda n=n: stepping(node(n), scale.steps))
        for n in scale.envs
    )


def stepping(node: dict[str, Any], steps: int) -> tuple[float, str]:
    """Steps of all environments a second, random actions, resets included."""
    env = build(node, VecEnv)
    actions = random_actions(env)
    env.reset(seed=0)
    count = [0]

    def step() -> None:
        env.step(actions[count[0] % ACTIONS])
        count[0] += 1

    per_second = rate(step, steps) * env.num_envs
    where = str(env.device)
    env.close()
    return per_second, f"on {where}"


def random_actions(env: VecEnv) -> Tensor:
    """[ACTIONS, B, ...] on the environment's device: from -1 to 1, or any of its choices."""
    random, act = torch.Generator().manual_seed(0), env.spec.act
    shape = (ACTIONS, env.num_envs, *act.shape)
    if act.dtype == "int64":
        assert isinstance(act.low, int | float) and isinstance(act.high, int | float)
        drawn = torch.randint(int(act.low), int(act.high) + 1, shape, generator=random)
        return drawn.to(env.device)
    return (torch.rand(shape, generator=random) * 2 - 1).to(env.device)
