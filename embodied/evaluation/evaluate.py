"""Evaluate: fixed starts, the same number of episodes from every row, nothing else disturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.env import VecEnv, require_finite
from embodied.core.policy import Policy


@dataclass(frozen=True)
class Evaluation:
    """Per episode: `success` and `violated` [N] (None where the world knows of none), `returns`,
    `lengths`, and the mean `change` of an action's elements from one step to the next (None where
    actions are choices)."""

    success: Tensor | None
    returns: Tensor
    lengths: Tensor
    violated: Tensor | None = None
    change: Tensor | None = None

    def metrics(self) -> dict[str, float]:
        """Means for the log, without the `eval/` prefix."""
        means = {
            "return": self.returns.mean().item(),
            "length": self.lengths.float().mean().item(),
            "episodes": float(len(self.returns)),
        }
        if self.success is not None:
            means["success"] = self.success.float().mean().item()
        if self.violated is not None:
            means["violated"] = self.violated.float().mean().item()
        if self.change is not None:
            means["change"] = self.change.mean().item()
        return means


@torch.no_grad()
def evaluate(
    policy: Policy,
    env: VecEnv,
    episodes: int,
    seed: int,
    execute: int | None = None,
    each_step: Callable[[int], None] | None = None,
) -> Evaluation:
    """Play `episodes` from starts that depend on `seed` only, without exploration noise.

    Every row contributes its first episodes, as many as any other row, so that short episodes
    (early successes) are not over-represented. Training randomness is left as it was.
    """
    devices = [env.device] if env.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return _play(policy, env, episodes, seed, execute, each_step)


def _play(
    policy: Policy,
    env: VecEnv,
    episodes: int,
    seed: int,
    execute: int | None,
    each_step: Callable[[int], None] | None,
) -> Evaluation:
    n = env.num_envs
    quota = -(-episodes // n)
    actor = Actor(policy, n, execute)
    obs, first = env.reset(seed), torch.ones(n, dtype=torch.bool, device=env.device)
    played = torch.zeros(n, dtype=torch.int64, device=env.device)
    ret, length = torch.zeros(n, device=env.device), torch.zeros_like(played)
    won, bad = torch.zeros_like(first), torch.zeros_like(first)
    table = torch.zeros(quota, n, 5, device=env.device)
    moves = env.spec.act.dtype == "float32"
    last, change = env.spec.act.zeros(n, env.device), torch.zeros_like(ret)
    knows = tells = False
    while (played < quota).any():
        action = actor(obs, first)
        if moves:
            change = change + (action - last).abs().flatten(1).mean(1) * ~first
            last = action
        step = env.step(action)
        require_finite(step.reward, step.next_obs, type(env).__name__)
        obs, first = step.obs, step.ended
        ret, length = ret + step.reward, length + 1
        if "success" in step.log:
            knows = True
            won = won | step.log["success"]
        if "violated" in step.log:
            tells = True
            bad = bad | step.log["violated"]
        ended = (first & (played < quota)).nonzero().flatten()
        table[played[ended], ended] = torch.stack(
            [
                won[ended].float(),
                ret[ended],
                length[ended].float(),
                bad[ended].float(),
                change[ended] / (length[ended] - 1).clamp(min=1),
            ],
            1,
        )
        played[ended] += 1
        ret, length, won, bad = ret * ~first, length * ~first, won & ~first, bad & ~first
        change = change * ~first
        if each_step is not None:
            each_step(int(played.sum()))
    table = table.flatten(0, 1)[:episodes].cpu()
    success = table[:, 0].bool() if knows else None
    violated = table[:, 3].bool() if tells else None
    change = table[:, 4] if moves else None
    return Evaluation(success, table[:, 1], table[:, 2].long(), violated, change)


@torch.no_grad()
def film(
    policy: Policy, env: VecEnv, seed: int, row: int = 0, execute: int | None = None
) -> Tensor:
    """Frames [T, H, W, 3] (uint8) of the first episode of `row`: the one that `evaluate` plays with
    the same environment and seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        actor = Actor(policy, env.num_envs, execute)
        obs, first = env.reset(seed), torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        frames: list[Tensor] = []
        while not frames or not bool(first[row]):
            frames.append(env.render(row))
            step = env.step(actor(obs, first))
            obs, first = step.obs, step.ended
        return torch.stack(frames)
