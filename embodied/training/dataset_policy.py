"""The policy of a run without an environment: in physical units, normalised by the dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node, build
from embodied.core.policy import Policy
from embodied.core.saved_node import read_saved, require_inside
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.mapping import Statistics, measured, reach
from embodied.policies.wrappers.physical_units import PhysicalUnits

PHYSICAL = f"{PhysicalUnits.__module__}.{PhysicalUnits.__qualname__}"


def physical_policy(node: Node, episodes: Episodes, statistics: Statistics) -> Policy:
    """The policy of `node` on values normalised by `statistics` of `episodes`, in physical units.

    Images, symbols, points and observations of critics are not normalised.
    """
    if episodes.spec.act.dtype != "float32":
        return build(node, Policy, spec=episodes.spec)  # discrete actions have no units
    action = measured(episodes.steps["action"], statistics)
    whole: dict[str, Any] = {
        "_target_": PHYSICAL,
        "base": node,
        "action": action.to_json(),
        "obs": {
            name: measured(episodes.steps[f"obs/{name}"], statistics).to_json()
            for name, leaf in episodes.spec.obs.items()
            if not (leaf.is_image or leaf.is_symbol or leaf.is_points)
        },
        "reach": max(1.0, reach(episodes.steps["action"], action)),
    }
    return build(whole, Policy, spec=episodes.spec)


def saved_policy(path: str, node: Node, episodes: Episodes) -> Policy:
    """The policy of an earlier run without an environment, with its own statistics, to go on with.

    SpecMismatch if its dataset had other observations or actions; ConfigError if `node`, the
    configured policy, is another one.
    """
    policy = checkpoint.load_policy(path, episodes.spec)
    held = policy.node.get("base", policy.node)["_target_"]
    if held != node["_target_"]:
        name = str(held).rpartition(".")[2]
        raise ConfigError(f"init holds a {name}, not the configured policy: policy=NAME")
    return policy.train()


def resumed_policy(path: str, episodes: Episodes) -> Policy:
    """The untrained policy of an interrupted run: the statistics are those that it began with."""
    folder = checkpoint.find(Path(path))
    node = read_saved(folder / "policy.yaml")
    require_inside(node, folder / "policy.yaml")
    return build(node, Policy, spec=episodes.spec)
