"""MiniGrid: both back ends against Gymnasium's loop and against EnvPool itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.measure import Block, Comparison, compare
from embodied.core.env import VecEnv

LEVEL = "MiniGrid-DoorKey-8x8-v0"
PUSHES = 32


def rows(repeats: int = 7, threads: int = 2) -> list[Comparison]:
    """All settings; the first three are compared with `gymnasium.make(LEVEL)`, stepped and
    reset."""
    return [
        against_gymnasium("envpool", 64, 300, threads, repeats, False, 10.0),
        against_gymnasium("envpool", 64, 100, threads, repeats, True, 3.0),
        against_gymnasium("gymnasium", 16, 60, threads, repeats, False, 2.0),
        against_pool(64, 300, threads, repeats),
    ]


def against_gymnasium(
    backend: Literal["gymnasium", "envpool"],
    rows: int,
    steps: int,
    threads: int,
    repeats: int,
    whole: bool,
    target: float,
) -> Comparison:
    """Ours with `rows` parallel envs against one of Gymnasium's; `whole`: ours also returns the
    level."""
    from embodied.envs.minigrid.env import Config, MiniGrid

    config = Config(LEVEL, backend, num_envs=rows, threads=threads, privileged=whole)
    ours = MiniGrid(config)
    name = f"MiniGrid DoorKey-8x8, {backend} x{rows}{' with the whole level' if whole else ''}"
    block = stepping(ours, steps)
    comparison = compare(block, single(LEVEL, 2000), repeats, name, target=target)
    ours.close()
    return comparison


def against_pool(rows: int, steps: int, threads: int, repeats: int) -> Comparison:
    """Ours against EnvPool itself, whose reset steps count as steps."""
    import envpool

    from embodied.envs.minigrid.env import Config, MiniGrid

    ours = MiniGrid(Config(LEVEL, "envpool", num_envs=rows, threads=threads))
    bare: Any = envpool.make(LEVEL, "gymnasium", num_envs=rows, num_threads=threads, seed=0)
    bare.reset()
    pushes = [push.astype(np.int32) for push in drawn(rows)]
    theirs = calling(bare.step, pushes, steps, rows)
    name = f"MiniGrid DoorKey-8x8 x{rows} against the bare pool"
    comparison = compare(stepping(ours, steps), theirs, repeats, name, target=0.9)
    ours.close()
    bare.close()
    return comparison


def single(level: str, steps: int) -> Block:
    """A block of Gymnasium's own environment, reset when an episode ends."""
    import gymnasium
    import minigrid

    env = gymnasium.make(level, disable_env_checker=True)
    assert minigrid.__version__
    env.reset(seed=0)
    pushes = [int(push[0]) for push in drawn(1)]

    def block() -> int:
        for count in range(steps):
            _, _, over, late, _ = env.step(pushes[count % PUSHES])
            if over or late:
                env.reset()
        return steps

    return block


def stepping(env: VecEnv, steps: int) -> Block:
    """A block of `steps` of our steps; counts the steps of all parallel envs."""
    env.reset(seed=0)
    pushes = [torch.from_numpy(push) for push in drawn(env.num_envs)]
    return calling(env.step, pushes, steps, env.num_envs)


def calling(step: Callable[[Any], Any], pushes: list[Any], steps: int, rows: int) -> Block:
    def block() -> int:
        for count in range(steps):
            step(pushes[count % PUSHES])
        return steps * rows

    return block


def drawn(rows: int) -> list[np.ndarray]:
    """The same random actions for both sides, generated before timing."""
    generator = np.random.default_rng(0)
    return [generator.integers(7, size=rows) for _ in range(PUSHES)]
