"""The other commands from Python: list, improve, diagnose, rollout, collect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodied.api.agent import (
    Agent,
    env_for,
    fitting,
    loaded,
    make_policy,
    parts_of,
    save,
    trained_node,
)
from embodied.api.environment import EnvLike, env_node, env_words, spec_of
from embodied.api.words import OPTIONS, edge, settings_words
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, parse
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.improvement import diagnosis, pages
from embodied.improvement.advice import Diagnosis
from embodied.policies.wrappers.translated import with_task

if TYPE_CHECKING:
    from embodied.improvement.improve import Improvement


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
    agent, task = loaded(agent, env, task)
    policy, as_trained = parts_of(agent)
    node = trained_node(agent) if env is None else env_node(env)
    folder = agent.folder if isinstance(agent, Agent) else None
    execute = settings.pop("execute", as_trained)
    config = parse(diagnosis.Config, settings, "diagnose")

    def made(spec: Spec) -> Policy:
        return with_task(policy, task, spec)

    found = diagnosis.diagnose(made, node, config, execute, print if verbose else lambda _: None)
    if out is not None:
        name = type(policy).__name__ if folder is None else str(folder)
        pages.write_diagnosis(Path(out), name, node, config, found)
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
    policy, execute = parts_of(agent)
    rows: list[dict[str, Tensor]] = []
    with env_for(policy, env, num_envs) as made:
        actor = Actor(fitting(policy.eval(), task, made.spec), made.num_envs, execute)
        obs, first = made.reset(seed), torch.ones(made.num_envs, dtype=torch.bool)
        for _ in range(steps):
            action = actor(obs, first)
            step = made.step(action)
            row = {f"obs/{name}": value for name, value in obs.items()}
            row |= {f"next_obs/{name}": value for name, value in step.next_obs.items()}
            ends = {"terminated": step.terminated, "truncated": step.truncated}
            rows.append({**row, "action": action, "reward": step.reward, **ends, **step.log})
            obs, first = step.obs, step.ended
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
