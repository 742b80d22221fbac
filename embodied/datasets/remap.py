"""Remap: episodes of another project in the names and units of an environment, by a mapping."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from embodied.core.affine import Affine
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors, nest, under
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.mapping import (
    Mapping,
    measured,
    outside,
    require_actions,
    require_names,
    required_source,
)

MOST_OUTSIDE = 0.2
"""A larger share of actions beyond +-1 means that the range of the mapping is not the data's."""


def remapped(episodes: Episodes, here: Spec, mapping: Mapping, where: str) -> Episodes:
    """`episodes` with the observations of `here` and actions whose -1 and +1 are the mapping's.

    Nothing is clamped: actions beyond the mapping's range are beyond +-1. ConfigError, which begins
    with `where`, if something is missing, has another shape or another unit.
    """
    try:
        require_names(here, mapping)
        require_actions(here, episodes.spec, mapping)
        for name in here.obs:
            required_source(name, here, episodes.spec, mapping)
        steps = dict(episodes.steps)
        action = _action(steps["action"], mapping, here)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    seen = mapping.obs_here(under(steps, "obs"), here.obs)
    rest = {k: v for k, v in steps.items() if not k.startswith("obs/")}
    seen, final = _shaped(seen, here), _shaped(mapping.obs_here(episodes.final, here.obs), here)
    steps = {**nest(seen, "obs"), **rest, "action": action}
    return replace(episodes, spec=replace(here, text=episodes.spec.text), steps=steps, final=final)


def _action(values: Tensor, mapping: Mapping, here: Spec) -> Tensor:
    """Actions [N, *shape] in the units of here; ConfigError where most of them are beyond +-1."""
    by = mapping.action if isinstance(mapping.action, Affine) else measured(values, mapping.action)
    unit = by.to_unit(values.float()).reshape(len(values), *here.act.shape)
    if outside(unit) > MOST_OUTSIDE:
        found = measured(values, "minmax")
        low, high = ([round(n, 4) for n in numbers] for numbers in (found.low, found.high))
        raise ConfigError(
            f"{outside(unit):.0%} of the actions are beyond the mapping's action.low and "
            f"action.high, which should be the values there of -1 and +1 here; the data go from "
            f"{low} to {high}"
        )
    return unit


def _shaped(obs: Tensors, here: Spec) -> Tensors:
    """Numbers in the shape of here's leaves; pictures have it already."""
    return {
        name: value if here.obs[name].is_image else value.reshape(-1, *here.obs[name].shape)
        for name, value in obs.items()
    }
