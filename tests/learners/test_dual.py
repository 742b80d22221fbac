"""f-DVL and ReCOIL: what their values are, exactly, and which way they lead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.learner import RunPlan
from embodied.learners.offline.f_dvl import Divergence, dual_loss, reverse_kl_loss
from embodied.learners.offline.iql import expectile_loss
from tests.builders import make_learner, make_policy, transitions

SPEC = Spec({"state": Leaf((3,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(kind: str, **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32])
    given = {"hidden": [64], **settings}
    return make_learner(f"offline.{kind}", policy, run=RunPlan(1000), **given)


def least(loss: Callable[[Tensor], Tensor], q: Tensor) -> float:
    """The V at which the loss of Q - V is least, by bisection of its slope."""
    low, high = q.min().item() - 20, q.max().item() + 20
    for _ in range(60):
        value = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        loss(q - value).backward()
        assert value.grad is not None
        low, high = (value.item(), high) if value.grad < 0 else (low, value.item())
    return low


def test_the_four_fixed_points() -> None:
    torch.manual_seed(0)
    q = 3 * torch.randn(20_001, dtype=torch.float64)
    quantile = q.quantile((2 * 0.8 - 1) / 0.8).item()
    assert least(lambda gap: dual_loss(gap, "tv", 0.8), q) == pytest.approx(quantile, abs=1e-2)
    soft = 2 * (q / 2).exp().mean().log().item()
    assert least(lambda gap: reverse_kl_loss(gap, 2.0, 50.0), q) == pytest.approx(soft, abs=1e-2)
    value = least(lambda gap: dual_loss(gap, "chi2", 0.8), q)
    assert (1 + (q - value) / 2).clamp(min=0).mean().item() == pytest.approx(0.25, abs=1e-2)
    assert value == pytest.approx(1.26 * 3, rel=0.03)  # by quadrature
    level = least(lambda gap: expectile_loss(gap, 0.9), q)
    above, below = (q - level).clamp(min=0).mean(), (level - q).clamp(min=0).mean()
    assert (0.9 * above).item() == pytest.approx((0.1 * below).item(), rel=1e-2)


def test_the_authors_chi2_rises_again_below_minus_four() -> None:
    gap = torch.tensor([-6.0, -3.0, -1.0, 2.0])
    reference = 0.8 * torch.tensor([3.0, 0.0, 0.0, 3.0]) - 0.2 * gap
    ours = 0.8 * torch.tensor([-1.0, -1.0, -0.75, 3.0]) - 0.2 * gap
    cases: dict[Divergence, Tensor] = {"chi2_reference": reference, "chi2": ours}
    for divergence, expected in cases.items():
        loss = dual_loss(gap, divergence, 0.8)
        assert loss.item() == pytest.approx(expected.mean().item())


def test_normalised_it_does_not_depend_on_the_scale() -> None:
    torch.manual_seed(0)
    best, value = torch.randn(64), torch.randn(64)
    for normalize in (True, False):
        learner = make("f_dvl.FDvl", normalize=normalize)
        one, other = learner.value_loss(best, value), learner.value_loss(100 * best, 100 * value)
        assert math.isclose(one.item(), other.item(), rel_tol=1e-4) == normalize


def test_a_level_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"above 0\.5 and at most 1 with divergence=tv"):
        make("f_dvl.FDvl", divergence="tv", lam=0.4)


def test_the_target_and_the_level_by_hand() -> None:
    learner = make("recoil.Recoil", hidden=(), ended=0.5, gamma=0.9, level=20.0)
    batch = transitions(4, SPEC) | {"source": torch.tensor([0, 0, 1, 1])}
    batch["discount"] = torch.tensor([0.9, 0.81, 0.9, 0.0])
    for parameter in learner.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.constant_(learner.value.net.biases[-1], 5.0)
    losses, _ = learner._loss(batch)
    # -20 (1 - d) + 5 d; after the end -20 (1 - 0.9) + 0.9 * 0.5 * 20
    target = torch.tensor([-2 + 4.5, -3.8 + 4.05, -2 + 4.5, -2 + 9.0])
    assert losses[2].item() == pytest.approx(2 * (target.square().mean().item() + 20**2), rel=1e-5)


def chain(n: int) -> Tensors:
    """Three states: at the first the expert stays (by 1); 1 leads there from the second, -1 to the
    third, from which there is no way."""
    state = torch.randint(3, (n,))
    source = (state > 0).long()
    right = (torch.rand(n) > 0.5) | (state == 0)
    after = torch.where(state == 2, 2, torch.where(right, 0, 2))
    codes = torch.eye(3)
    return {
        "obs/state": codes[state],
        "action": torch.where(right, 1.0, -1.0)[:, None],
        "reward": torch.zeros(n),
        "discount": torch.full((n,), 0.9),
        "next_obs/state": codes[after],
        "source": source,
    }


def test_what_leads_back_to_the_expert_is_worth_more() -> None:
    rates = {"actor_lr": 3e-3, "critic_lr": 3e-3, "value_lr": 3e-3, "tau": 0.05}
    learner = make("recoil.Recoil", gamma=0.9, level=2.0, lam=0.2, beta=3.0, cosine=False, **rates)
    torch.manual_seed(0)
    for _ in range(600):
        learner.update(chain(128))
    second = {"state": torch.eye(3)[1].expand(2, 3)}
    back, away = learner.critic(second, torch.tensor([[1.0], [-1.0]])).mean(0).tolist()
    assert back > away + 1
    assert learner.policy({"state": torch.eye(3)}).flatten()[:2].min() > 0.5


def test_it_needs_two_datasets() -> None:
    with pytest.raises(ConfigError, match=r"demos=\[EXPERT,OTHERS\]"):
        make("recoil.Recoil").fit(transitions(4, SPEC) | {"source": torch.zeros(4)})
