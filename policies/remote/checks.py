"""Checks of a policy server, made when a `RemotePolicy` is built: one line for each mistake."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied.core.build import ConfigError, nearest
from embodied.core.device import forked
from embodied.core.files import MALFORMED, reading
from embodied.core.policy import Policy
from embodied.core.spec import INSTRUCTION, Leaf, Spec, SpecMismatch, hidden, require_same
from embodied.core.tensors import Tensors
from embodied.datasets.mapping import Mapping as NamesAndUnits
from embodied.nn.sentences import require_task
from embodied.policies.remote.translation import Translation
from embodied.serve.protocol import Offer

BEYOND = 1.5  # an action of this size is in other units than [-1, 1]
SEED = 0


def require_policy(offer: Offer, wanted: str | None, url: str) -> None:
    """ConfigError if another policy is served than the one with the hash `wanted`."""
    if wanted is not None and offer.policy != wanted:
        found = "one without a hash" if offer.policy is None else f"{offer.policy[:12]}..."
        raise ConfigError(
            f"{url} serves another policy ({found}) than this run was trained with "
            f"({wanted[:12]}...): serve that one, or start a new run"
        )


def served_spec(offer: Offer, url: str) -> Spec | None:
    """The spec that a server says; None if it says none. FileError for one that is none."""
    with reading(f"what {url} says of its policy", *MALFORMED):
        return None if offer.spec is None else Spec.from_json(offer.spec)


def require_fit(
    spec: Spec | None, served: Spec | None, mapping: Mapping[str, Any] | None, url: str
) -> Spec:
    """The spec of the policy here; ConfigError or SpecMismatch if the served one does not fit."""
    if spec is None and served is None:
        raise ConfigError(
            f"{url} does not say what its policy observes: add spec: to its YAML file "
            "(docs/remote.md, a server of another project)"
        )
    if spec is None or served is None:
        found = served if spec is None else spec
        assert found is not None
        return found
    _require_units(spec, served, mapping, url)
    if mapping is None:
        try:
            require_same(spec, served, "environment", f"policy server {url}", any_order=True)
        except SpecMismatch as error:
            raise SpecMismatch(f"{error}; mapping=FILE names what belongs together") from error
    else:
        _require_mapped(spec, served, mapping, url)
    return spec


def told(served: Spec, prompt: str | None, url: str) -> Spec:
    """The served spec without `instruction`, which the `prompt` stands for; ConfigError
    where there is none, or one that the policy never saw."""
    try:
        require_task(served, prompt, "policy.prompt")
    except ConfigError as error:
        raise ConfigError(f"{url}: {error}") from error
    obs = {name: leaf for name, leaf in served.obs.items() if name != INSTRUCTION}
    return replace(served, obs=obs)


def _require_units(spec: Spec, served: Spec, mapping: Mapping[str, Any] | None, url: str) -> None:
    """ConfigError where both sides name a unit and they differ, and no mapping converts them."""
    parsed = NamesAndUnits() if mapping is None else NamesAndUnits.parse(mapping, "policy.mapping")
    pairs = [(name, leaf, parsed.source(name)) for name, leaf in spec.obs.items()]
    for name, leaf, source in pairs:
        there = served.obs.get(source.name)
        if there is not None and source.same_units and _differ(leaf, there):
            raise ConfigError(
                f"{name} is in {leaf.unit} here and in {there.unit} at {url}: "
                f"policy.mapping.obs.{name}={{name: {source.name}, scale: FACTOR}}"
            )
    if _differ(spec.act, served.act) and isinstance(parsed.action, str):
        raise ConfigError(
            f"actions are in {spec.act.unit} here and in {served.act.unit} at {url}: "
            "policy.mapping.action={low: [...], high: [...]}, the values there of -1 and +1 here"
        )


def _differ(here: Leaf, there: Leaf) -> bool:
    return bool(here.unit and there.unit and here.unit != there.unit)


def _require_mapped(spec: Spec, served: Spec, mapping: Mapping[str, Any], url: str) -> None:
    """SpecMismatch where shapes of mapped observations, the action or the control period differ."""
    for name, (there, _) in Translation.of(spec, mapping, None).sources.items():
        leaf = served.obs.get(there)
        if leaf is None:
            known = nearest(there, served.obs)
            raise ConfigError(f"the policy at {url} has no observation {there}{known}")
        here = spec.obs[name]
        if (leaf.shape, leaf.dtype) != (here.shape, here.dtype):
            raise SpecMismatch(
                f"{name} is {here.dtype}{list(here.shape)} here, and {there} is "
                f"{leaf.dtype}{list(leaf.shape)} at {url}"
            )
    if served.act.shape != spec.act.shape:
        raise SpecMismatch(
            f"an action is {list(spec.act.shape)} here and {list(served.act.shape)} at {url}"
        )
    if not math.isclose(served.dt, spec.dt, rel_tol=1e-6):
        raise SpecMismatch(
            f"the control period is {spec.dt:g} s here and {served.dt:g} s at {url}: serve a "
            f"policy for this one (scripts/serve_lerobot.py --fps {1 / spec.dt:g})"
        )


def require_actions(actions: Tensor, spec: Spec, translation: Translation, url: str) -> None:
    """ConfigError if the first answer of a server holds no actions of this spec, in its units."""
    shape = list(actions.shape[2:])
    if actions.ndim < 2 or shape != list(spec.act.shape) or not actions.isfinite().all():
        raise ConfigError(f"{url} sends actions of {shape} numbers, and {list(spec.act.shape)} fit")
    if spec.act.dtype != "float32" or spec.act.low != -1.0 or spec.act.high != 1.0:
        return
    largest = float(translation.actions(actions).abs().max())
    if largest > BEYOND:
        raise ConfigError(
            f"{url} sends actions as large as {largest:.3g}, and they should be in [-1, 1]: "
            "policy.mapping.action={low: [...], high: [...]}, the values there of -1 and +1 here"
        )


def require_noise(policy: Policy, shape: tuple[int, ...], obs: Tensors, url: str) -> None:
    """ConfigError unless equal noise [1, *shape] gives equal chunks of `policy`, and other noise
    others."""
    cure = (
        "put embodied/serve/openpi_wrapper.py around the policy on the server, or learn a "
        "correction of its actions (finetune=residual)"
    )
    if not math.prod(shape):
        raise ConfigError(f"{url} does not offer the noise of its policy: {cure}")
    first, other = torch.randn(2, 1, *shape, generator=torch.Generator().manual_seed(SEED))
    said = [policy.act(obs, policy.initial(1), noise)[0] for noise in (first, first, other)]
    if not torch.equal(said[0], said[1]):
        raise ConfigError(f"{url} ignores the noise (equal noise gave two chunks): {cure}")
    if torch.equal(said[0], said[2]):
        raise ConfigError(
            f"the policy at {url} does not depend on its noise: finetune=residual corrects its "
            "actions"
        )


FIXED = 3  # observations of a fingerprint
NEAR = 0.01  # of the largest answer: what other kernels and precisions may change


def fixed_request(policy: Policy) -> tuple[Tensors, Tensor]:
    """The observations and noises of a fingerprint, always the same."""
    with forked(SEED):
        obs = {name: leaf.sample(FIXED) for name, leaf in visible(policy.spec).items()}
        return obs, policy.sample_noise(FIXED)


def fingerprint(actions: Tensor) -> list[float]:
    """The first and last actions of `actions` [n, chunk, *shape], rounded."""
    ends = actions[:, (0, -1)].flatten().float()
    return [float(f"{value:.6g}") for value in ends.tolist()]


def require_fingerprint(found: Sequence[float] | None, wanted: Sequence[float], url: str) -> None:
    """ConfigError if a server with the fingerprint `found` is not that with `wanted`."""
    if found is None or not alike(torch.tensor(found), torch.tensor(wanted)):
        raise ConfigError(
            f"{url} serves another policy than this run was trained with: its answers to "
            f"{FIXED} fixed observations are others. Serve that one, or start a new run"
        )


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether two answers are those of one policy."""
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= NEAR * _size(expected)
    )


def _size(actions: Tensor) -> float:
    return max(float(actions.abs().max()), 1e-3)


def visible(spec: Spec) -> dict[str, Leaf]:
    """The observations that a policy acts on."""
    return {name: leaf for name, leaf in spec.obs.items() if not hidden(name)}


def within(leaf: Leaf) -> Tensor:
    """A value [1, *shape] of `leaf` inside its bounds, nearest to 0."""
    value = leaf.zeros(1)
    for bound, inside in ((leaf.low, torch.maximum), (leaf.high, torch.minimum)):
        if bound is not None:
            edge = torch.tensor(bound, dtype=value.dtype)
            value = inside(value, edge.view(1, *leaf.shape) if edge.ndim else edge)
    return value
