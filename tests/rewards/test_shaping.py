"""Factors by hand; potential shaping by hand and on a tabular world, where nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.buffers.n_step import NStepBuffer
from embodied.core.build import ConfigError
from embodied.core.reward import AugmentsEnv, HasComponents, ObservesSteps
from embodied.core.tensors import Tensors
from embodied.rewards.handcrafted.factors import (
    Factor,
    Shaping,
    WeightedSum,
    alignment,
    closeness,
    proximity,
)
from tests.rewards.rows import SPEC, drawn, make, rows, state

SHAPING = {
    "_target_": "embodied.rewards.handcrafted.factors.Shaping",
    "potential": {"of": "distance", "a": "tool", "b": "goal", "weight": -2.0},
}


def worth(node: dict[str, Any], batch: Tensors) -> list[float]:
    return Factor(node, SPEC)(batch).tolist()


def test_parts_of_an_observation_by_name() -> None:
    batch = rows(state(0.0)[None], state(1.0, 3.0, 6.0)[None])
    assert worth({"of": "distance", "a": "tool", "b": "goal"}, batch) == [5.0]
    assert worth({"of": "distance", "a": "state[0:3]", "b": "cube"}, batch) == [2.0]
    assert worth({"of": "distance", "a": "tool_x,goal_x", "b": [1.0, 2.0]}, batch) == [4.0]
    assert worth({"of": "value", "a": "goal_x", "weight": -0.5}, batch) == [-3.0]
    assert worth({"of": "above", "a": "cube_x", "than": 2.5}, batch) == [1.0]
    assert worth({"of": "value", "a": "reward"}, batch) == [0.5]
    assert Factor({"of": "value", "a": "tool_x"}, SPEC)(batch, "obs").tolist() == [0.0]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"of": "distanse", "a": "tool", "b": "goal"}, 'did you mean "distance"'),
        ({"of": "distance", "a": "tool", "b": "gaol"}, 'did you mean "goal"'),
        ({"of": "distance", "a": "tool"}, "missing a required argument: 'b'"),
        ({"of": "value", "a": "state[8:12]"}, "is out of range"),
        ({"a": "tool"}, "a factor needs `of`"),
        ({"of": "os.path.join", "a": "tool"}, "allow="),
    ],
)
def test_mistakes_in_a_factor_are_one_line(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        Factor(node, SPEC)


def test_geometry_by_hand() -> None:
    zero, one, up = (torch.tensor([v]) for v in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0]))
    assert alignment(zero, one, 2 * one).item() == pytest.approx(1.0)
    assert alignment(zero, one, zero).item() == pytest.approx(-1.0)
    assert alignment(zero, one, one + up).item() == pytest.approx(0.0)
    half = 2 * np.log(2.0)
    assert proximity(zero, half * one).item() == pytest.approx(0.5)
    assert closeness(zero, half * one).item() == pytest.approx(0.0, abs=1e-6)
    assert closeness(zero, zero, density=2.0).item() == pytest.approx(1.0)
    far = closeness(zero, 1e6 * one, density=0.5).item()
    assert far == pytest.approx(-1.0)


def test_shaping_by_hand() -> None:
    """Phi = -2 distance: from 3 to 1: own 0.5 + 0.9 (-2) - (-6) = 4.7; at a true end nothing is
    left of the potential: 0.5 + 6 = 6.5; a decision of two steps has 0.81."""
    reward = make(SHAPING)
    now, then = state(3.0).repeat(3, 1), state(1.0).repeat(3, 1)
    paid = reward(rows(now, then, [0.9, 0.0, 0.81]))
    torch.testing.assert_close(paid, torch.tensor([4.7, 6.5, 0.5 - 1.62 + 6]))
    assert isinstance(reward, Shaping) and isinstance(reward, HasComponents)
    assert not isinstance(reward, ObservesSteps | AugmentsEnv)
    apart = reward.components(rows(now, then))
    assert apart["env"].tolist() == [0.5] * 3


def test_n_steps_telescope() -> None:
    """Shaping a 3-step row is the sum of shaping its steps: Phi(s_0) and g^3 Phi(s_3) are left."""
    reward, states = make(SHAPING), torch.stack([state(float(x)) for x in (4, 2, 3, 1)])
    each = [rows(states[i : i + 1], states[i + 1 : i + 2]) for i in range(3)]
    window, ended = NStepBuffer(3), torch.tensor([False])
    whole: Tensors = {}
    for row in each:
        whole = window.push(row, None, ended)
    summed = sum(0.9**i * reward(row) for i, row in enumerate(each))
    torch.testing.assert_close(reward(whole), summed)


def test_what_is_best_stays_best() -> None:
    """Values of a random world with ends: Q' = Q - Phi exactly, so the best actions are the same;
    with the difference of potentials (no discount) they are not."""
    random = np.random.default_rng(1)
    n, gamma = 8, 0.9
    transition = random.dirichlet(np.ones(n), size=(n, 4))
    reward, height = random.normal(size=(n, 4, n)), 10 * random.normal(size=n)
    over = np.arange(n) >= 6  # the world ends on reaching these

    def best(paid: np.ndarray) -> np.ndarray:
        q = np.zeros((n, 4))
        for _ in range(300):
            ahead = paid + gamma * np.where(over, 0.0, q.max(1))[None, None, :]
            q = (transition * ahead).sum(2)
        return q

    node = SHAPING | {"potential": {"of": "value", "a": "height"}}
    spec = type(SPEC)({"height": type(SPEC.obs["state"])((1,))}, SPEC.act, dt=0.1)
    shaping = make(node, spec)
    s, a, t = (part.ravel() for part in np.indices(reward.shape))
    batch = {
        "obs/height": torch.tensor(height[s, None]),
        "next_obs/height": torch.tensor(height[t, None]),
        "reward": torch.tensor(reward[s, a, t]),
        "discount": torch.tensor(gamma * ~over[t]),
    }
    shaped = shaping(batch).double().numpy().reshape(reward.shape)
    plain, other = best(reward), best(shaped)
    np.testing.assert_allclose(other, plain - height[:, None], atol=1e-4)
    np.testing.assert_array_equal(other.argmax(1), plain.argmax(1))
    difference = best(reward + height[None, None, :] - height[:, None, None])
    assert (difference.argmax(1) != plain.argmax(1)).any()


def test_summed_by_hand() -> None:
    node = {
        "_target_": "embodied.rewards.handcrafted.factors.WeightedSum",
        "factors": {
            "near": {"of": "distance", "a": "tool", "b": "goal", "weight": -0.1},
            "effort": {"of": "effort", "a": "action", "weight": -1.0},
        },
        "scale": 10.0,
    }
    reward = make(node)
    assert isinstance(reward, WeightedSum)
    batch = rows(state(3.0)[None], state(2.0)[None], action=torch.tensor([[1.0, 0.0]]))
    assert reward(batch).item() == pytest.approx(0.5 - 10 * 0.1 * 2 - 10 * 0.5)
    assert drawn(4)["reward"].shape == reward(drawn(4)).shape
