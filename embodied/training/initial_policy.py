"""The policy that a run begins with, where it is not a new one for the run's environment.

It is saved in a run or a checkpoint, answered by a policy server, or made for a dataset: then in
physical units, normalised by the dataset.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node, build, kind_of, parse
from embodied.core.env import VecEnv
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.saved_node import read_saved, require_inside
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.mapping import Mapping, Statistics, measured
from embodied.nn.normalizers import MeanStdNormalizer, MinMaxNormalizer
from embodied.policies.remote.address import is_address, remote_policy
from embodied.policies.wrappers.translated import PhysicalUnits, load_mapped
from embodied.training.config import Offline, OffPolicy, RunConfig
from embodied.training.demonstrations import is_same


def finetuned_policy(config: RunConfig, env: VecEnv) -> tuple[Policy, Policy]:
    """The wrapper of `finetune` around the policy of `init`, and its trainable part."""
    assert config.finetune is not None
    if config.init is None:
        raise ConfigError("finetune needs a trained base policy: init=RUN")
    wrapper = kind_of(config.finetune, PolicyWrapper)
    whole = wrapper.wrap(load_init(config, env), config.finetune, config.policy)
    return whole, whole.trainable()


def continued_policy(config: RunConfig, env: VecEnv) -> Policy:
    """The policy of `init`, of the class and settings of `policy`, to be trained on."""
    assert config.policy is not None
    policy = load_init(config, env)
    wanted = kind_of(config.policy, Policy)
    if issubclass(wanted, PolicyWrapper):
        if type(policy) is not wanted:
            policy = wanted.wrap(policy, config.policy)
    elif config.resume is None:
        require_settings(policy, config.policy)
    return policy.train()


def load_init(config: RunConfig, env: VecEnv) -> Policy:
    """The policy of `init`: a run or checkpoint, or a policy server (ws://HOST:PORT, or a YAML). It
    keeps its normalisers, unless `data.normalize` says that a policy that goes on gets new ones."""
    assert config.init is not None
    if is_address(config.init):
        return remote_policy(config.init, env.spec, mapping_file=config.mapping)
    policy = load_mapped(config.init, env.spec, mapping_of(config, env))
    renewed = isinstance(config.data, OffPolicy) and config.data.normalize
    for part in policy.modules() if config.finetune or not renewed else ():
        if isinstance(part, MeanStdNormalizer | MinMaxNormalizer):
            part.kept = True
    return policy


def make_dataset_policy(config: RunConfig, episodes: Episodes | None) -> Policy:
    """The policy of a run without an environment, in the physical units of `episodes`."""
    assert isinstance(config.data, Offline)
    if config.policy is None or episodes is None:
        raise ConfigError("policy is not given: policy=NAME")
    if config.resume is not None:
        # Untrained: the statistics are those that the run began with.
        folder = checkpoint.find(Path(config.resume))
        node = read_saved(folder / "policy.yaml")
        require_inside(node, folder / "policy.yaml")
        return build(node, Policy, spec=episodes.spec)
    if config.init is not None:
        return saved_policy(config.init, config.policy, episodes)
    policy = physical_policy(config.policy, episodes, config.data.statistics)
    if policy.requires_base:
        raise ConfigError("this policy wraps a trained base policy: init=RUN")
    return policy


def mapping_of(config: RunConfig, env: VecEnv) -> Mapping | None:
    """The run's mapping where `init` is not of this environment."""
    if config.mapping is None or config.init is None:
        return None
    same = is_same(env.spec, checkpoint.load_spec(config.init))
    return None if same else Mapping.load(config.mapping)


def require_settings(policy: Policy, node: Node) -> None:
    """ConfigError if `node` has another class or other settings than the policy of `init`."""
    wanted, held = kind_of(node, Policy), type(policy)
    if wanted is not held:
        raise ConfigError(f"init holds a {held.__name__}, not a {wanted.__name__}: policy=NAME")
    if "config" not in signature(wanted).parameters:
        return
    kind = get_type_hints(wanted.__init__)["config"]
    asked, saved = (
        parse(kind, {k: v for k, v in each.items() if k != "_target_"}, "policy")
        for each in (node, policy.node)
    )
    for each in fields(kind):
        given, has = getattr(asked, each.name), getattr(saved, each.name)
        if given != has:
            raise ConfigError(
                f"policy.{each.name}={given} has no effect: the policy that init holds has {has}; "
                "set it to that, or train without init"
            )


PHYSICAL = f"{PhysicalUnits.__module__}.{PhysicalUnits.__qualname__}"


def physical_policy(node: Node, episodes: Episodes, statistics: Statistics) -> Policy:
    """The policy of `node` on values normalised by `statistics` of `episodes`, in physical units.
    Images, symbols, points and observations of critics are not normalised."""
    if not episodes.spec.act.is_continuous:
        return build(node, Policy, spec=episodes.spec)  # choices have no units
    action = measured(episodes.steps["action"], statistics)
    whole: dict[str, Any] = {
        "_target_": PHYSICAL,
        "base": node,
        "action": action.to_json(),
        "obs": {
            name: measured(episodes.steps[f"obs/{name}"], statistics).to_json()
            for name, leaf in episodes.spec.obs.items()
            if not (leaf.is_picture or leaf.is_symbol or leaf.is_points)
        },
        "reach": max(1.0, float(action.to_unit(episodes.steps["action"].float()).abs().max())),
    }
    return build(whole, Policy, spec=episodes.spec)


def saved_policy(path: str, node: Node, episodes: Episodes) -> Policy:
    """The policy of an earlier run without an environment, with its own statistics, to go on with.
    SpecMismatch if its dataset had other observations or actions; ConfigError if `node`, the
    configured policy, is another one."""
    policy = checkpoint.load_policy(path, episodes.spec)
    held = policy.node.get("base", policy.node)["_target_"]
    if held != node["_target_"]:
        name = str(held).rpartition(".")[2]
        raise ConfigError(f"init holds a {name}, not the configured policy: policy=NAME")
    return policy.train()
