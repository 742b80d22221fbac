"""Kinesthetic combination: signs by table, invariance by the discount, events as they are."""

from __future__ import annotations

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.rewards.handcrafted.factors import Kinesthetic, krc
from tests.rewards.rows import make, rows, state

NODE = {
    "_target_": "embodied.rewards.handcrafted.factors.Kinesthetic",
    "utilities": {
        "offence": {
            "weight": 2.0,
            "all": [
                {"of": "alignment", "a": "tool", "b": "cube", "c": "goal"},
                {"of": "proximity", "a": "tool", "b": "cube"},
            ],
        },
        "arrive": {"of": "distance", "a": "cube", "b": "goal", "weight": -1.0},
    },
    "events": {"there": {"of": "above", "a": "cube_x", "than": 1.5, "weight": 10.0}},
}


@pytest.mark.parametrize(
    ("factors", "both", "product"),
    [
        ((0.25, 1.0), 0.5, 0.5),
        ((-0.25, 1.0), -0.5, -0.5),
        ((-0.25, -1.0), -0.5, 0.5),
        ((0.0, -1.0), 0.0, 0.0),
        ((-0.5, -0.5, -0.5), -0.5, -0.5),
        ((1.0, 1.0, 0.008), 0.2, 0.2),
        ((4.0, 1.0), 1.0, 1.0),
    ],
)
def test_the_table_of_signs(factors: tuple[float, ...], both: float, product: float) -> None:
    """|product|^(1/n); `all`: one negative factor is enough; `product`: two make a plus."""
    values = [torch.tensor([factor]) for factor in factors]
    assert krc(values, "all").item() == pytest.approx(both, abs=1e-6)
    assert krc(values, "product").item() == pytest.approx(product, abs=1e-6)


def test_utilities_are_potentials_and_events_are_paid() -> None:
    """Tool 0, cube 1, goal 2: aligned, proximity e^-1/2: KRC = e^-1/4, U = 2 e^-1/4 - 1. Then the
    cube is at 2: no way is left (cosine 0), U = 0; 10 for the event."""
    reward = make(NODE)
    assert isinstance(reward, Kinesthetic)
    now, then = state(0.0, 1.0, 2.0)[None], state(0.0, 2.0, 2.0)[None]
    before = 2 * torch.tensor(-0.25).exp() - 1
    assert reward(rows(now, then)).item() == pytest.approx(0.5 - before.item() + 10, abs=1e-4)
    assert reward(rows(now, now, 0.0)).item() == pytest.approx(0.5 - before.item(), abs=1e-4)
    stays = 0.5 + (0.9 - 1) * before.item()
    assert reward(rows(now, now)).item() == pytest.approx(stays, abs=1e-4)
    assert set(reward.components(rows(now, now))) == {"env", "offence", "arrive", "there"}


def test_the_sum_of_the_same_factors_buys_one_with_the_other() -> None:
    """Behind the goal's side but close by: the product is negative, the mean is not."""
    now = state(1.1, 1.0, 2.0)[None]
    apart = {}
    for join in ("krc", "sum"):
        reward = make(NODE | {"join": join, "env_weight": 0.0})
        apart[join] = reward.components(rows(now, now, 0.0))["offence"].item()
    near = torch.tensor(-0.05).exp().item()
    assert apart["krc"] == pytest.approx(2 * near**0.5, abs=1e-4)
    assert apart["sum"] == pytest.approx(-2 * (near - 1) / 2, abs=1e-4)


def test_mistakes_are_one_line() -> None:
    wrong = {"offence": {"all": [], "wheight": 1.0}}
    with pytest.raises(ConfigError, match="offence has no setting wheight"):
        make(NODE | {"utilities": wrong})
    with pytest.raises(ConfigError, match="signs=some must be all or product"):
        make(NODE | {"utilities": {"a": {"all": [], "signs": "some"}}})
