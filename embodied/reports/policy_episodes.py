"""PolicyEpisodes: whole episodes of several policies as transitions, to evaluate rewards on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.device import forked
from embodied.core.env import VecEnv, require_finite
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors


@dataclass(frozen=True)
class PolicyEpisodes:
    """`rows` are transitions, episode after episode; `episode` [N] (int64) is the episode index of
    each; `success` [E] (bool) is None if the environment does not report it; `policy` [E] (int64)
    is the index of the policy."""

    rows: Tensors
    episode: Tensor
    success: Tensor | None
    policy: Tensor

    def __len__(self) -> int:
        return len(self.policy)

    def split(self, values: Tensor) -> list[Tensor]:
        """Values [N] of the transitions, by episode."""
        return list(values.split(self.episode.bincount(minlength=len(self)).tolist()))


@torch.no_grad()
def collect_episodes(
    env: VecEnv, policies: Sequence[Policy], episodes: int, gamma: float, seed: int
) -> PolicyEpisodes:
    """At least `episodes` episodes of each policy, the same number from every parallel env."""
    kept: list[Tensors] = []
    won: list[Tensor] = []
    lengths: list[int] = []
    policy_ids: list[int] = []
    with forked():
        for number, policy in enumerate(policies):
            torch.manual_seed(seed + number)
            for rows, success in _run(env, policy.eval(), episodes, gamma, seed + number):
                kept.append(rows)
                lengths.append(tt.length(rows))
                policy_ids.append(number)
                won += [] if success is None else [success]
    episode = torch.arange(len(kept)).repeat_interleave(torch.tensor(lengths))
    return PolicyEpisodes(
        tt.cat(kept), episode, torch.stack(won) if won else None, torch.tensor(policy_ids)
    )


def _run(
    env: VecEnv, policy: Policy, episodes: int, gamma: float, seed: int
) -> list[tuple[Tensors, Tensor | None]]:
    n, actor = env.num_envs, Actor(policy, env.num_envs)
    quota = -(-episodes // n)
    obs, first = env.reset(seed), torch.ones(n, dtype=torch.bool, device=env.device)
    running: list[list[Tensors]] = [[] for _ in range(n)]
    won, played = torch.zeros(n, dtype=torch.bool), [0] * n
    done: list[tuple[Tensors, Tensor | None]] = []
    while min(played) < quota:
        action = actor(obs, first)
        step = env.step(action.to(env.device))
        require_finite(step.reward, step.next_obs, type(env).__name__)
        rows = {
            **tt.nest(obs, "obs"),
            "action": action,
            "reward": step.reward,
            "discount": gamma * (~step.terminated).float(),
            **tt.nest(step.next_obs, "next_obs"),
        }
        rows = tt.each(rows, torch.clone)
        success = step.log.get("success")
        won = won if success is None else won | success.cpu()
        for row in range(n):
            running[row].append({key: value[row] for key, value in rows.items()})
        for row in step.ended.nonzero().flatten().tolist():
            if played[row] < quota:
                played[row] += 1
                done.append((tt.stack(running[row]), None if success is None else won[row].clone()))
            running[row], won[row] = [], False
        obs, first = step.obs, step.ended
    return done
