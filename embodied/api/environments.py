"""make_env: an environment by name, Gymnasium id, or from a Gymnasium object of your own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from embodied.core.build import ConfigError, build, nearest
from embodied.core.env import VecEnv

if TYPE_CHECKING:
    import gymnasium

EnvLike: TypeAlias = (
    "str | VecEnv | gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]]"
)
"""The name of an environment (`em.list("env")`) or a Gymnasium id; a Gymnasium environment, or a
function that makes one; an environment that `make_env` made."""


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
    return build(env_node(env, num_envs=num_envs, **settings), VecEnv)


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
    from embodied.envs import gym_object

    return ["env=gym", f"env.id={gym_object.register(env)}"]


def env_node(env: EnvLike, allowed: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    """The node of `env` with `settings`, as a run.yaml has it; `allowed`: words "allow=[...]"."""
    from embodied.compose import compose

    words = [*allowed, *env_words(env), *as_words("env", settings)]
    return compose("train", [*words, "learner=imitate"]).node["env"]


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
