"""Loads a reward outside of a run, as configured or as a run has trained it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node, build
from embodied.core.reward import AugmentsEpisodes, Reward, Stateful
from embodied.core.saved_node import read_run_settings, require_inside
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors

CHUNK = 2048  # transitions per call


def make_reward(
    node: Node,
    state: Any,
    spec: Spec,
    gamma: float,
    num_envs: int = 1,
    seed: int = 0,
    folder: Path = Path("outputs") / "reward",
) -> Reward:
    """Build the reward of `node`, with a saved `state` if there is one (None: untrained). It may
    write to `folder`."""
    context = {"device": torch.device("cpu"), "seed": seed, "folder": folder}
    reward: Reward = build(node, Reward, spec=spec, gamma=gamma, num_envs=num_envs, **context)
    if state is not None and isinstance(reward, Stateful):
        reward.set_state(state)
    return reward


def require_ready(reward: Reward, verb: str) -> None:
    """ConfigError if an untrained `reward` says nothing yet: it learns during training, and is not
    one that looks at recorded episodes by itself."""
    if not reward.frozen and not isinstance(reward, AugmentsEpisodes):
        raise ConfigError(
            f"this reward is learned during training; {verb} with the reward of a run (reward=RUN)"
        )


def of_run(path: Path) -> tuple[Node, Any]:
    """The configuration and the saved state of the reward that a run was trained with."""
    saved = checkpoint.find(path)
    file = saved.parent.parent / "run.yaml"
    node = read_run_settings(file).get("reward")
    if node is None:
        raise ConfigError(f"{path} was trained with the environment's reward; use reward=own")
    require_inside(node, file)
    return node, checkpoint.load_state(saved, "loop")["loop"]["reward"]


@torch.no_grad()
def evaluate_reward(reward: Reward | None, rows: Tensors) -> Tensor:
    """Rewards [N] (float32) of transitions, in batches; None: the environment's reward. ConfigError
    if the reward needs a key that the transitions do not have."""
    if reward is None:
        return rows["reward"].float()
    total = tt.length(rows)
    parts: list[Tensor] = []
    for begin in range(0, total, CHUNK):
        some = tt.each(rows, lambda value, begin=begin: value[begin : begin + CHUNK])
        try:
            parts.append(reward(some).float())
        except KeyError as error:
            raise ConfigError(
                f"the reward reads {error.args[0]}, which these transitions do not have "
                f"(they have {', '.join(sorted(rows))})"
            ) from error
    return torch.cat(parts)
