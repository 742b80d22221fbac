"""VSC-RL: where a piece ends, what it returns, the bound, and what the reference does not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors, under
from embodied.learners.on_policy.vsc_rl import VscRl, subgoal_reached
from tests.builders import make_learner
from tests.learners.test_ppo import NODES

SEEN = Leaf((2,), low=-1.0, high=1.0)
CODE = Leaf((3,), "int64", 0, (9, 8, 5), SYMBOL)
ACTION = Leaf((), "int64", 0, 3)
SPEC = Spec({"state": SEEN, "subgoal": CODE}, ACTION, dt=0.1)
NODE = NODES["categorical"]
GAMMA, LAM = 0.5, 0.8


def made(**settings: Any) -> VscRl:
    torch.manual_seed(0)
    given = {"gamma": GAMMA, "lam": LAM, "prior_weight": 0.3, "value": {"hidden": [4]}}
    policy = build(NODE, Policy, spec=SPEC)
    return make_learner("on_policy.vsc_rl.VscRl", policy, **{**given, **settings})


def batch(codes: list[int], rewards: list[float]) -> Tensors:
    """One environment: `codes` are the first numbers of the subgoals, one more than rewards."""
    steps = len(rewards)
    code = torch.tensor(codes)[:, None, None] * torch.tensor([1, 0, 0])
    state = torch.linspace(-1.0, 1.0, 2 * (steps + 1)).view(-1, 1, 2)
    return {
        "obs/state": state[:-1],
        "next_obs/state": state[1:],
        "obs/subgoal": code[:-1],
        "next_obs/subgoal": code[1:],
        "action": torch.arange(steps)[:, None] % 4,
        "reward": torch.tensor(rewards)[:, None],
        "discount": torch.full((steps, 1), GAMMA),
        "ended": torch.zeros(steps, 1, dtype=torch.bool),
        "valid": torch.ones(steps, 1, dtype=torch.bool),
    }


def test_a_piece_ends_where_its_subgoal_is_reached() -> None:
    """Another subgoal, or none, is active after it. A list that comes late reaches nothing."""
    found = subgoal_reached(batch([0, 4, 4, 6, 0], [0.0] * 4))
    assert found[:, 0].tolist() == [False, False, True, True]


def test_the_return_of_a_piece_and_the_bound_by_hand() -> None:
    """Subgoal 4 is reached in step 1, subgoal 6 not. The reference is the policy as it begins: the
    divergence is 0 and only the first term of the bound is left."""
    learner = made(subgoal_reward=2.0)
    given = batch([4, 4, 6, 6], [0.1, 0.2, 0.3])
    table, metrics = learner._table(given, {})
    with torch.no_grad():
        value = learner.value({k: v.flatten(0, 1) for k, v in under(given, "obs").items()})
        after = learner.value({k: v.flatten(0, 1) for k, v in under(given, "next_obs").items()})
    last = 0.3 + GAMMA * after[2] - value[2]
    second = 0.2 + 2.0 - value[1]  # nothing after the piece counts
    first = 0.1 + GAMMA * after[0] - value[0] + LAM * GAMMA * second
    torch.testing.assert_close(table["advantage"], torch.stack([first, second, last]))
    assert metrics["bound_reward"].item() == pytest.approx((0.1 + 2.2 + 0.3) / 3)
    assert metrics["bound"].item() == pytest.approx(metrics["bound_reward"].item())
    assert metrics["pieces"].item() == pytest.approx(1 / 3)


def test_the_bound_pays_for_the_distance_to_the_reference() -> None:
    learner = made()
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    _, metrics = learner._table(batch([4, 4, 6], [0.0, 0.0]), {})
    assert abs(metrics["prior_kl"].item()) > 1e-3
    expected = metrics["bound_reward"] - 0.3 * metrics["prior_kl"]
    assert metrics["bound"].item() == pytest.approx(expected.item())


def test_the_reference_does_not_see_the_subgoal(tmp_path: Path) -> None:
    torch.manual_seed(1)
    seen = Spec({"state": SEEN}, ACTION, dt=0.1)
    reference = build(NODE, Policy, spec=seen)
    checkpoint.save(tmp_path / "checkpoints" / "00000000", reference, 0)
    learner = made(prior=str(tmp_path))
    held: Any = learner.prior_policy
    assert list(held.spec.obs) == ["state"]
    metrics = learner._table(batch([4, 6], [0.0]), {})[1]
    assert metrics["prior_kl"].isfinite()
