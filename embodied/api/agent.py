"""Agent acts, in the units of its environment; train, load, save, evaluate, make_policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from embodied.api.environment import EnvLike, env_words, make_env, spec_of
from embodied.api.words import (
    OPTIONS,
    Choice,
    as_words,
    choice_words,
    edge,
    is_network,
    settings_words,
)
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import GIVEN, ConfigError, Node, build, resolve
from embodied.core.build import allow as allow_package
from embodied.core.device import forked, pick_device
from embodied.core.env import VecEnv
from embodied.core.native import Native
from embodied.core.policy import Policy
from embodied.core.saved_node import python_names, read_run_settings, read_saved, require_inside
from embodied.core.spec import INSTRUCTION, MASK, Spec, hidden, require_same
from embodied.core.tensors import Tensors
from embodied.evaluation import evaluate as evaluation
from embodied.evaluation.task_grid import exam
from embodied.learners.acceleration import accelerate
from embodied.learners.learner import Learner, RunPlan
from embodied.mistakes import answer
from embodied.nn.sentences import require_task
from embodied.policies.remote.address import allow_typed, is_address, remote_policy
from embodied.policies.wrappers.translated import with_task
from embodied.training.logger import newest, read_metrics
from embodied.training.trainer import Callback

if TYPE_CHECKING:
    import pandas

    from embodied.training.logger import Log


class Agent:
    """A policy with its plan of action chunks; `folder` is its run (None: it was not trained here),
    and `execute` how many steps of a chunk are executed there (None: all).

    An agent of a Gymnasium environment takes that environment's observations and returns its own
    actions. One of our environments takes observations by name and returns actions in [-1, 1].
    """

    def __init__(self, policy: Policy, folder: Path | None = None) -> None:
        self.policy, self.folder = policy.eval(), folder
        run = {} if folder is None else read_run_settings(folder / "run.yaml")
        self.execute: int | None = run.get("execute")
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
            self._actor = Actor(policy, n, self.execute)
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
        data = read_run_settings(self._run() / "run.yaml").get("data") or {}
        done = int(checkpoint.find(self._run()).name) - int(data.get("pretrain_steps") or 0)
        went_on = train(resume=str(self._run()), steps=max(done, 0) + steps, **settings)
        self.__dict__.update(vars(went_on))
        return self

    def evaluate(self, env: EnvLike | None = None, **settings: Any) -> evaluation.Evaluation:
        """`em.evaluate(agent, env, ...)`: by default in the environment of its run."""
        return evaluate(self, env, **settings)

    def save(self, folder: str | Path) -> Path:
        """`em.save(agent, folder)`: a checkpoint that `em.load` and the command line read."""
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
        from embodied.evaluation.evaluate import film
        from embodied.evaluation.video import write_mp4

        with env_for(self, env, 1) as made:
            try:
                policy = fitting(self.policy, task, made.spec)
                frames = film(policy, *exam(made, 1), seed, execute=self.execute)
            except NotImplementedError as error:
                raise ConfigError(f"there is nothing to film: {error}") from error
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


@edge
def save(trained: Agent | Policy | Learner, folder: str | Path) -> Path:
    """Save a policy as a checkpoint folder, which `em.load` and the command line read.

        em.save(policy, "outputs/mine")

    Returns the folder.
    """
    policy = trained if isinstance(trained, Policy) else trained.policy
    return checkpoint.save(Path(folder), policy.inference_policy(), step=0)


@edge
def evaluate(
    agent: Agent | Policy | str | Path,
    env: EnvLike | None = None,
    episodes: int = 50,
    seed: int = 10_000,
    num_envs: int = 10,
    task: str | None = None,
) -> evaluation.Evaluation:
    """Play `episodes` episodes from initial states that depend on `seed` only, without exploration;
    where the environment has held-out tasks, one of each of them, at most `episodes`.

    `agent`: also the folder of a run, or the address of a policy server. `env`: by default the one
    that the agent was trained in; a server needs it. `task`: the sentence that an agent of several
    tasks is told (None: the text that `env` shows). The result prints as one line, and has
    `success`, `returns` and `lengths` [episodes].

        print(em.evaluate("outputs/pendulum_sac-0", episodes=100))
    """
    agent, task = loaded(agent, env, task)
    policy, execute = parts_of(agent)
    with env_for(agent, env, min(num_envs, episodes)) as made:
        policy = fitting(policy.eval(), task, made.spec)
        return evaluation.evaluate(policy, *exam(made, episodes), seed, execute)


def parts_of(agent: Agent | Policy) -> tuple[Policy, int | None]:
    """The policy, and how many steps of its chunks are executed (None: all)."""
    return (agent.policy, agent.execute) if isinstance(agent, Agent) else (agent, None)


def fitting(policy: Policy, task: str | None, here: Spec) -> Policy:
    """`policy`, which does `task`, in an environment of the Spec `here`; SpecMismatch."""
    policy = with_task(policy, task, here)
    shown, seen = ({k: leaf.shape for k, leaf in s.obs.items()} for s in (here, policy.spec))
    if policy.spec.act.shape != here.act.shape or not seen.items() <= shown.items():
        require_same(here, policy.spec, "environment", "policy")
    return policy


@contextmanager
def env_for(agent: Agent | Policy, env: EnvLike | None, num_envs: int) -> Iterator[VecEnv]:
    """`env`, or that of the agent's run; what is made here is closed afterwards."""
    if isinstance(env, VecEnv):
        yield env
        return
    node = None if env is not None else {**trained_node(agent), "num_envs": num_envs}
    with closing(make_env(env, num_envs) if node is None else build(node, VecEnv)) as made:
        yield made


