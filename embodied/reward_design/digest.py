"""Digests: the last steps of failed episodes as short lines of numbers, for a language model."""

from __future__ import annotations

import torch

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.saved_node import read_run_settings
from embodied.core.tensors import Tensors
from embodied.reward_design.designer import Board
from embodied.reward_design.journal import Candidate
from embodied.rewards.handcrafted.variables import Variable

WIDEST = 4  # most elements of a variable in the digest
LONGEST = 12_000  # characters


def digests(board: Board, candidate: Candidate, episodes: int, last: int) -> str:
    """The last `last` steps of up to `episodes` failed episodes of a candidate's policy; "" if none
    failed or nothing was trained."""
    folder = board.run(candidate)
    if not any(folder.glob("checkpoints/[0-9]*")):
        return ""
    node = read_run_settings(folder / "run.yaml")
    env = build(node["env"] | {"num_envs": 2 * episodes}, VecEnv)
    policy = checkpoint.load_policy(folder, env.spec).eval()
    failed = _failures(Actor(policy, env.num_envs), env, board.seed, last)
    env.close()
    small = [v for v in board.variables.values() if sum(v.shape or (1,)) <= WIDEST]
    told = [_as_text(rows, small) for rows in failed[:episodes]]
    return "\n\n".join(f"episode {i + 1}\n{text}" for i, text in enumerate(told))[:LONGEST]


@torch.no_grad()
def _failures(actor: Actor, env: VecEnv, seed: int, last: int) -> list[Tensors]:
    """The last steps of each env's first episode if it failed: up to `last` transitions each."""
    obs, first = env.reset(seed), torch.ones(env.num_envs, dtype=torch.bool)
    open_ = torch.ones(env.num_envs, dtype=torch.bool)
    won = torch.zeros(env.num_envs, dtype=torch.bool)
    history: list[Tensors] = []
    ends: list[Tensors] = []
    while open_.any():
        action = actor(obs, first)
        step = env.step(action.to(env.device))
        row = {**tt.nest(obs, "obs"), "action": action, **tt.nest(step.next_obs, "next_obs")}
        history = [*history[1 - last :], {k: v.clone().cpu() for k, v in row.items()}]
        won |= step.log.get("success", torch.zeros_like(won)).cpu()
        over = step.ended.cpu() & open_
        ends += [
            {k: torch.stack([h[k][i] for h in history]) for k in history[0]}
            for i in (over & ~won).nonzero().flatten().tolist()
        ]
        open_ &= ~over
        obs, first = step.obs, step.ended
    return ends


def _as_text(rows: Tensors, variables: list[Variable]) -> str:
    lines = []
    values = {v.name: v.of(rows, "next_obs").float() for v in variables}
    for step in range(tt.length(rows)):
        parts = [
            f"{name} {' '.join(f'{x:.3g}' for x in value[step].flatten().tolist())}"
            for name, value in values.items()
        ]
        lines.append("; ".join(parts))
    return "\n".join(lines)
