"""MuJoCo Warp against MuJoCo's thread pool: control steps per second of an FR3 task by batch size.

Both sides execute the same random actions, with observation, reward and resets as in training. Ours
is Warp on the GPU if there is one, else Warp's CPU back end (single-threaded, for tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, compare, table, write_json
from embodied.core.env import VecEnv

TASK = "lift"
PUSHES = 16  # different actions, so that neither side stays in one pose
ON_GPU, ON_CPU = (64, 512, 4096, 16384), (16, 64)
POOL = 256  # more parallel envs do not make the thread pool faster
STEPS_A_BLOCK = 2000  # steps of all parallel envs in one block


def run(out: Path | str = "bench", repeats: int = 5, threads: int = 2) -> list[Comparison]:
    """Measure every batch size, print the table, write `out/warp.json`."""
    measured = rows(repeats, threads)
    table(measured, "control steps per second, MuJoCo Warp (ours) and MuJoCo's pool (theirs)")
    write_json(Path(out), "warp", measured)
    return measured


def rows(
    repeats: int = 5, threads: int = 2, sizes: Sequence[int] = (), task: str = TASK
) -> list[Comparison]:
    """One comparison for each batch size in `sizes` (default: sizes that suit this machine's
    device)."""
    default = ON_GPU if torch.cuda.is_available() else ON_CPU
    return [batch(task, size, repeats, threads) for size in sizes or default]


def batch(task: str, size: int, repeats: int, threads: int) -> Comparison:
    """`size` parallel envs on Warp against as many (at most `POOL`) on the thread pool."""
    from embodied.envs.fr3 import env as fr3_env
    from embodied.envs.fr3 import warp_env

    ours = warp_env.Fr3Warp(warp_env.Config(task=task, num_envs=size))
    theirs = fr3_env.Fr3(fr3_env.Config(task=task, num_envs=min(size, POOL), threads=threads))
    comparison = compare(
        playing(ours, 20 if ours.device.type == "cuda" else 3),
        playing(theirs, max(1, STEPS_A_BLOCK // theirs.num_envs)),
        repeats,
        f"FR3 {task} x{size} on {ours.device.type}",
        "control steps",
    )
    ours.close()
    theirs.close()
    return replace(comparison, notes={"threads": threads, "pool_rows": theirs.num_envs})


def playing(env: VecEnv, steps: int) -> Block:
    """A block of `steps` steps of random actions; counts the steps of all parallel envs."""
    random = torch.Generator().manual_seed(0)
    shape = (PUSHES, env.num_envs, env.spec.act.size)
    pushes = (torch.rand(shape, generator=random) * 2 - 1).to(env.device)
    env.reset(seed=0)

    def block() -> int:
        for count in range(steps):
            env.step(pushes[count % PUSHES])
        if env.device.type == "cuda":
            torch.cuda.synchronize(env.device)
        return steps * env.num_envs

    return block


if __name__ == "__main__":
    main(run)