def loaded(
    agent: Agent | Policy | str | Path, env: EnvLike | None, task: str | None
) -> tuple[Agent | Policy, str | None]:
    """The agent of a run or a policy server, and the task that is not in it yet."""
    if not isinstance(agent, str | Path):
        return agent, task
    if not is_address(str(agent)):
        return load(agent), task
    if env is None:
        raise ConfigError(f"name the environment of {agent}: env=...")
    return load(agent, env, task=task), None


def trained_node(agent: Agent | Policy) -> Node:
    """The settings of the environment of an agent's run."""
    folder = agent.folder if isinstance(agent, Agent) else None
    if folder is None:
        raise ConfigError("this policy belongs to no run: give the environment, env=...")
    node = read_run_settings(folder / "run.yaml").get("env")
    if not node:
        raise ConfigError(f"{folder} was trained without an environment: give one, env=...")
    require_inside(node, folder / "run.yaml")
    return node


@dataclass(frozen=True)
class Progress:
    """What a callback gets. `agent` acts as the policy does now."""

    step: int
    metrics: dict[str, float]  # the newest value of each
    agent: Agent


def _callback(call: Callable[[Progress], object], every: int) -> Callback:
    """What calls `call` each `every` steps, and leaves the random state unchanged."""
    before = 0

    def called(step: int, log: Log, policy: Policy) -> object:
        nonlocal before
        due, before = step // every > before // every, step
        if not due:
            return None
        with forked():
            result = call(Progress(step, dict(log.last), Agent(policy, log.folder)))
        policy.train()
        return result

    return called


@edge
def train(
    *words: str,
    env: EnvLike | None = None,
    learner: Choice | None = None,
    policy: Choice | None = None,
    demos: Any = None,
    num_envs: int | None = None,
    verbose: bool = True,
    callback: Callable[[Progress], object] | None = None,
    callback_every: int = 1_000,
    **settings: Any,
) -> Agent:
    """Train, and return the trained agent; its `folder` holds checkpoints, metrics and a report.

    `words` are those of `embodied train` ("experiment=pendulum_sac"). `settings` are the same as
    keywords: `steps`, `seed`, `out`, `init`, `eval={"episodes": 50}`; and `finetune`, `reward`,
    `teacher`, ... by name, or as a mapping with `name` and settings. `policy`, `learner`, `reward`
    and `teacher` may be a class, an object or a function too. Without `policy`, the usual one of
    the learner; a torch module, or what makes one of the numbers of inputs and outputs, is the
    network in it. `demos`: folders, or arrays. `num_envs`: parallel envs. A Gymnasium object is
    stepped itself, and further envs are copies of it; with `num_envs=1` it is evaluated in too, so
    that there is one of it in all. `callback(progress)` is called each `callback_every` steps
    (`Progress`); returning False ends the training. Ctrl-C saves; `resume=FOLDER` continues.

        agent = em.train(env="Pendulum-v1", learner="sac", steps=10_000)
        agent = em.train("experiment=fr3_lift_dsrl", init="outputs/bc", seed=1)
    """
    from embodied.commands.train import train as train_words

    for word in words:
        if "=" not in str(word):
            raise ConfigError(f"{word!r} is no key=value: em.train(env=..., learner=..., steps=N)")
    asked = [*words, *([] if env is None else env_words(env))]
    asked += [] if num_envs is None else [f"env.num_envs={num_envs}"]
    asked += [] if learner is None else choice_words("learner", learner)
    allowed = [word for word in words if word.startswith("allow=")]
    spec = None if env is None else partial(spec_of, env, allowed)
    named = any(word.startswith(("env=", "experiment=", "policy=")) for word in words)
    chosen = "finetune" in settings or (env is None and (named or demos is None))
    asked += _policy_words(policy, learner, spec, chosen)
    if demos is not None:
        settings["demos"] = _demo_folders(
            demos, learner, spec, Path(settings.get("out", "outputs"))
        )
    asked += settings_words(settings)
    given = {word.partition("=")[0] for word in asked}
    if not {"experiment", "resume", "eval.episodes"} & given:
        asked += ["eval.episodes=20"]
        asked += [] if "eval.num_envs" in given else ["eval.num_envs=10"]
    is_object = hasattr(env, "step") and not isinstance(env, type | VecEnv)
    if num_envs == 1 and is_object and "eval.shared" not in given:
        asked += ["eval.num_envs=1", "eval.shared=true"]
    called = None if callback is None else _callback(callback, max(callback_every, 1))
    return load(train_words(asked, [str(OPTIONS)], verbose=verbose, callback=called))


