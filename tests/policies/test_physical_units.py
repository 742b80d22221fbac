"""A policy in physical units around a policy on normalised values."""

from pathlib import Path

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.affine import Affine
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.policies.wrappers.physical_units import PhysicalUnits

DEGREES = Leaf((2,), unit="deg", names=("shoulder", "elbow"))
ARM = Spec({"state": Leaf((3,), unit="deg")}, DEGREES, dt=0.1)
ACTION = Affine((-90.0, 0.0), (90.0, 100.0))
STATE = Affine((-10.0,) * 3, (10.0,) * 3)
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 4, "width": 16, "depth": 1}


def arm(reach: float | None = None) -> PhysicalUnits:
    node = {
        "_target_": "embodied.policies.wrappers.physical_units.PhysicalUnits",
        "base": FLOW,
        "action": ACTION.to_json(),
        "obs": {"state": STATE.to_json()},
        "reach": reach,
    }
    return build(node, PhysicalUnits, spec=ARM)


def test_actions_and_observations_are_physical() -> None:
    policy = arm()
    noise, state = policy.sample_noise(5), torch.randn(5, 3) * 10
    actions, _ = policy.act({"state": state}, {}, noise)
    inner, _ = policy.base.act({"state": state / 10}, {}, noise)
    assert actions.shape == (5, 4, 2) and policy.chunk == 4
    torch.testing.assert_close(actions, ACTION.to_physical(inner))


def test_the_base_sees_a_spec_in_normalised_values() -> None:
    inner = arm().base.spec
    assert (inner.act.low, inner.act.high) == (-1.0, 1.0)
    assert inner.obs["state"].is_normalized and inner.act.names == DEGREES.names
    assert arm(reach=3.0).base.spec.act.is_normalized


def test_a_loss_in_physical_units_is_the_bases() -> None:
    policy = arm()
    batch = {
        "obs/state": torch.randn(6, 3) * 10,
        "action": torch.randn(6, 4, 2) * 50,
        "valid": torch.ones(6, 4, dtype=torch.bool),
    }
    normalised = {
        **batch,
        "obs/state": batch["obs/state"] / 10,
        "action": ACTION.to_unit(batch["action"]),
    }
    torch.manual_seed(0)
    here = policy.loss(batch)
    torch.manual_seed(0)
    torch.testing.assert_close(here, policy.base.loss(normalised))


def test_it_is_put_around_a_trained_policy_and_saved(tmp_path: Path) -> None:
    base = arm().base
    policy = PhysicalUnits.of(base, ARM, ACTION, {"state": STATE})
    loaded = checkpoint.load_policy(checkpoint.save(tmp_path / "1", policy, 1), ARM)
    noise, obs = policy.sample_noise(3), {"state": torch.randn(3, 3)}
    assert torch.equal(loaded.act(obs, {}, noise)[0], policy.act(obs, {}, noise)[0])
    assert isinstance(loaded, Policy) and loaded.spec == ARM


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"action": {"low": [0], "high": [1]}}, "action.low has 1 numbers"),
        ({"obs": {"stat": STATE.to_json()}}, "obs.stat has 3 numbers.*absent"),
        ({"action": {"low": [0, 0], "high": [0, 1]}}, "equal in element 0"),
    ],
)
def test_maps_that_do_not_fit_are_refused(change: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build({**arm().node, **change}, PhysicalUnits, spec=ARM)


WIDE = arm(reach=4.0)


def networks() -> list[dict]:
    small = {"hidden": [16]}
    flow = {"chunk": 2, "width": 16, "depth": 1}
    where = "embodied.policies.generative"
    return [
        {"_target_": "embodied.policies.gaussian.Gaussian", **small},
        {"_target_": "embodied.policies.gaussian.Gaussian", "imitate": "nll", **small},
        {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", **small},
        {"_target_": "embodied.policies.deterministic.Deterministic", **small},
        {"_target_": f"{where}.flow.Flow", **flow},
        {"_target_": f"{where}.shortcut.Shortcut", **flow},
        {"_target_": f"{where}.consistency.Consistency", "steps": 2, **flow},
        {"_target_": f"{where}.diffusion.Diffusion", **flow},
        {
            "_target_": f"{where}.one_step.OneStep",
            "hidden": [16],
            "flow": {"_target_": f"{where}.flow.Flow", **flow},
        },
        {"_target_": f"{where}.act.Act", "chunk": 2, "width": 16, "heads": 2, "style": 4},
    ]


@pytest.mark.parametrize("node", networks(), ids=lambda node: node["_target_"].rpartition(".")[2])
def test_every_imitating_policy_reaches_beyond_the_quantiles(node: dict) -> None:
    """2% of the data lie outside of the quantiles: an action there is learned, not clamped."""
    torch.manual_seed(0)
    policy = build({**WIDE.node, "base": node}, PhysicalUnits, spec=ARM)
    target = ACTION.to_physical(torch.tensor([2.5, -2.5]))
    rows = {
        "obs/state": torch.randn(64, 3) * 10,
        "action": target.expand(64, policy.chunk, 2),
        "valid": torch.ones(64, policy.chunk, dtype=torch.bool),
    }
    policy.fit(rows)
    adam = torch.optim.Adam(policy.parameters(), lr=0.02)
    for _ in range(200):
        loss = policy.loss(rows).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    policy.eval()
    obs = {"state": rows["obs/state"][:16]}
    with torch.no_grad():
        actions, _ = policy.act(obs, policy.initial(16), policy.sample_noise(16))
    found = ACTION.to_unit(actions).mean((0, 1))
    assert found[0] > 1.1 and found[1] < -1.1


def test_observations_are_normalised_once() -> None:
    base = WIDE.base
    rows = {"obs/state": torch.randn(100, 3) * 1000, "action": torch.zeros(100, 4, 2)}
    WIDE.fit(rows)
    values = torch.full((1, 3), 50.0)
    assert torch.equal(base.encoder({"state": values}), values)
