"""Reward components over one evaluation episode, one value per decision, as JSON."""

from __future__ import annotations

from pathlib import Path

import torch

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.atomic_write import write_json
from embodied.core.device import forked
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import AugmentsEnv, HasComponents
from embodied.core.tensors import Tensors
from embodied.training.collector import Collector

LONGEST = 1000  # steps of the episode, at most
FILE = "terms.json"


@torch.no_grad()
def write_terms(
    folder: Path,
    reward: HasComponents,
    policy: Policy,
    env: VecEnv,
    gamma: float,
    seed: int,
    execute: int | None = None,
) -> None:
    """Run the first evaluation episode of parallel env 0 and write the reward's components, one
    number per decision, to FOLDER/terms.json."""
    if isinstance(reward, AugmentsEnv):
        env = reward.augment_env(env)
    # The transitions of env 0's first episode, without exploration, and whether it succeeded.
    with forked(seed):
        rollout = Collector(env, policy, gamma, 1, execute, seed)
        rollout.actor = Actor(policy, env.num_envs, execute)
        kept: list[Tensors] = []
        won: bool | None = None
        for _ in range(LONGEST):
            rows, step = rollout.step()
            finished = rollout.finished
            at = [0] if finished is None else (finished == 0).nonzero().flatten().tolist()
            if rows and at:  # env 0 finished a decision
                kept.append({key: value[at[0] : at[0] + 1] for key, value in rows.items()})
            if "success" in step.log:
                won = bool(won) or bool(step.log["success"][0])
            if bool(step.ended[0]):
                break
    rows = tt.to(tt.cat(kept), next(policy.parameters()).device)
    parts = {name: value.tolist() for name, value in reward.components(rows).items()}
    write_json(folder / FILE, {"terms": parts, "success": won})
