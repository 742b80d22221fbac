"""train, evaluate, rollout, collect: what the command line does, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.api.agent import Agent, load
from embodied.api.environments import EnvLike, as_words, env_node, env_words, make_env
from embodied.api.parts import OPTIONS, Choice, choice_words, policy_words, usual_policy
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.saved_node import read_run_settings, require_inside
from embodied.evaluation import evaluate as evaluation

GROUPS = ("finetune", "reward", "teacher", "replay", "weighting", "demonstrator")
"""Settings that are chosen by name."""


def train(
    *words: str,
    env: EnvLike | None = None,
    learner: Choice | None = None,
    policy: Choice | nn.Module | None = None,
    verbose: bool = True,
    **settings: Any,
) -> Agent:
    """Train, and return the trained agent; its `folder` holds checkpoints, metrics and a report.

    `words` are those of `embodied train` ("experiment=pendulum_sac"). `settings` are the same as
    keywords: `steps`, `seed`, `out`, `demos`, `init`, `eval={"episodes": 50}`; and `finetune`,
    `reward`, `teacher`, ... by name, or as a mapping with `name` and settings. Without `policy`,
    the usual one of the learner. Ctrl-C saves; `em.train(resume=FOLDER)` continues.

        agent = em.train(env="Pendulum-v1", learner="sac", steps=10_000)
        agent = em.train("experiment=fr3_lift_dsrl", init="outputs/bc", seed=1)
    """
    from embodied.commands.train import train as train_words

    asked = [*words]
    if env is not None:
        asked += env_words(env)
    if learner is not None:
        asked += choice_words("learner", learner)
    if policy is None and env is not None and learner is not None and "finetune" not in settings:
        allowed = [word for word in words if word.startswith("allow=")]
        policy = usual_policy(learner, _spec_of(env, allowed))
    if policy is not None:
        asked += policy_words(policy)
    asked += _settings_words(settings)
    if not {"experiment", "resume", "eval.episodes"} & {word.partition("=")[0] for word in asked}:
        asked += ["eval.episodes=20", "eval.num_envs=10"]
    folder = train_words(asked, [str(OPTIONS)], verbose=verbose)
    return load(folder)


def evaluate(
    agent: Agent | Policy | str | Path,
    env: EnvLike | None = None,
    episodes: int = 50,
    seed: int = 10_000,
    num_envs: int = 10,
) -> evaluation.Evaluation:
    """Play `episodes` episodes from initial states that depend on `seed` only, without exploration.

    `env`: by default the one that the agent was trained in. The result prints as one line, and has
    `success`, `returns` and `lengths` [episodes].

        print(em.evaluate("outputs/pendulum_sac-0", episodes=100))
    """
    agent = load(agent) if isinstance(agent, str | Path) else agent
    policy = agent.policy if isinstance(agent, Agent) else agent
    count = min(num_envs, episodes)
    made = _trained_env(agent, count) if env is None else _several(env, count)
    try:
        return evaluation.evaluate(policy.eval(), made, episodes, seed)
    finally:
        if made is not env:
            made.close()


def rollout(
    agent: Agent | Policy, env: EnvLike, steps: int = 200, num_envs: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """The transitions of `steps` steps in `num_envs` parallel envs, leaves [steps, num_envs, ...].

    `obs/*`, `action` (in [-1, 1]), `reward`, `next_obs/*` (the true successor), `terminated`,
    `truncated`, and what the environment logs (`success`).

        played = em.rollout(agent, "fr3_lift", steps=100, num_envs=8)
    """
    policy = agent.policy if isinstance(agent, Agent) else agent
    made = _several(env, num_envs)
    actor = Actor(policy.eval(), made.num_envs)
    obs, first = made.reset(seed), torch.ones(made.num_envs, dtype=torch.bool)
    rows: list[dict[str, Tensor]] = []
    for _ in range(steps):
        action = actor(obs, first)
        step = made.step(action)
        row = {f"obs/{name}": value for name, value in obs.items()}
        row |= {f"next_obs/{name}": value for name, value in step.next_obs.items()}
        ends = {"terminated": step.terminated, "truncated": step.truncated}
        rows.append({**row, "action": action, "reward": step.reward, **ends, **step.log})
        obs, first = step.obs, step.ended
    if made is not env:
        made.close()
    return {name: torch.stack([row[name] for row in rows]) for name in rows[-1]}


def collect(env: EnvLike, out: str | Path, episodes: int = 50, **settings: Any) -> Path:
    """Record demonstrations of a scripted or a trained policy as a LeRobot v3 dataset.

    `settings` are those of `embodied demos collect`: `demonstrator` (default: the environment's),
    `policy` (a run), `seed`, `success_only`. Returns the folder.

        em.collect("fr3_lift", "outputs/demos", episodes=50)
    """
    from embodied.commands.demos import collect as collect_words

    named = {"out": str(out), "episodes": episodes, **settings}
    return collect_words([*env_words(env), *_settings_words(named)])


def _settings_words(settings: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for key, value in settings.items():
        chosen = key in GROUPS and isinstance(value, str | Mapping)
        words += choice_words(key, value) if chosen else as_words("", {key: value})
    return words


def _several(env: EnvLike, num_envs: int) -> VecEnv:
    return env if isinstance(env, VecEnv) else make_env(env, num_envs)


def _spec_of(env: EnvLike, allowed: list[str]) -> Any:
    if isinstance(env, VecEnv):
        return env.spec
    made = build(env_node(env, allowed, num_envs=1), VecEnv)
    made.close()
    return made.spec


def _trained_env(agent: Agent | Policy, num_envs: int) -> VecEnv:
    """The environment of an agent's run."""
    folder = agent.folder if isinstance(agent, Agent) else None
    if folder is None:
        raise ConfigError("this policy belongs to no run: give the environment, env=...")
    node = read_run_settings(folder / "run.yaml")["env"]
    require_inside(node, folder / "run.yaml")
    return build({**node, "num_envs": num_envs}, VecEnv)
