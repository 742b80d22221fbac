"""A task of one step with two good actions, critics of known values, and what an update moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import UNPLANNED, RunPlan
from tests.builders import SPEC, make_learner, make_policy, still


def learner_of(
    target: str,
    acting: str,
    spec: Spec = SPEC,
    run: RunPlan = UNPLANNED,
    shape: Mapping[str, Any] = MappingProxyType({"hidden": [32]}),
    **settings: Any,
) -> Any:
    """`embodied.learners.TARGET` with `settings` of the policy ACTING with the settings `shape`."""
    return make_learner(target, make_policy(acting, spec, **shape), run, **settings)


def two_modes(n: int) -> Tensors:
    """`n` transitions with actions near -0.5 and 0.5, as often; the latter have the reward 1."""
    side = (torch.rand(n) > 0.5).float() * 2 - 1
    action = (0.5 * side + 0.05 * torch.randn(n))[:, None]
    zeros = torch.zeros(n, 1)
    return still(zeros, action, (action[:, 0] > 0).float())


@torch.no_grad()
def constant(ensemble: Any, values: Tensor | Sequence[float]) -> None:
    """Make member i answer values[i] everywhere: a number, or a row of logits."""
    for parameter in ensemble.parameters():
        parameter.zero_()
    given = torch.as_tensor(values)
    ensemble.biases[-1].copy_(given.view(len(given), 1, -1))


@torch.no_grad()
def slopes(critic: Any, values: list[float], at: int = -1, base: float = 0.0) -> None:
    """Make linear critic i answer base + values[i] * x, of the element `at` of its input."""
    constant(critic.ensemble, [base] * len(values))
    critic.ensemble.weights[0][:, at, 0] = torch.tensor(values)


def copies(weights: Iterable[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def moved(before: Iterable[Tensor], now: Iterable[Tensor]) -> list[bool]:
    """Which weights are not what they were."""
    return [not torch.equal(old, new) for old, new in zip(before, now, strict=True)]


def require_average(
    average: Iterable[Tensor], old: Iterable[Tensor], new: Iterable[Tensor], tau: float
) -> None:
    """Fail unless the averages moved from `old` to the weights `new` by `tau`."""
    for found, before, weight in zip(average, old, new, strict=True):
        torch.testing.assert_close(found.detach(), (1 - tau) * before + tau * weight.detach())
