"""Agent: a policy that acts step by step, in the units of its environment; make_env."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import nn

from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build, nearest
from embodied.core.build import allow as allow_package
from embodied.core.env import VecEnv
from embodied.core.native import Native
from embodied.core.policy import Policy
from embodied.core.saved_node import read_saved
from embodied.core.spec import INSTRUCTION, MASK, Spec, hidden
from embodied.core.tensors import Tensors
from embodied.nn.sentences import require_task
from embodied.policies.remote.address import allow_typed, is_address, remote_policy
from embodied.policies.wrappers.told import with_task

if TYPE_CHECKING:
    import gymnasium

    GymEnv: TypeAlias = gymnasium.Env[Any, Any]

EnvLike: TypeAlias = "str | Mapping[str, Any] | VecEnv | GymEnv | Callable[[], GymEnv]"
"""The name of an environment (`em.list("env")`) or a Gymnasium id, or a mapping with its `name` and
settings; a Gymnasium environment, or a function that makes one; an environment that `make_env`
made."""


def make_env(env: EnvLike, num_envs: int = 1, **settings: Any) -> VecEnv:
    """`num_envs` parallel envs of `env` behind one object; actions are in [-1, 1].

    `settings` are those of the environment's YAML (`embodied show env=NAME`). A VecEnv is returned
    as it is. ConfigError for an unknown name or setting.

        env = em.make_env("fr3_lift", num_envs=16)
        obs = env.reset(seed=0)          # {"state": [16, D], ...}
    """
    if isinstance(env, VecEnv):
        if num_envs != 1 or settings:
            raise ConfigError("this environment is made already: num_envs and settings are its own")
        return env
    if isinstance(env, Mapping):
        settings = {"num_envs": env.get("num_envs", num_envs), **settings}
    return build(env_node(env, **{"num_envs": num_envs, **settings}), VecEnv)


def env_words(env: EnvLike) -> list[str]:
    """The words of a command line that choose `env`."""
    if isinstance(env, VecEnv):
        node: Mapping[str, Any] | None = getattr(env, "node", None)
        if node is None:
            raise ConfigError(
                f"give the {type(env).__name__} by name or as made by em.make_env: training builds "
                "a second one for evaluation"
            )
        return ["env=gym", *as_words("env", node)]
    if isinstance(env, str):
        return _named(env)
    if isinstance(env, Mapping):
        name, settings = named(env, "env")
        return [*_named(name), *as_words("env", settings)]
    from embodied.envs import gym_object

    return ["env=gym", f"env.id={gym_object.register(env)}"]


def env_node(env: EnvLike, allowed: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    """The node of `env` with `settings`, as a run.yaml has it; `allowed`: words "allow=[...]"."""
    from embodied.compose import compose

    words = [*allowed, *env_words(env), *as_words("env", settings)]
    return compose("train", [*words, "learner=imitate"]).node["env"]


def spec_of(env: EnvLike, allowed: Sequence[str] = ()) -> Spec:
    """The spec of `env`; `allowed` as in `env_node`."""
    if isinstance(env, VecEnv):
        return env.spec
    made = build(env_node(env, allowed, num_envs=1), VecEnv)
    made.close()
    return made.spec


def _named(name: str) -> list[str]:
    from embodied.compose import options, search_folders

    known = options("env", search_folders())
    if name in known:
        return [f"env={name}"]
    import gymnasium

    if ":" in name or name in gymnasium.registry:
        return ["env=gym", f"env.id={name}"]
    raise ConfigError(
        f'there is no environment "{name}"{nearest(name, [*known, *gymnasium.registry])}; '
        "em.list('env') has ours, gymnasium.registry Gymnasium's"
    )


def named(chosen: Mapping[str, Any], group: str) -> tuple[str, dict[str, Any]]:
    """The `name` in a mapping, and the settings beside it."""
    if "name" not in chosen:
        raise ConfigError(f'{group} needs a name: {group}={{"name": NAME, ...}}')
    return str(chosen["name"]), {key: value for key, value in chosen.items() if key != "name"}


def as_words(prefix: str, settings: Mapping[str, Any]) -> list[str]:
    """`{"lr": 1e-3, "net": {"hidden": [64]}}` below "learner" as `learner.lr=0.001 ...`."""
    words: list[str] = []
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value:
            words += as_words(name, cast(Mapping[str, Any], value))
        else:
            words.append(f"{name}={_written(value)}")
    return words


def _written(value: Any) -> str:
    """One value in Hydra's syntax."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and value and all(c.isalnum() or c in "_-./" for c in value):
        return value
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(each) for each in cast(list[Any], value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{}"
    return json.dumps(str(value))  # quoted: commas, spaces and braces have a meaning in Hydra


class Agent:
    """A policy with its plan of action chunks; `folder` is its run (None: it was not trained here).

    An agent of a Gymnasium environment takes that environment's observations and returns its own
    actions. One of our environments takes observations by name and returns actions in [-1, 1].
    """

    def __init__(self, policy: Policy, folder: Path | None = None) -> None:
        self.policy, self.folder = policy.eval(), folder
        self._native = Native.of(policy.spec)
        self._actor: Actor | None = None
        self._task: str | None = None
        self._told: dict[str | None, Policy] = {None: self.policy}

    def reset(self) -> None:
        """Forget the plan and the memory of the episode: call it where a new episode begins."""
        self._actor = None

    def predict(self, obs: Any, info: Any = None, task: str | None = None) -> Any:
        """The action for `obs`, and the next one at the next call.

        `obs`: one observation, or a batch [n, ...] of them (always of the same n): an array, or a
        mapping of arrays by name; `info`: that of the environment, needed only where it holds the
        `action_mask`. `task`: the sentence that a policy of several tasks is told, one of
        `policy.spec.tasks`; another one than in the last call begins a new plan, as `reset` does.
        Returns an action of the environment's own space (an int where it is
        Discrete); for a batch, its arrays have one row each. ConfigError for an observation that
        does not fit.

            obs, _ = env.reset()
            obs, reward, terminated, truncated, _ = env.step(agent.predict(obs))
        """
        if task != self._task:
            self.reset()
        self._task = task
        if task not in self._told:
            self._told[task] = with_task(self.policy, task)
        policy = self._told[task]
        batch, single = self._batched(policy.spec, obs, info)
        n = len(next(iter(batch.values())))
        first = torch.full((n,), self._actor is None)
        if self._actor is None:
            self._actor = Actor(policy, n)
        if n != self._actor.n:
            raise ConfigError(
                f"{n} observations after {self._actor.n}: call reset() to begin with another number"
            )
        unit = self._actor(batch, first).cpu()
        if self._native is None:
            action = unit.numpy()[0] if single else unit.numpy()
        else:
            action = self._native.act.native(unit)
            action = self._native.act.one(action, 0) if single else action
        return action.item() if isinstance(action, np.generic) else action

    def _batched(self, spec: Spec, obs: Any, info: Any) -> tuple[Tensors, bool]:
        """The observation by name as tensors [n, ...], and whether it was a single one."""
        leaves = {name: leaf for name, leaf in spec.obs.items() if not hidden(name)}
        if self._native is not None:
            try:
                return self._native.tensors(obs, list(leaves), info)
            except (KeyError, IndexError, TypeError):
                pass  # not the environment's own observation: one by name
            except ValueError as error:
                raise ConfigError(f"the observation does not fit: {error}") from error
        named = isinstance(obs, Mapping)
        if spec.listens and not (named and INSTRUCTION in obs):
            require_task(spec, None)
        if MASK in leaves and not (named and MASK in obs) and MASK not in (info or {}):
            raise ConfigError(f"this policy needs the {MASK}: agent.predict(obs, info)")
        if not named:
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
    allow: str | Sequence[str] = (),
    task: str | None = None,
) -> Agent:
    """The newest policy of a run or checkpoint folder, or the one of a policy server, ready to act.

    `env`: the environment of a run that was trained on a Python object, to evaluate it; the one in
    which the policy of a server acts. `module`: the torch module of a policy that was made of one;
    `allow`: packages outside of this project whose classes may be built, and
    `embodied.policies.remote` for a run that steers a served policy. `task`: the sentence that a
    policy of several tasks does for good, which then acts, is evaluated and saved as one of a
    single task. CheckpointError and ConfigError are one line.

        agent = em.load("outputs/pendulum_sac-0")
    """
    for package in [allow] if isinstance(allow, str) else allow:
        allow_package(package)
    if is_address(str(run)):
        if module is not None:
            raise ConfigError(f"{run} is a policy server: leave module out")
        allow_typed([str(run)])
        spec = None if env is None else spec_of(env)
        prompt: dict[str, Any] = {} if task is None else {"prompt": task}
        return Agent(remote_policy(str(run), spec, **prompt).to(device))
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
    policy = policy if task is None else with_task(policy, task)
    folder = saved.parent.parent
    if env is not None:
        env_words(env)  # a Python object gets its id again, by which the run knows it
    return Agent(policy, folder if (folder / "run.yaml").exists() else None)
