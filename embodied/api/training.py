"""make_policy, make_learner, save, train, evaluate, rollout, collect: the commands, from Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodied.api.agent import Agent, EnvLike, env_node, env_words, load, make_env, spec_of
from embodied.api.edge import edge
from embodied.api.words import OPTIONS, Choice, as_words, choice_words, is_network, settings_words
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, Node, build, parse, resolve
from embodied.core.device import forked
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.saved_node import read_run_settings, require_inside
from embodied.core.spec import Spec, require_same
from embodied.evaluation import evaluate as evaluation
from embodied.improvement import diagnosis, diagnosis_page
from embodied.improvement.advice import Diagnosis
from embodied.learners.acceleration import accelerate
from embodied.learners.learner import Learner, RunPlan
from embodied.policies.remote.address import is_address
from embodied.policies.wrappers.told import with_task
from embodied.training.trainer import Callback

if TYPE_CHECKING:
    from embodied.improvement.improve import Improvement
    from embodied.training.logger import Log

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
    return build(_composed([*words, "learner=imitate"])["policy"], Policy, spec=spec)


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
    node = _composed(words)["learner"]
    plan = RunPlan(total_steps, total_steps)
    return accelerate(build(node, Learner, policy=policy, spec=policy.spec, run=plan))


@edge
def save(trained: Agent | Policy | Learner, folder: str | Path) -> Path:
    """Save a policy as a checkpoint folder that `em.load` and the command line read.

        em.save(policy, "outputs/mine")

    Returns the folder.
    """
    policy = trained if isinstance(trained, Policy) else trained.policy
    return checkpoint.save(Path(folder), policy.inference_policy(), step=0)


@edge
def list_names(group: str) -> list[str]:
    """The names of a group: "env", "policy", "learner", "reward", "teacher", "experiment", ...

        em.list("learner")      # ["bresa", "calql", ...]

    ConfigError for a group that does not exist.
    """
    from embodied.compose import options, search_folders

    if not (found := options(group, search_folders())):
        raise ConfigError(f'there is no group "{group}"; embodied list says which there are')
    return [*found]


def policy_words(policy: Choice, usual: str = "deterministic") -> list[str]:
    """The words that choose a policy; a network of one's own is one in the policy `usual`."""
    if is_network(policy):
        policy = {"name": usual, "net": policy}
    return choice_words("policy", policy)


def learner_class(learner: Choice) -> type[Learner]:
    """The class of what `learner` chooses."""
    return resolve(_composed(choice_words("learner", learner))["learner"]["_target_"], Learner)


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


def _composed(words: list[str]) -> dict[str, Any]:
    """The settings of a run with `words`, whose environment does not matter."""
    from embodied.compose import compose

    return compose("train", ["env=pendulum", *words], [OPTIONS]).node


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
    if num_envs == 1 and _is_object(env) and "eval.shared" not in given:
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


@edge
def improve(
    policy: Agent | Policy | nn.Module | str | Path,
    env: EnvLike | None = None,
    out: str | Path = "outputs/improved",
    verbose: bool = True,
    **settings: Any,
) -> Improvement:
    """Improve a policy by whatever works for it: several ways race, and the best one trains on.

    `policy`: an agent, a run's folder, a policy server's address, or a torch module from flat
    observations [n, D] to [n, A] numbers. `env`: by default the run's own. `settings` are those of
    `embodied improve`: `minutes` (in all, 30), `steps`, `demos`, `ways`, `seed`. The result prints
    as one line; its `policy` is the folder of the better policy, its `rows` the final measurements.
    Call it again to go on with an interrupted one.

        result = em.improve("outputs/bc", minutes=20)
        agent = em.load(result.policy)
    """
    from embodied.commands.improve import improve as improve_words

    words = [] if env is None else env_words(env)
    given = {"out": str(out), **settings}
    asked = [*words, *settings_words(given)]
    tell = print if verbose else lambda _: None
    return improve_words(_saved(policy, env, Path(out)), asked, [str(OPTIONS)], tell)


def _saved(policy: Agent | Policy | nn.Module | str | Path, env: EnvLike | None, out: Path) -> str:
    """The folder (or address) of a policy, which is saved in `out` if it is in none."""
    if isinstance(policy, str | Path):
        return str(policy)
    if isinstance(policy, Agent) and policy.folder is not None:
        return str(policy.folder)
    if not isinstance(policy, Agent | Policy):
        if env is None:
            raise ConfigError("a torch module belongs to no environment: env=NAME")
        policy = make_policy(policy, spec_of(env, []))
    folder = out / "given"
    if not (folder / "policy.yaml").exists():
        save(policy, folder)
    return str(folder)


@edge
def evaluate(
    agent: Agent | Policy | str | Path,
    env: EnvLike | None = None,
    episodes: int = 50,
    seed: int = 10_000,
    num_envs: int = 10,
    task: str | None = None,
) -> evaluation.Evaluation:
    """Play `episodes` episodes from initial states that depend on `seed` only, without exploration.

    `agent`: also the folder of a run, or the address of a policy server. `env`: by default the one
    that the agent was trained in; a server needs it. `task`: the sentence that an agent of several
    tasks is told (None: the text that `env` shows). The result prints as one line, and has
    `success`, `returns` and `lengths` [episodes].

        print(em.evaluate("outputs/pendulum_sac-0", episodes=100))
    """
    agent, task = _loaded(agent, env, task)
    policy = agent.policy if isinstance(agent, Agent) else agent
    count = min(num_envs, episodes)
    made = evaluated_env(agent, env, count)
    try:
        policy = fitting(policy.eval(), task, made.spec)
        return evaluation.evaluate(policy, made, episodes, seed)
    finally:
        if made is not env:
            made.close()


