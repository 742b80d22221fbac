"""Whether the observations and actions of two sides can be joined by a mapping, in one line.

"Here" is an environment or a robot, "there" a dataset or a policy in its own names and units.
"""

from __future__ import annotations

from collections.abc import Iterable

from embodied.core.affine import Affine
from embodied.core.build import ConfigError, nearest
from embodied.core.spec import Leaf, Spec
from embodied.datasets.mapping import Mapping


def require_names(here: Spec, mapping: Mapping) -> None:
    """ConfigError for a name of the mapping that is not an observation of `here`."""
    for name in mapping.obs:
        if name not in here.obs:
            raise ConfigError(
                f"mapping: obs.{name} is no observation here{nearest(name, here.obs)}"
            )


def require_fit(name: str, here: Spec, source: str, there: Spec) -> None:
    """ConfigError unless the observation `source` of `there` can be `name` of `here`."""
    ours, theirs = here.obs[name], there.obs[source]
    if ours.is_image and theirs.is_image and ours.shape != theirs.shape:
        height, width = theirs.shape[:2]
        raise ConfigError(
            f"mapping: obs.{name} is a picture {said(ours)} here and {source} is {said(theirs)} "
            f"there: render it as {height} x {width} here, or choose another picture"
        )
    kinds = [(leaf.is_image, leaf.is_symbol, leaf.is_points) for leaf in (ours, theirs)]
    if ours.size != theirs.size or kinds[0] != kinds[1]:
        raise ConfigError(
            f"mapping: obs.{name} is {said(ours)} here and {source} is {said(theirs)} there; write "
            f"{name}: NAME with another one (there: {listed(there)})"
        )


def require_actions(here: Spec, there: Spec, mapping: Mapping) -> None:
    """ConfigError unless actions have the same size and rate, and the mapping's range fits them."""
    ours, theirs = here.act, there.act
    names = f" ({', '.join(theirs.names)})" if theirs.names else ""
    if ours.size != theirs.size or ours.dtype != theirs.dtype:
        raise ConfigError(
            f"the action is {said(ours)} here and {said(theirs)}{names} there: no mapping can join "
            "them"
        )
    if isinstance(mapping.action, Affine) and mapping.action.size != ours.size:
        raise ConfigError(
            f"mapping: action.low and action.high should have {ours.size} numbers{names}, not "
            f"{mapping.action.size}"
        )
    if abs(here.dt - there.dt) > 1e-3 * here.dt:
        raise ConfigError(
            f"there are {1 / here.dt:g} steps a second here and {1 / there.dt:g} there, and an "
            "action would last another time: record at this rate, or set the rate here"
        )


def required_source(name: str, here: Spec, there: Spec, mapping: Mapping) -> str:
    """The observation of `there` that is `name` of `here`; ConfigError if there is none."""
    source = mapping.source(name).name
    if source not in there.obs:
        raise ConfigError(
            f"mapping: there is no {source} for {name} {said(here.obs[name])}"
            f"{nearest(source, there.obs)}; write {name}: NAME_THERE below obs"
        )
    require_fit(name, here, source, there)
    return source


def said(leaf: Leaf) -> str:
    """A leaf's type and shape: `float32[6]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def listed(spec: Spec, without: Iterable[str] = ()) -> str:
    """The observations of a spec with their types and shapes."""
    return ", ".join(f"{k} {said(v)}" for k, v in spec.obs.items() if k not in without)
