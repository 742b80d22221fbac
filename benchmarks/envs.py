"""Environment speed: adapters and batched environments against EnvPool and Gymnasium."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import main
from benchmarks.measure import (
    Block,
    Clock,
    Comparison,
    alone,
    compare,
    cpu_time,
    table,
    write_json,
)
from embodied.core.env import VecEnv

WORLDS = ("quadrotor", "minigrid", "crafter", "maniskill", "warp")
PUSHES = 32  # different actions, so that neither side stays in one pose


def run(out: Path | str = "bench", repeats: int = 7, threads: int = 2) -> list[Comparison]:
    """Measure all settings, print the table, write `out/envs.json`; about ten minutes on two
    cores."""
    rows = [
        pool("HalfCheetah-v5", 16, 600, threads, repeats),
        pool("HalfCheetah-v5", 16, 200, threads, repeats, cpu_time),
        pool("Hopper-v5", 16, 600, threads, repeats),
        pool("Hopper-v5", 16, 200, threads, repeats, cpu_time),
        pool("MetaWorld/Reach-v3", 16, 150, threads, repeats),
        pool("FetchPickAndPlaceDense-v4", 16, 25, threads, repeats),
        single("HalfCheetah-v5", 1500, repeats),
        fr3("lift", 32, 25, threads, repeats),
        walker("Ant-v5", 16, 50, threads, repeats),
        walker("Ant-v5", 64, 12, threads, repeats),
        walker("Humanoid-v5", 16, 50, threads, repeats),
        walker("Humanoid-v5", 64, 12, threads, repeats),
    ]
    for world in WORLDS:
        rows += importlib.import_module(f"benchmarks.{world}").rows(repeats, threads)
    table(rows, "environment steps per second")
    write_json(Path(out), "envs", rows)
    return rows


def pool(
    name: str,
    rows: int,
    steps: int,
    threads: int,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> Comparison:
    """Our EnvPool adapter against EnvPool itself, whose reset steps count as steps."""
    import envpool

    from embodied.envs.envpool import Config, EnvPool

    ours = EnvPool(Config(name, rows, threads))
    bare = envpool.make(name, "gymnasium", num_envs=rows, num_threads=threads, seed=0)
    ours.reset(seed=0)
    bare.reset()
    dtype = bare.action_space.dtype
    pushes, native = actions(ours, lambda push: push.astype(dtype))
    comparison = compare(
        stepping(ours, pushes, steps, rows),
        calling(bare.step, native, steps, rows),
        repeats,
        f"EnvPool {name} x{rows}{', CPU time' if clock is cpu_time else ''}",
        target=0.95,
        clock=clock,
    )
    ours.close()
    bare.close()
    return comparison


def walker(name: str, rows: int, steps: int, threads: int, repeats: int) -> Comparison:
    """Our batched walker against Gymnasium's SyncVectorEnv of the same task."""
    import gymnasium

    from embodied.envs.mujoco.locomotion import Config, Locomotion

    ours = Locomotion(Config(name, rows, threads))
    peer = gymnasium.make_vec(name, rows, vectorization_mode="sync")
    ours.reset(seed=0)
    peer.reset(seed=0)
    high: Any = peer.single_action_space
    pushes, native = actions(ours, lambda push: push * high.high)
    comparison = compare(
        stepping(ours, pushes, steps, rows),
        calling(peer.step, native, steps, rows),
        repeats,
        f"{name} x{rows}",
        target=2.0,
    )
    ours.close()
    peer.close()
    return comparison


def single(name: str, steps: int, repeats: int) -> Comparison:
    """One env in our Gymnasium adapter against `gymnasium.make(...).step`; notes the overhead in
    us."""
    import gymnasium

    from embodied.envs.gym import Config, Gym

    ours, peer = Gym(Config(name)), gymnasium.make(name)
    ours.reset(seed=0)
    pushes, native = actions(ours, lambda push: push[0])

    def theirs() -> int:
        for count in range(steps):
            if count % 1000 == 0:
                peer.reset(seed=0)
            peer.step(native[count % PUSHES])
        return steps

    comparison = compare(stepping(ours, pushes, steps, 1), theirs, repeats, f"Gymnasium {name} x1")
    costs = [1e6 / a - 1e6 / b for a, b in _pairs(comparison)]
    return replace(comparison, notes={"added_us_per_step": float(np.median(costs))})


def fr3(task: str, rows: int, steps: int, threads: int, repeats: int) -> Comparison:
    """Control steps per second of an FR3 task, with observation, reward and autoreset."""
    from embodied.envs.fr3.env import Config, Fr3

    ours = Fr3(Config(task=task, num_envs=rows, threads=threads))
    ours.reset(seed=0)
    pushes, _ = actions(ours, lambda push: push)
    block = stepping(ours, pushes, steps, rows)
    comparison = alone(block, repeats, f"FR3 {task} x{rows}", "control steps", 2000.0)
    ours.close()
    return comparison


def actions(
    env: VecEnv, native: Callable[[np.ndarray], np.ndarray]
) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """The same random actions for both sides, generated before timing."""
    generator = np.random.default_rng(0)
    shape = (env.num_envs, env.spec.act.size)
    drawn = [generator.uniform(-1, 1, shape).astype(np.float32) for _ in range(PUSHES)]
    return [torch.from_numpy(push) for push in drawn], [native(push) for push in drawn]


def stepping(env: VecEnv, pushes: list[torch.Tensor], steps: int, rows: int) -> Block:
    """A block of `steps` of our steps; counts the steps of all parallel envs."""
    return calling(env.step, pushes, steps, rows)


def calling(step: Callable[[Any], Any], pushes: list[Any], steps: int, rows: int) -> Block:
    """A block of `steps` calls of `step`; counts the steps of all parallel envs."""

    def block() -> int:
        for count in range(steps):
            step(pushes[count % PUSHES])
        return steps * rows

    return block


def _pairs(comparison: Comparison) -> list[tuple[float, float]]:
    return list(zip(comparison.ours_rates, comparison.theirs_rates, strict=True))


if __name__ == "__main__":
    main(run)