@edge
def diagnose(
    agent: Agent | Policy | str | Path,
    env: EnvLike | None = None,
    out: str | Path | None = None,
    task: str | None = None,
    verbose: bool = True,
    **settings: Any,
) -> Diagnosis:
    """Measure what can help a policy, on tuning initial states.

    `agent`, `env`, `task` as in `evaluate`. `out`: the folder of a report. `settings` are those of
    `embodied diagnose`: `episodes`, `num_envs`, `noises`, `seed`, `execute`. The result prints as
    lines of measurements and, best first, of ways that may help.

        print(em.diagnose("outputs/bc"))
    """
    agent, task = _loaded(agent, env, task)
    policy = agent.policy if isinstance(agent, Agent) else agent
    node = _trained_node(agent) if env is None else env_node(env)
    folder = agent.folder if isinstance(agent, Agent) else None
    as_trained = None if folder is None else read_run_settings(folder / "run.yaml").get("execute")
    execute = settings.pop("execute", as_trained)
    config = parse(diagnosis.Config, settings, "diagnose")

    def made(spec: Spec) -> Policy:
        return with_task(policy, task, spec)

    found = diagnosis.diagnose(made, node, config, execute, print if verbose else lambda _: None)
    if out is not None:
        name = type(policy).__name__ if folder is None else str(folder)
        diagnosis_page.write(Path(out), name, node, config, found)
    return found.diagnosis


@edge
def rollout(
    agent: Agent | Policy,
    env: EnvLike,
    steps: int = 200,
    num_envs: int = 1,
    seed: int = 0,
    task: str | None = None,
) -> dict[str, Tensor]:
    """The transitions of `steps` steps in `num_envs` parallel envs, leaves [steps, num_envs, ...].

    `obs/*`, `action` (in [-1, 1]), `reward`, `next_obs/*` (the true successor), `terminated`,
    `truncated`, and what the environment logs (`success`). `task` as in `evaluate`.

        played = em.rollout(agent, "fr3_lift", steps=100, num_envs=8)
    """
    policy = agent.policy if isinstance(agent, Agent) else agent
    made = _several(env, num_envs)
    rows: list[dict[str, Tensor]] = []
    try:
        actor = Actor(fitting(policy.eval(), task, made.spec), made.num_envs)
        obs, first = made.reset(seed), torch.ones(made.num_envs, dtype=torch.bool)
        for _ in range(steps):
            action = actor(obs, first)
            step = made.step(action)
            row = {f"obs/{name}": value for name, value in obs.items()}
            row |= {f"next_obs/{name}": value for name, value in step.next_obs.items()}
            ends = {"terminated": step.terminated, "truncated": step.truncated}
            rows.append({**row, "action": action, "reward": step.reward, **ends, **step.log})
            obs, first = step.obs, step.ended
    finally:
        if made is not env:
            made.close()
    named = {name: value for row in rows for name, value in row.items()}  # some come late
    nothing = {name: torch.zeros_like(value) for name, value in named.items()}
    return {name: torch.stack([(nothing | row)[name] for row in rows]) for name in named}


@edge
def collect(env: EnvLike, out: str | Path, episodes: int = 50, **settings: Any) -> Path:
    """Record demonstrations of a scripted or a trained policy as a LeRobot v3 dataset.

    `settings` are those of `embodied demos collect`: `demonstrator` (default: the environment's),
    `policy` (a run), `seed`, `success_only`. Returns the folder.

        em.collect("fr3_lift", "outputs/demos", episodes=50)
    """
    from embodied.commands.demos import collect as collect_words

    named = {"out": str(out), "episodes": episodes, **settings}
    return collect_words([*env_words(env), *settings_words(named)], [str(OPTIONS)])


def _several(env: EnvLike, num_envs: int) -> VecEnv:
    return env if isinstance(env, VecEnv) else make_env(env, num_envs)


def fitting(policy: Policy, task: str | None, here: Spec) -> Policy:
    """`policy`, which does `task`, in an environment of the Spec `here`; SpecMismatch."""
    policy = with_task(policy, task, here)
    shown, seen = ({k: leaf.shape for k, leaf in s.obs.items()} for s in (here, policy.spec))
    if policy.spec.act.shape != here.act.shape or not seen.items() <= shown.items():
        require_same(here, policy.spec, "environment", "policy")
    return policy


def evaluated_env(agent: Agent | Policy, env: EnvLike | None, num_envs: int) -> VecEnv:
    """`env`, or that of the agent's run."""
    if env is None:
        return build({**_trained_node(agent), "num_envs": num_envs}, VecEnv)
    return _several(env, num_envs)


def _is_object(env: Any) -> bool:
    """Whether `env` is one Gymnasium environment, and no function that makes some."""
    return hasattr(env, "step") and not isinstance(env, type | VecEnv)


def _loaded(
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


def _trained_node(agent: Agent | Policy) -> Node:
    """The settings of the environment of an agent's run."""
    folder = agent.folder if isinstance(agent, Agent) else None
    if folder is None:
        raise ConfigError("this policy belongs to no run: give the environment, env=...")
    node = read_run_settings(folder / "run.yaml").get("env")
    if not node:
        raise ConfigError(f"{folder} was trained without an environment: give one, env=...")
    require_inside(node, folder / "run.yaml")
    return node
