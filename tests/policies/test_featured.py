"""Latent noise from the base's features: the same robot actions, and no picture in a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.policies.steering.dsrl_features import DsrlFeatures
from tests.builders import node_of

SPEC = Spec(
    {
        "state": Leaf((3,)),
        "wrist": Leaf((16, 16, 3), "uint8"),
        "privileged/state": Leaf((5,)),
    },
    Leaf((2,), low=-1.0, high=1.0),
    dt=0.1,
)
BASE = node_of(
    "policies.generative.flow.Flow", chunk=3, width=16, images={"channels": [4], "features": 7}
)
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [16]}


def made(**base: Any) -> DsrlFeatures:
    torch.manual_seed(0)
    node = {"_target_": "embodied.policies.steering.dsrl_features.DsrlFeatures", "bound": 2.0}
    policy = DsrlFeatures.wrap(build(BASE | base, Policy, spec=SPEC), node, INNER)
    assert isinstance(policy, DsrlFeatures)
    return policy


def seen(n: int) -> Tensors:
    return {
        "state": torch.randn(n, 3),
        "wrist": torch.randint(256, (n, 16, 16, 3), dtype=torch.uint8),
        "privileged/state": torch.randn(n, 5),
    }


def test_rows_hold_features_and_what_critics_see_and_no_picture() -> None:
    policy, obs = made(), seen(4)
    actor = Actor(policy, 4, explore=True)
    actor(obs, torch.ones(4, dtype=torch.bool))
    assert set(actor.decision_obs) == {"features", "privileged/state"} == set(policy.inner.spec.obs)
    assert actor.decision_obs["features"].shape == (4, 3 + 7)
    assert torch.equal(actor.decision_obs["features"], policy.base.get_submodule("encoder")(obs))
    assert actor.stored_action.shape == (4, 6)
    assert not any("sight" in key for key in actor.carry), "pictures stay in the carry"
    assert set(actor.preview(obs)) == {"features", "privileged/state"}


def test_it_is_the_base_at_the_chosen_noise_row_by_row() -> None:
    policy, obs = made(), seen(4)
    actor = Actor(policy, 4)
    one = actor(obs, torch.ones(4, dtype=torch.bool))
    u = actor.stored_action
    expected = policy.base.act(obs, {}, 2.0 * u)[0]
    assert torch.allclose(one, expected[:, 0], atol=1e-6)
    other = {key: value.roll(1, 0) for key, value in obs.items()}
    again = actor(other, torch.tensor([True, False, False, False]))
    assert torch.allclose(again[1:], expected[1:, 1], atol=1e-6), "these go on with their chunks"
    fresh = policy.base.act(other, {}, 2.0 * actor.stored_action)[0]
    assert torch.allclose(again[0], fresh[0, 0], atol=1e-6)


def test_a_base_without_an_encoder_is_refused() -> None:
    base = build({"_target_": "embodied.policies.random.Random"}, Policy, spec=SPEC)
    with pytest.raises(ConfigError, match="no encoder"):
        DsrlFeatures.wrap(
            base, {"_target_": "embodied.policies.steering.dsrl_features.DsrlFeatures"}, INNER
        )
