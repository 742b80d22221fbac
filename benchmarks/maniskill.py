"""ManiSkill: our adapter against its own loop, steps per second with resets.

Its own loop is `gymnasium.make(id)` stepped with tensors and reset at its time limit; with several
environments it is Gymnasium's AsyncVectorEnv over its `CPUGymWrapper`, as in its documentation.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, compare, table, write_json

PUSHES = 16  # different actions, so that neither side stays in one pose
CONTROL = "pd_ee_delta_pos"


def run(out: Path | str = "bench", repeats: int = 5, threads: int = 2) -> list[Comparison]:
    """Measure every setting, print the table, write `out/maniskill.json`."""
    measured = rows(repeats, threads)
    table(measured, "environment steps per second, our ManiSkill adapter and ManiSkill itself")
    write_json(Path(out), "maniskill", measured)
    return measured


def rows(repeats: int = 5, threads: int = 2) -> list[Comparison]:
    """State with one env and with one env per thread, and images with one env (all on the CPU)."""
    return [
        single("PickCube-v1", "state", 100, repeats),
        single("PushCube-v1", "state", 100, repeats),
        many("PickCube-v1", max(2, threads), 100, repeats),
        single("PickCube-v1", "rgb", 25, repeats),
    ]


def single(name: str, obs: str, steps: int, repeats: int) -> Comparison:
    """One env of our adapter in this process against the environment itself."""
    from embodied.envs.maniskill.env import Config, ManiSkill

    ours = ManiSkill(Config(name, obs=obs, control_mode=CONTROL, backend="cpu"))  # pyright: ignore[reportArgumentType]
    peer = _own(name, obs)
    ours.reset(seed=0)
    peer.reset(seed=0)
    pushes = _pushes(1, ours.spec.act.size)

    def theirs() -> int:
        for count in range(steps):
            *_, late, _ = peer.step(pushes[count % PUSHES])
            if bool(late):
                peer.reset()
        return steps

    title = f"ManiSkill {name} {obs} x1"
    comparison = compare(_ours(ours, pushes, steps), theirs, repeats, title, target=0.9)
    ours.close()
    peer.close()
    return comparison


def many(name: str, count: int, steps: int, repeats: int) -> Comparison:
    """`count` envs in as many worker processes, on both sides."""
    from gymnasium.vector import AsyncVectorEnv

    from embodied.envs.maniskill.env import Config, ManiSkill

    ours = ManiSkill(
        Config(name, num_envs=count, control_mode=CONTROL, backend="cpu", workers=count)
    )
    peer = AsyncVectorEnv([partial(_wrapped, name)] * count, context="spawn")
    ours.reset(seed=0)
    peer.reset(seed=0)
    pushes = _pushes(count, ours.spec.act.size)
    native: list[np.ndarray] = [push.numpy() for push in pushes]

    def theirs() -> int:
        for at in range(steps):
            peer.step(native[at % PUSHES])
        return steps * count

    title = f"ManiSkill {name} state x{count}, {count} processes"
    comparison = compare(_ours(ours, pushes, steps), theirs, repeats, title, target=0.9)
    ours.close()
    peer.close()
    return comparison


def _own(name: str, obs: str) -> Any:
    import gymnasium

    return gymnasium.make(
        name,
        obs_mode=obs,
        control_mode=CONTROL,
        reward_mode="normalized_dense",
        sim_backend="physx_cpu",
        render_backend="cpu",
    )


def _wrapped(name: str) -> Any:
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    import embodied.envs.maniskill.factory  # noqa: F401  (registers the tasks, chooses the driver)

    torch.set_num_threads(1)
    return CPUGymWrapper(_own(name, "state"))


def _pushes(rows: int, size: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return list(torch.rand(PUSHES, rows, size, generator=random) * 2 - 1)


def _ours(env: Any, pushes: list[torch.Tensor], steps: int) -> Block:
    def block() -> int:
        for count in range(steps):
            env.step(pushes[count % PUSHES])
        return steps * env.num_envs

    return block


if __name__ == "__main__":
    main(run)
