"""The settings of learners: nonsense is outside of their bounds, what the options use is inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from embodied.core.bounds import Bound
from embodied.core.build import resolve
from embodied.learners.learner import Learner
from tests.contract.test_learner import LEARNERS, node

NONSENSE = [
    ("sac", "gamma", 99.0),
    ("sac", "actor_lr", -1.0),
    ("sac", "tau", 5.0),
    ("sac", "hidden", 0),
    ("sac", "utd", 0),
    ("td3", "policy_delay", 0),
    ("td3", "target_delay", 0),
    ("dsac_t", "delay", 0),
    ("flashsac", "atoms", 1),
    ("dsrl_na", "distil", 0),
    ("dsrl_na", "actor_share", 1.5),
    ("iql", "expectile", 0.0),
    ("iql", "expectile", 1.0),
    ("bresa", "violation_fraction", 1.0),
    ("bresa", "risk_gamma", 0.0),
    ("bresa", "violation_buffer", 7),
    ("ppo", "lam", 1.5),
    ("ppo_rapid", "size", 0),
    ("ppo_rapid", "bc_steps", -1),
    ("ppo_rapid", "weights", -0.1),
    ("reinflow", "hold", 1.0),
]


def hints(stem: str) -> dict[str, Any]:
    """The types of a learner's settings, with their bounds."""
    kind: Any = resolve(node("learner", stem)["_target_"], Learner)
    config = get_type_hints(kind.__init__)["config"]
    return get_type_hints(config, include_extras=True)


def bounds(hint: Any) -> Iterator[Bound]:
    """The bounds anywhere in a type."""
    for part in get_args(hint):
        if isinstance(part, Bound):
            yield part
        else:
            yield from bounds(part)


@pytest.mark.parametrize(("stem", "setting", "value"), NONSENSE)
def test_nonsense_is_outside(stem: str, setting: str, value: float) -> None:
    found = list(bounds(hints(stem)[setting]))
    assert found and not any(bound.holds(value) for bound in found)


@pytest.mark.parametrize("stem", LEARNERS)
def test_what_an_option_sets_is_inside(stem: str) -> None:
    known = hints(stem)
    for setting, value in node("learner", stem).items():
        numbers = value if isinstance(value, list) else [value]
        for bound in bounds(known.get(setting)):
            assert all(bound.holds(float(number)) for number in numbers), setting
