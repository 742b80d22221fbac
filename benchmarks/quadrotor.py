"""Quadrotor simulation speed: 4,096 parallel envs, with observations, noise and resets."""

from __future__ import annotations

import torch

from benchmarks.envs import actions, stepping
from benchmarks.measure import Block, Comparison, alone, compare, cpu_time
from embodied.envs.quadrotor.hover_env import Config, Quadrotor


def rows(repeats: int, threads: int) -> list[Comparison]:
    """The simulator alone, with random actions (about 2% of the episodes end in every step)."""
    torch.set_num_threads(threads)
    found = [by_native_code(*size, repeats) for size in ((4096, 32), (4096, 0), (10, 32))]
    if torch.cuda.is_available():
        found += [on_gpu(count, repeats) for count in (4096, 65_536)]
    return found


def by_native_code(count: int, history: int, repeats: int) -> Comparison:
    """Native code against PyTorch, steps per CPU second of one thread."""
    steps = 20 if count > 1000 else 1000
    envs = [Quadrotor(Config(count, history, native=native)) for native in (True, False)]
    ours, theirs = (flights(env, steps) for env in envs)
    code = envs[0].native_obstacle() or "available"
    name = f"Quadrotor x{count}, {history} past actions, native code ({code}) against PyTorch"
    return compare(ours, theirs, repeats, name, target=2e7 / 1.2e6, clock=cpu_time)


def on_gpu(count: int, repeats: int) -> Comparison:
    """200 steps of `count` parallel envs on a GPU."""
    block = flights(Quadrotor(Config(count, device="cuda", compile=True)), 200)

    def finished() -> int:
        done = block()
        torch.cuda.synchronize()
        return done

    return alone(finished, repeats, f"Quadrotor x{count} (cuda)")


def flights(env: Quadrotor, steps: int) -> Block:
    """`steps` steps of all parallel envs."""
    env.reset(seed=0)
    pushes, _ = actions(env, lambda push: push)
    return stepping(env, [push.to(env.device) for push in pushes], steps, env.num_envs)
