"""Agent: a policy that acts step by step, in the units of its environment; make_env."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from embodied.api.edge import edge
from embodied.api.words import OPTIONS, as_words, named
from embodied.commands import answer
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import GIVEN, ConfigError, build, give, nearest
from embodied.core.build import allow as allow_package
from embodied.core.device import pick_device
from embodied.core.env import VecEnv
from embodied.core.native import Native
from embodied.core.policy import Policy
from embodied.core.saved_node import python_names, read_run_settings, read_saved
from embodied.core.spec import INSTRUCTION, MASK, Spec, hidden
from embodied.core.tensors import Tensors
from embodied.nn.sentences import require_task
from embodied.policies.remote.address import allow_typed, is_address, remote_policy
from embodied.policies.wrappers.told import with_task
from embodied.training.logger import newest, read_metrics

if TYPE_CHECKING:
    import gymnasium
    import pandas

    from embodied.evaluation.evaluate import Evaluation

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
    many = node.get("num_envs", 1) if num_envs is None else num_envs
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
        return _named(env)
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

    def __repr__(self) -> str:
        spec = self.policy.spec
        seen = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in spec.obs.items())
        said = f"{type(self.policy).__name__}: {seen} -> action {list(spec.act.shape)}"
        if self.folder is None:
            return f"<Agent {said}, of no run>"
        last = {key: value for row in read_metrics(self.folder) for key, value in row.items()}
        return f"<Agent {said}, {last.get('step', 0):,} steps, {newest(last)}, {self.folder}>"

    def __getattr__(self, name: str) -> Any:
        more = "" if name.startswith("_") else answer("names", name)
        raise AttributeError(f"an Agent has no {name}{more}")

    def reset(self) -> None:
        """Forget the plan and the memory of the episode: call it where a new episode begins."""
        self._actor = None

    @edge
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

    @edge
    def train(self, steps: int, **settings: Any) -> Agent:
        """Go on with its run for `steps` more steps, `settings` as in `em.train`; returns this
        agent, which has learned. ConfigError for an agent of no run."""
        from embodied.api.training import train

        data = read_run_settings(self._run() / "run.yaml").get("data") or {}
        done = int(checkpoint.find(self._run()).name) - int(data.get("pretrain_steps") or 0)
        went_on = train(resume=str(self._run()), steps=max(done, 0) + steps, **settings)
        self.__dict__.update(vars(went_on))
        return self

    def evaluate(self, env: EnvLike | None = None, **settings: Any) -> Evaluation:
        """`em.evaluate(agent, env, ...)`: by default in the environment of its run."""
        from embodied.api.training import evaluate

        return evaluate(self, env, **settings)

    def save(self, folder: str | Path) -> Path:
        """`em.save(agent, folder)`: a checkpoint that `em.load` and the command line read."""
        from embodied.api.training import save

        return save(self, folder)

    @property
    @edge
    def metrics(self) -> pandas.DataFrame:
        """The curves of its run: a row for each step, a column for each metric ("eval/return")."""
        import pandas

        return pandas.DataFrame(read_metrics(self._run())).groupby("step").first()

    @edge
    def video(
        self, file: str | Path, env: EnvLike = None, seed: int = 10_000, task: str | None = None
    ) -> Path:
        """Film the episode of `seed` into `file` (MP4), `env` and `task` as in `evaluate`.
        ConfigError where the environment has no camera."""
        from embodied.api.training import evaluated_env, fitting
        from embodied.evaluation.evaluate import film
        from embodied.evaluation.video import write_mp4

        made = evaluated_env(self, env, 1)
        try:
            frames = film(fitting(self.policy, task, made.spec), made, seed)
        except NotImplementedError as error:
            raise ConfigError(f"there is nothing to film: {error}") from error
        finally:
            if made is not env:
                made.close()
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        return write_mp4(Path(file), frames, 1 / made.spec.dt)

    @edge
    def view(self, port: int = 8080, block: bool = True) -> Any:
        """Open the browser's viewer of its run, as `embodied view RUN`, until Ctrl-C. Without
        `block` it returns the viewer, which has `close()`."""
        from embodied.viewer import serve

        return serve(self._run(), port=port, block=block)

    def _run(self) -> Path:
        if self.folder is None:
            raise ConfigError("this agent belongs to no run: em.load(RUN), or em.train(...)")
        return self.folder

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


@edge
def load(
    run: str | Path,
    env: EnvLike | None = None,
    module: Any = None,
    device: str = "cpu",
    allow: str | Sequence[str] = (),
    task: str | None = None,
) -> Agent:
    """The newest policy of a run or checkpoint folder, or the one of a policy server, ready to act.

    `env`: the environment of a run that was trained on a Python object, to evaluate it; the one in
    which the policy of a server acts. `module`: what a policy was made of in Python (its torch
    module, class or function); `allow`: packages outside of this project whose classes may be
    built, and `embodied.policies.remote` for a run that steers a served policy. `task`: the
    sentence that a policy of several tasks does for good, which then acts, is evaluated and saved
    as one of a single task. CheckpointError and ConfigError are one line.

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
    saved = checkpoint.find(run)
    if module is not None:
        names = python_names(read_saved(saved / "policy.yaml"))
        if not names:
            raise ConfigError(f"the policy of {run} has no part from Python: leave module out")
        GIVEN.update(dict.fromkeys(names, module))
    policy = checkpoint.load_policy(saved, device=pick_device(device))
    policy = policy if task is None else with_task(policy, task)
    folder = saved.parent.parent
    if env is not None:
        env_words(env)  # a Python object gets its id again, by which the run knows it
    return Agent(policy, folder if (folder / "run.yaml").exists() else None)
