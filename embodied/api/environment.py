"""make_env, and what a Python program may give as an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

from embodied.api.words import OPTIONS, as_words, edge, named
from embodied.core.build import ConfigError, build, give, nearest
from embodied.core.env import VecEnv
from embodied.core.spec import Spec

if TYPE_CHECKING:
    import gymnasium

    GymEnv: TypeAlias = gymnasium.Env[Any, Any]

EnvLike: TypeAlias = "str | Mapping[str, Any] | VecEnv | GymEnv | Callable[[], GymEnv] | Any"
"""The name of an environment (`em.list("env")`) or a Gymnasium id, or a mapping with its `name` and
settings; a Gymnasium environment, or a function that makes one; a list of these, or a vector
environment of `gymnasium.make_vec`; a class of VecEnv; an environment that `make_env` made."""


@edge
def make_env(env: EnvLike, num_envs: int | None = None, numpy: bool = False, **more: Any) -> Any:
    """`num_envs` parallel envs (by default 1, or as many as `env` lists), with actions in [-1, 1].

    `more`: settings of the environment's YAML (`embodied show env=NAME`). A VecEnv is returned as
    it is. `numpy`: a `gymnasium.vector.SyncVectorEnv`, of a Gymnasium environment in its own units.

        env = em.make_env("fr3_lift", num_envs=16)
        obs = env.reset(seed=0)          # {"state": [16, D], ...}
    """
    if isinstance(env, VecEnv):
        if num_envs is not None or more or numpy:
            raise ConfigError("this environment is made already: num_envs and settings are its own")
        return env
    node = env_node(env, **more)
    listed = any(word.startswith("env.num_envs=") for word in env_words(env))
    many = num_envs or (node["num_envs"] if listed else 1)
    if not numpy:
        return build({**node, "num_envs": many}, VecEnv)
    from gymnasium.vector import SyncVectorEnv

    from embodied.envs.adapters.gymnasium_env import native_view

    return SyncVectorEnv([lambda: native_view(build({**node, "num_envs": 1}, VecEnv))] * many)


def env_words(env: EnvLike) -> list[str]:
    """The words of a command line that choose `env`, and the number of parallel envs that it is."""
    if isinstance(env, VecEnv):
        node: Mapping[str, Any] | None = getattr(env, "node", None)
        if node is None:
            raise ConfigError(
                f"give the {type(env).__name__} by name, as its class or as made by em.make_env: "
                "training builds a second one for evaluation"
            )
        return ["env=python", *as_words("env", node)]
    if isinstance(env, str):
        from embodied.compose import options, search_folders

        known = options("env", search_folders())
        if env in known:
            return [f"env={env}"]
        import gymnasium

        if ":" in env or env in gymnasium.registry:
            return ["env=gym", f"env.id={env}"]
        raise ConfigError(
            f'there is no environment "{env}"{nearest(env, [*known, *gymnasium.registry])}; '
            "em.list('env') has ours, gymnasium.registry Gymnasium's"
        )
    if isinstance(env, Mapping):
        name, settings = named(env, "env")
        return [*env_words(name), *as_words("env", settings)]
    if isinstance(env, type) and issubclass(env, VecEnv):
        return ["env=python", f"env._target_={give(env, 'env')}"]
    from embodied.envs import gym_object

    many = gym_object.several(env)
    words = [] if many is None else [f"env.num_envs={len(many)}"]
    return ["env=gym", f"env.id={gym_object.register(env)}", *words]


def env_node(env: EnvLike, allowed: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    """The node of `env` with `settings`, as a run.yaml has it; `allowed`: words "allow=[...]"."""
    from embodied.compose import compose

    words = [*allowed, *env_words(env), *as_words("env", settings)]
    return compose("train", [*words, "learner=imitate"], [OPTIONS]).node["env"]


def spec_of(env: EnvLike, allowed: Sequence[str] = ()) -> Spec:
    """The spec of `env`; `allowed` as in `env_node`."""
    if isinstance(env, VecEnv):
        return env.spec
    with closing(build(env_node(env, allowed, num_envs=1), VecEnv)) as made:
        return made.spec
