"""Agent: a policy that acts step by step, in the units of the environment that it is used in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from embodied.api.environments import EnvLike, make_env
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build, resolve
from embodied.core.env import HasNativeActions, VecEnv
from embodied.core.policy import Policy
from embodied.core.saved_node import read_run_settings, read_saved, require_inside
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol


class Agent:
    """A policy with its plan of action chunks; `folder` is its run (None: it was not trained here).

    An agent of a Gymnasium environment takes that environment's observations and returns its own
    actions. One of our environments takes observations by name and returns actions in [-1, 1].
    """

    def __init__(
        self, policy: Policy, folder: Path | None = None, native: HasNativeActions | None = None
    ) -> None:
        self.policy, self.folder = policy.eval(), folder
        self._native = native
        self._actor: Actor | None = None

    def reset(self) -> None:
        """Forget the plan and the memory of the episode: call it where a new episode begins."""
        self._actor = None

    def predict(self, obs: Any) -> Any:
        """The action for `obs`, and the next one at the next call.

        `obs`: one observation, or a batch [n, ...] of them (always of the same n): an array, or a
        mapping of arrays by name. Returns an array of the environment's own shape (an int where
        actions are discrete); for a batch, one row each. ConfigError for an observation that does
        not fit.

            obs, _ = env.reset()
            obs, reward, terminated, truncated, _ = env.step(agent.predict(obs))
        """
        batch, single = self._batched(obs)
        n = len(next(iter(batch.values())))
        first = torch.full((n,), self._actor is None)
        if self._actor is None:
            self._actor = Actor(self.policy, n)
        if n != self._actor.n:
            raise ConfigError(
                f"{n} observations after {self._actor.n}: call reset() to begin with another number"
            )
        unit = self._actor(batch, first).cpu()
        action = unit.numpy() if self._native is None else self._native.native_actions(unit)
        if not single:
            return action
        return action[0].item() if action.ndim == 1 else action[0]

    def _batched(self, obs: Any) -> tuple[Tensors, bool]:
        """The observation by name as tensors [n, ...], and whether it was a single one."""
        leaves = self.policy.spec.obs
        if not isinstance(obs, Mapping):
            if len(leaves) != 1:
                raise ConfigError(f"this policy needs observations by name: {', '.join(leaves)}")
            obs = {next(iter(leaves)): obs}
        if missing := [name for name in leaves if name not in obs]:
            raise ConfigError(f"the observation has no {', '.join(missing)}")
        single = all(np.ndim(obs[name]) == len(leaf.shape) for name, leaf in leaves.items())
        batch: Tensors = {}
        for name, leaf in leaves.items():
            rows = torch.as_tensor(np.asarray(obs[name]), dtype=getattr(torch, leaf.dtype))
            batch[name] = rows[None] if single else rows
            if (shape := tuple(batch[name].shape[1:])) != leaf.shape:
                raise ConfigError(f"{name} is {list(shape)}, the policy takes {list(leaf.shape)}")
        return batch, single


def load(
    run: str | Path,
    env: EnvLike | None = None,
    module: nn.Module | None = None,
    device: str = "cpu",
) -> Agent:
    """The newest policy of a run or checkpoint folder, ready to act.

    `env`: the environment that it acts in, where the run was trained on a Python object; `module`:
    the torch module of a policy that was made of one. CheckpointError and ConfigError are one line.

        agent = em.load("outputs/pendulum_sac-0")
    """
    if module is not None:
        from embodied.policies import user_module

        node = read_saved(checkpoint.find(run) / "policy.yaml")
        if "module" not in node:
            raise ConfigError(
                f"the policy of {run} is not made of a torch module: leave module out"
            )
        user_module.register(module, str(node["module"]))
    saved = checkpoint.find(run)
    policy = checkpoint.load_policy(saved, device=device)
    folder = saved.parent.parent
    acted = make_env(env) if env is not None else _own_env(folder)
    native = None if acted is None else find_protocol(acted, HasNativeActions)
    return Agent(policy, folder if (folder / "run.yaml").exists() else None, native)


def _own_env(folder: Path) -> VecEnv | None:
    """The run's environment, if its actions have units of their own."""
    file = folder / "run.yaml"
    node = read_run_settings(file)["env"] if file.exists() else None
    if node is None:
        return None
    require_inside(node, file)
    kind = resolve(node["_target_"], VecEnv)
    return build({**node, "num_envs": 1}, VecEnv) if hasattr(kind, "native_actions") else None
