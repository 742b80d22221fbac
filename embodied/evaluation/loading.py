"""Policies of checkpoints as an evaluation asks for them: with other settings, inside a wrapper,
with the names and units of an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node, kind_of
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Spec
from embodied.datasets.mapping import Mapping
from embodied.learners.learner import load_learner
from embodied.policies.wrappers.translated import joined, with_task


class NoCritic(ConfigError):
    """A wrapper needs a critic, and the run was not trained."""


def trained_with(saved: Path, named: bool = False) -> Node:
    """The run.yaml of the run that a checkpoint is in; it may be missing if env= is `named`."""
    file = saved.parent.parent / "run.yaml"
    if file.exists():
        return read_run_settings(file)
    if named:
        return {}
    raise ConfigError(f"{file} is missing; name the environment of {saved}: env=NAME")


def fitted(saved: Path, spec: Spec, mapping: Mapping | None, node: Node, trained: Node) -> Policy:
    """The policy of a checkpoint for an environment with `spec`, as `node["policy"]` asks for it,
    told to do `node["task"]` where it has several."""
    policy, asked = checkpoint.load_policy(saved), node["policy"]
    other_settings = kind_of(asked, Policy) is type(policy)
    if other_settings:  # before the mapping
        policy = asked_for(policy, asked, saved, trained)
    policy = joined(with_task(policy, node["task"], spec), spec, mapping, saved)
    return policy if other_settings else asked_for(policy, asked, saved, trained)


def asked_for(policy: Policy, node: Node, saved: Path, trained: Node) -> Policy:
    """The policy to evaluate, by `node`: as trained, with other settings (such as the steps of a
    sampler), or inside a wrapper such as best_of_n, which may use the run's critic."""
    kind: Any = kind_of(node, Policy)
    if type(policy) is kind:
        return checkpoint.with_settings(policy, node, saved)
    if not issubclass(kind, PolicyWrapper) or not kind.for_evaluation:
        raise ConfigError(
            f"{kind.__name__} cannot be evaluated with the weights of a {type(policy).__name__} "
            f"({saved}); leave policy out"
        )
    wrap: Any = kind.wrap
    critic = {"critic": critic_of(saved, trained, policy)} if kind.requires_critic else {}
    return wrap(policy, node, **critic).eval()


def critic_of(saved: Path, trained: Node, policy: Policy) -> nn.Module:
    if trained.get("learner") is None:
        raise NoCritic(f"{saved.parent.parent} has no learner, and so no critic to choose actions")
    learner = load_learner(saved, trained, policy)
    critic = getattr(learner, "critic", None)
    if critic is None or not hasattr(critic, "each") or critic.out != 1:
        raise ConfigError(f"{type(learner).__name__} ({saved}) has no critic to choose actions")
    return critic
