"""Scenes of rooms with a key and a door, from a planner with and without errors."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.simclip.album import ROWS, Progress, SceneStore, numbers, picked
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.envs.minigrid.describe import KIND
from embodied.policies.scripted.grids import Planner, PlannerConfig


def rooms(album: SceneStore, seed: int, tracks: int, shown: Progress) -> None:
    """Add scenes of a planner with many errors, or with none."""
    rows = tracks if tracks else ROWS
    env = build(
        {
            "_target_": "embodied.envs.minigrid.env.MiniGrid",
            "id": "MiniGrid-DoorKey-6x6-v0",
            "num_envs": rows,
        }
        | {"backend": "gymnasium", "privileged": True},
        VecEnv,
    )
    obs = env.reset(seed)
    planner = Planner(PlannerConfig(0.0 if tracks else 0.5), env.spec)
    last: dict[int, Tensor] = {}

    def leave(over: Tensor) -> None:
        last.update(
            {row: env.render_batch(torch.tensor([row]), album.size)[0] for row in numbers(over)}
        )

    env.add_pre_reset_hook(leave)
    alive, carry = torch.ones(rows, dtype=torch.bool), planner.initial(rows)
    while not album.full and alive.any():
        named = level(obs)
        index = alive.nonzero().flatten() if tracks else album.rare(named, 5)
        shots = env.render_batch(index, album.size)
        album.add(shots, picked(named, index), index if tracks else None)
        action, carry = planner.act(obs, carry, planner.sample_noise(rows))
        last.clear()
        step = env.step(action[:, 0])
        obs = step.obs
        over = torch.tensor([row for row in sorted(last) if alive[row]], dtype=torch.int64)
        if len(over):
            named = picked(level(step.next_obs), over)
            shots = torch.stack([last[row] for row in over.tolist()])
            some = torch.arange(len(over)) if tracks else album.rare(named, 4)
            album.add(shots[some], picked(named, some), over[some] if tracks else None)
        if tracks:
            alive &= ~step.ended
        shown(album.kept)
    env.close()


def level(obs: Tensors) -> dict[str, Tensor]:
    """Steps from the agent to the goal (ignoring doors and walls), what it carries, and the door's
    state (3: in the doorway), each [n]."""
    grid, agent = obs["privileged/grid"].long(), obs["privileged/agent"].long()
    height = grid.shape[2]
    kinds = grid[..., 0].flatten(1)
    goal = (kinds == KIND["goal"]).float().argmax(1)
    steps = (goal // height - agent[:, 0]).abs() + (goal % height - agent[:, 1]).abs()
    door = (kinds == KIND["door"]).float()
    state = grid[..., 2].flatten(1).gather(1, door.argmax(1, keepdim=True))[:, 0]
    return {
        "steps": steps,
        "carries": agent[:, 3],
        "door": torch.where(door.any(1), state, 3),
    }
