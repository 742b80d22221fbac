"""Quadrotor simulation speed: 4,096 parallel envs, with observations, noise and resets."""

from __future__ import annotations

import torch

from embodied.bench.measure import Comparison, alone
from embodied.bench.simulators.envs import actions, stepping
from envs.quadrotor.hover_env import Config, Quadrotor


def rows(repeats: int, threads: int) -> list[Comparison]:
    """The simulator alone, with random actions (about 2% of the episodes end in every step)."""
    torch.set_num_threads(threads)
    found = [flights(4096, 40, "cpu", repeats, 0.9e6)]
    if torch.cuda.is_available():
        found += [flights(count, 200, "cuda", repeats) for count in (4096, 65_536)]
    return found


def flights(
    count: int, steps: int, device: str, repeats: int, target: float | None = None
) -> Comparison:
    """`steps` steps of `count` parallel envs."""
    env = Quadrotor(Config(num_envs=count, device=device, compile=device == "cuda"))
    env.reset(seed=0)
    pushes, _ = actions(env, lambda push: push)
    block = stepping(env, [push.to(device) for push in pushes], steps, count)

    def finished() -> int:
        done = block()
        if device == "cuda":
            torch.cuda.synchronize()
        return done

    return alone(finished, repeats, f"Quadrotor x{count} ({device})", target=target)