def _policy_words(
    policy: Any, learner: Any, spec: Callable[[], Spec] | None, chosen: bool
) -> list[str]:
    """The words that choose the policy; by default (not `chosen` elsewhere) the learner's usual."""
    if isinstance(learner, Learner) and policy is None:
        policy = learner.policy
    if isinstance(policy, Policy) and spec is not None:
        require_same(spec(), policy.spec, "environment", "policy")
    usual = ""
    if learner is not None and not chosen and (policy is None or is_network(policy)):
        usual = usual_policy(learner, None if spec is None else spec())
    if policy is None:
        return [f"policy={usual}"] if usual else []
    # A network that imitates is one of observations, not of noise.
    return policy_words(policy, "deterministic" if usual in ("", "flow") else usual)


def _demo_folders(demos: Any, learner: Any, spec: Callable[[], Spec] | None, out: Path) -> Any:
    """The folders of datasets; arrays become one below `out`."""
    from embodied.api.arrays import write_episodes

    each = demos if isinstance(demos, list | tuple) else [demos]
    if all(isinstance(one, str | Path) for one in each):
        return demos
    imitates = learner is not None and learner_class(learner).imitates()
    return write_episodes(demos, spec and spec(), out, needs_reward=not imitates)


DISCRETE = {
    "flow": "categorical",
    "diagonal_gaussian": "categorical",
    "recurrent": "recurrent_categorical",
}
"""The policy for discrete actions in place of the one that is usual with a learner."""


@edge
def make_policy(policy: Choice | nn.Module, env: VecEnv | Spec, **settings: Any) -> Policy:
    """A new policy for the observations and actions of `env`.

    `policy`: a name (`em.list("policy")`), or a torch module that maps flat observations [n, D] to
    [n, A] numbers, which a tanh bounds. ConfigError for an unknown name or setting.

        policy = em.make_policy("flow", env, chunk=8)
    """
    spec = env if isinstance(env, Spec) else env.spec
    words = [*policy_words(policy), *as_words("policy", settings)]
    return build(composed([*words, "learner=imitate"])["policy"], Policy, spec=spec)


@edge
def make_learner(
    learner: Choice, policy: Policy, total_steps: int = 100_000, **settings: Any
) -> Learner:
    """A learner that trains `policy`: `learner.update(batch)` makes one update.

    `batch`: transitions as tensors [n, ...] by name ("obs/state", "action" in [-1, 1], "reward",
    "next_obs/state", ...); an update returns its metrics. `total_steps` is the length of the
    training in environment steps, for learning-rate schedules.

        learner = em.make_learner("imitate", policy, lr=1e-4)
    """
    words = [*choice_words("learner", learner), *as_words("learner", settings)]
    node = composed(words)["learner"]
    plan = RunPlan(total_steps, total_steps)
    return accelerate(build(node, Learner, policy=policy, spec=policy.spec, run=plan))


def policy_words(policy: Choice, usual: str = "deterministic") -> list[str]:
    """The words that choose a policy; a network of one's own is one in the policy `usual`."""
    if is_network(policy):
        policy = {"name": usual, "net": policy}
    return choice_words("policy", policy)


def learner_class(learner: Choice) -> type[Learner]:
    """The class of what `learner` chooses."""
    return resolve(composed(choice_words("learner", learner))["learner"]["_target_"], Learner)


def usual_policy(learner: Choice, spec: Spec | None) -> str:
    """The usual policy of `learner` for the actions of `spec`; ConfigError if it has none."""
    kind = learner_class(learner)
    discrete = spec is not None and not spec.act.is_continuous
    usual = kind.usual_policy
    if name := DISCRETE.get(usual) if discrete else usual:
        return name
    if discrete and usual:
        raise ConfigError(
            f"{kind.__name__} needs continuous actions, and this environment's are discrete: "
            'learner="ppo" takes both'
        )
    raise ConfigError(f"{kind.__name__} has no usual policy: policy=NAME (em.list('policy'))")


def composed(words: list[str]) -> dict[str, Any]:
    """The settings of a run with `words`, whose environment does not matter."""
    from embodied.compose import compose

    return compose("train", ["env=pendulum", *words], [OPTIONS]).node
