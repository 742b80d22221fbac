"""make_policy, make_learner, save: the parts of a training, built by name or from your own code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from embodied.api.agent import Agent
from embodied.api.environments import as_words
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build, resolve
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.learners.acceleration import accelerate
from embodied.learners.learner import Learner, RunPlan

OPTIONS = Path(__file__).parent / "options"
"""YAML of options that only Python can choose."""

DISCRETE = {
    "flow": "categorical",
    "diagonal_gaussian": "categorical",
    "recurrent": "recurrent_categorical",
}
"""The policy for discrete actions in place of the one that is usual with a learner."""

Choice: TypeAlias = str | Mapping[str, Any]
"""The name of an option ("sac"), or a mapping with its `name` and settings."""


def make_policy(policy: Choice | nn.Module, env: VecEnv | Spec, **settings: Any) -> Policy:
    """A new policy for the observations and actions of `env`.

    `policy`: a name (`em.list("policy")`), or a torch module that maps flat observations [n, D] to
    [n, A] numbers, which a tanh bounds. ConfigError for an unknown name or setting.

        policy = em.make_policy("flow", env, chunk=8)
    """
    spec = env if isinstance(env, Spec) else env.spec
    words = [*policy_words(policy), *as_words("policy", settings)]
    return build(_composed([*words, "learner=imitate"])["policy"], Policy, spec=spec)


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


def save(trained: Agent | Policy | Learner, folder: str | Path) -> Path:
    """Save a policy as a checkpoint folder that `em.load` and the command line read.

        em.save(policy, "outputs/mine")

    Returns the folder.
    """
    policy = trained if isinstance(trained, Policy) else trained.policy
    return checkpoint.save(Path(folder), policy.inference_policy(), step=0)


def list_names(group: str) -> list[str]:
    """The names of a group: "env", "policy", "learner", "reward", "teacher", "experiment", ...

        em.list("learner")      # ["bresa", "calql", ...]

    ConfigError for a group that does not exist.
    """
    from embodied.compose import options, search_folders

    if not (found := options(group, search_folders())):
        raise ConfigError(f'there is no group "{group}"; embodied list says which there are')
    return [*found]


def choice_words(group: str, chosen: Choice) -> list[str]:
    """The words of a command line that choose an option of `group` and its settings."""
    if isinstance(chosen, str):
        return [f"{group}={chosen}"]
    if "name" not in chosen:
        raise ConfigError(f'{group} needs a name: {group}={{"name": NAME, ...}}')
    rest = {key: value for key, value in chosen.items() if key != "name"}
    return [f"{group}={chosen['name']}", *as_words(group, rest)]


def policy_words(policy: Choice | nn.Module) -> list[str]:
    """The words that choose a policy; a torch module is registered in this process."""
    if not isinstance(policy, nn.Module):
        return choice_words("policy", policy)
    from embodied.policies import user_module

    return ["policy=user_module", f"policy.module={user_module.register(policy)}"]


def usual_policy(learner: Choice, spec: Spec) -> str:
    """The usual policy of `learner` for the actions of `spec`; ConfigError if it has none."""
    node = _composed(choice_words("learner", learner))["learner"]
    kind = resolve(node["_target_"], Learner)
    discrete = spec.act.dtype != "float32"
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
