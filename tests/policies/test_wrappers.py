"""Best of N, edits, features of a base and physical units: choices and values by hand; policy
smoothing: the noise, attacks within their budget, certificates where they are tight.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from embodied.commands.eval import evaluate_run
from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.affine import Affine
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.evaluation.certificate import (
    Certificate,
    Config,
    attacked,
    certificates,
    lower_bound,
    mean_return,
)
from embodied.evaluation.evaluate import Evaluation
from embodied.nn.networks import QFunction
from embodied.nn.optim import fit
from embodied.policies.steering.dsrl_features import DsrlFeatures
from embodied.policies.wrappers.best_of_n import BestOfN
from embodied.policies.wrappers.edit import Edit
from embodied.policies.wrappers.translated import PhysicalUnits
from embodied.training.logger import read_metrics
from tests.builders import SPEC, make_policy, node_of, run_folder

FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "width": 16, "chunk": 2}
GAUSSIAN = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [16]}
LINEAR = {"_target_": "embodied.learners.critics.Critic", "n": 2, "hidden": []}


COMMON = {"base": FLOW, "critic": LINEAR, "n": 4}


def best(**settings: Any) -> BestOfN:
    return make_policy("wrappers.best_of_n.BestOfN", SPEC, **{**COMMON, **settings})


def edit(**settings: Any) -> Edit:
    return make_policy("wrappers.edit.Edit", SPEC, **{**COMMON, "edit": GAUSSIAN, **settings})


@torch.no_grad()
def prefer(policy: BestOfN, weights: list[list[float]]) -> None:
    """Make Q_i(s, a) = weights[i] . a, whatever s."""
    ensemble = policy.critic.ensemble
    ensemble.weights[0].zero_()
    ensemble.biases[0].zero_()
    ensemble.weights[0][:, -len(weights[0]) :, 0] = torch.tensor(weights)


def test_the_best_candidate_by_the_critics_together() -> None:
    policy = best()
    # Of the last action element: Q_1 = a, Q_2 = -3 a; the mean is -a.
    prefer(policy, [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, -3.0]])
    obs, noise = {"state": torch.randn(5, 3)}, policy.sample_noise(5)
    chosen, _ = policy.act(obs, {}, noise)
    each = torch.stack([policy.base.act(obs, {}, z)[0] for z in noise.view(5, 4, 4).unbind(1)], 1)
    index = each[:, :, 1, 1].argmin(1)
    torch.testing.assert_close(chosen, each[torch.arange(5), index])
    assert len(set(index.tolist())) > 1


def test_the_first_candidate_is_drawn_as_the_base_acts() -> None:
    policy = best(base={**GAUSSIAN, "chunk": 2}, n=3)
    calm = policy.sample_noise(4).view(4, 3, 4)
    assert not calm[:, 0].any() and calm[:, 1:].all()


def test_an_edit_without_a_density_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy with a density"):
        edit(edit=FLOW)


@pytest.mark.parametrize("make", [best, edit])
def test_around_a_loaded_base(make: Any, tmp_path: Path) -> None:
    """The base keeps weights and normalisers; the whole loads alone."""
    base = make_policy("generative.flow.Flow", SPEC, seed=3, width=16, chunk=2)
    base.fit({"obs/state": 5 + torch.randn(50, 3), "action": torch.rand(50, 4) / 2})
    kept = {key: value.clone() for key, value in base.state_dict().items()}
    fresh = make()
    policy = type(fresh).wrap(base, {k: v for k, v in fresh.node.items() if k != "base"})
    policy.fit({"obs/state": torch.randn(50, 3), "action": torch.rand(50, 4) * 2 - 1})
    assert all(torch.equal(value, kept[key]) for key, value in policy.base.state_dict().items())
    assert policy.critic.encoder.norm.limit < 100  # fitted
    checkpoint.save(tmp_path / "1", policy, 1)
    loaded = checkpoint.load_policy(tmp_path / "1", SPEC)
    obs, noise = {"state": torch.randn(6, 3)}, policy.sample_noise(6, explore=True)
    assert torch.equal(loaded.act(obs, {}, noise)[0], policy.act(obs, {}, noise)[0])


def test_a_critic_of_latent_noise_judges_the_noise_of_a_steered_base() -> None:
    """And carries are those of the chosen."""
    latent = node_of("policies.steering.dsrl.Dsrl", bound=2.0, base=FLOW, inner=GAUSSIAN)
    policy, obs = best(base=latent, n=5), {"state": torch.zeros(6, 3)}
    prefer(policy, [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    actor = Actor(policy, 6, explore=True)
    torch.manual_seed(2)
    actor(obs, torch.ones(6, dtype=torch.bool))
    torch.manual_seed(2)
    noise = policy.sample_noise(6, explore=True).view(6, 5, 4)
    steered: Any = policy.base
    u = torch.stack([steered.inner.act(obs, {}, z)[0][:, 0] for z in noise.unbind(1)], 1)
    expected = u[torch.arange(6), u[:, :, 0].argmax(1)]
    torch.testing.assert_close(actor.stored_action, expected)
    torch.testing.assert_close(actor.plan, steered.base.act(obs, {}, 2 * expected)[0])


def test_edits_of_nothing_are_the_base_bit_for_bit() -> None:
    """A head of zeros and no exploration: with one candidate the base, with more the best of it."""
    zero, obs = {**GAUSSIAN, "zero_head": True}, {"state": torch.randn(7, 3)}
    for one in (edit(edit=zero, n=1), best(n=1)):
        noise = one.sample_noise(7)
        assert torch.equal(one.act(obs, {}, noise)[0], one.base.act(obs, {}, noise[:, :4])[0])
    many, plain = edit(edit=zero), best()
    plain.base.load_state_dict(many.base.state_dict())
    plain.critic.load_state_dict(many.critic.state_dict())
    noise = many.sample_noise(7)
    assert torch.equal(many.act(obs, {}, noise)[0], plain.act(obs, {}, noise[:, :16])[0])
    explored = many.act(obs, {}, many.sample_noise(7, explore=True))[0]
    assert not torch.equal(explored, plain.act(obs, {}, noise[:, :16])[0])


def test_proposals_are_the_base_and_its_edits() -> None:
    policy = edit(scale=0.7)
    torch.nn.init.normal_(policy.edit.net[-1].bias, std=2.0)
    obs, noise = {"state": torch.randn(3, 3)}, policy.sample_noise(3, explore=True)
    proposals = policy.proposals(obs, noise)
    assert proposals.shape == (3, 8, 4) and proposals.abs().max() == 1
    base, edits = noise[:, :16].view(3, 4, 4), noise[:, 16:].view(3, 4, 4)
    for i in range(4):
        action = policy.base.act(obs, {}, base[:, i])[0].flatten(1)
        torch.testing.assert_close(proposals[:, i], action)
        u = policy.edit.act({**obs, "base_action": action}, {}, edits[:, i])[0].flatten(1)
        torch.testing.assert_close(proposals[:, 4 + i], (action + 0.7 * u).clamp(-1, 1))
    prefer(policy, [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    chosen = policy.act(obs, {}, noise)[0].flatten(1)
    expected = proposals[torch.arange(3), proposals[:, :, 2].argmax(1)]
    torch.testing.assert_close(chosen, expected)


def test_the_density_of_an_edit_is_that_of_the_scaled_one() -> None:
    policy = edit(scale=0.2)
    obs, action, noise = {"state": torch.randn(6, 3)}, torch.zeros(6, 4), torch.randn(6, 4)
    edited, log_prob = policy.revise(obs, action, noise)
    mean, log_std = policy.edit({**obs, "base_action": action})
    transforms = [TanhTransform(), AffineTransform(0.0, 0.2)]
    density = TransformedDistribution(Normal(mean, log_std.exp()), transforms)
    torch.testing.assert_close(log_prob, density.log_prob(edited).sum(1), atol=1e-3, rtol=1e-3)
    assert edited.abs().max() < 0.2


def test_values_of_many_actions_are_those_of_each() -> None:
    torch.manual_seed(0)
    node = {**LINEAR, "n": 3, "hidden": [8, 8], "layer_norm": True}
    critic = build(node, QFunction, spec=SPEC, size=4)
    obs, actions = {"state": torch.randn(5, 3)}, torch.randn(5, 6, 4)
    expected = torch.stack([critic(obs, a) for a in actions.unbind(1)], 2)
    torch.testing.assert_close(critic.each(obs, actions), expected)
    some = torch.tensor([2, 0])
    torch.testing.assert_close(critic.each(obs, actions, some), expected[some])


FEATURED_SPEC = Spec(
    {"state": Leaf((3,)), "wrist": Leaf((16, 16, 3), "uint8"), "privileged/state": Leaf((5,))},
    Leaf((2,), low=-1.0, high=1.0),
    dt=0.1,
)
BASE = node_of(
    "policies.generative.flow.Flow", chunk=3, width=16, images={"channels": [4], "features": 7}
)


def made(**base: Any) -> DsrlFeatures:
    torch.manual_seed(0)
    node = {"_target_": "embodied.policies.steering.dsrl_features.DsrlFeatures", "bound": 2.0}
    policy = DsrlFeatures.wrap(build(BASE | base, Policy, spec=FEATURED_SPEC), node, GAUSSIAN)
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
    expected = policy.base.act(obs, {}, 2.0 * actor.stored_action)[0]
    assert torch.allclose(one, expected[:, 0], atol=1e-6)
    other = {key: value.roll(1, 0) for key, value in obs.items()}
    again = actor(other, torch.tensor([True, False, False, False]))
    assert torch.allclose(again[1:], expected[1:, 1], atol=1e-6), "these go on with their chunks"
    fresh = policy.base.act(other, {}, 2.0 * actor.stored_action)[0]
    assert torch.allclose(again[0], fresh[0, 0], atol=1e-6)
    base = build(node_of("policies.random.Random"), Policy, spec=FEATURED_SPEC)
    with pytest.raises(ConfigError, match="no encoder"):
        DsrlFeatures.wrap(base, node_of("policies.steering.dsrl_features.DsrlFeatures"), GAUSSIAN)


DEGREES = Leaf((2,), unit="deg", names=("shoulder", "elbow"))
ARM = Spec({"state": Leaf((3,), unit="deg")}, DEGREES, dt=0.1)
ACTION = Affine((-90.0, 0.0), (90.0, 100.0))
STATE = Affine((-10.0,) * 3, (10.0,) * 3)


def arm(reach: float | None = None, **more: Any) -> PhysicalUnits:
    base = node_of("policies.generative.flow.Flow", chunk=4, width=16, depth=1, **more)
    maps = {"action": ACTION.to_json(), "obs": {"state": STATE.to_json()}, "reach": reach}
    node = node_of("policies.wrappers.translated.PhysicalUnits", base=base, **maps)
    return build(node, PhysicalUnits, spec=ARM)


def test_actions_and_observations_are_physical() -> None:
    policy = arm()
    noise, state = policy.sample_noise(5), torch.randn(5, 3) * 10
    actions, _ = policy.act({"state": state}, {}, noise)
    inner, _ = policy.base.act({"state": state / 10}, {}, noise)
    assert actions.shape == (5, 4, 2) and policy.chunk == 4
    torch.testing.assert_close(actions, ACTION.to_physical(inner))


def test_past_observations_are_physical_too() -> None:
    """Those in the carry, as an actor remembers them, and those of a batch."""
    policy = arm(obs_steps=3)
    actors = [Actor(policy, 4, execute=2), Actor(policy.base, 4, execute=2)]
    for step in range(5):
        state, first = 10 * torch.randn(4, 3), torch.full((4,), step == 0)
        acted: list[torch.Tensor] = []
        for actor, scale in zip(actors, (1, 10), strict=True):
            torch.manual_seed(step)
            acted.append(actor({"state": state / scale}, first))
        torch.testing.assert_close(acted[0], ACTION.to_physical(acted[1]))
    past = 10 * torch.randn(6, 2, 3)
    batch = {"obs/state": 10 * torch.randn(6, 3), "obs/history/state": past}
    batch |= {"action": torch.randn(6, 4, 2), "valid": torch.ones(6, 4, dtype=torch.bool)}
    inner = {**batch, "obs/state": batch["obs/state"] / 10, "obs/history/state": past / 10}
    torch.manual_seed(0)
    here = policy.loss(batch)
    torch.manual_seed(0)
    inner["action"] = ACTION.to_unit(batch["action"])
    torch.testing.assert_close(here, policy.base.loss(inner))


def test_it_is_put_around_a_trained_policy_and_saved(tmp_path: Path) -> None:
    """Which saw a spec in normalised values."""
    base = arm().base
    assert (base.spec.act.low, base.spec.act.high) == (-1.0, 1.0)
    assert base.spec.obs["state"].is_normalized and base.spec.act.names == DEGREES.names
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


SMALL, SMALL_FLOW = {"hidden": [16]}, {"chunk": 2, "width": 16, "depth": 1}
ONE_STEP = {"flow": node_of("policies.generative.flow.Flow", **SMALL_FLOW), **SMALL}
IMITATORS: dict[str, dict[str, Any]] = {
    "gaussian.Gaussian": SMALL,
    "gaussian.Gaussian, nll": {**SMALL, "imitate": "nll"},
    "diagonal_gaussian.DiagonalGaussian": SMALL,
    "deterministic.Deterministic": SMALL,
    "generative.flow.Flow": SMALL_FLOW,
    "generative.shortcut.Shortcut": SMALL_FLOW,
    "generative.consistency.Consistency": {**SMALL_FLOW, "steps": 2},
    "generative.diffusion.Diffusion": SMALL_FLOW,
    "generative.minimal_iterative.MinimalIterative": SMALL_FLOW,
    "generative.one_step.OneStep": ONE_STEP,
    "generative.act.Act": {"chunk": 2, "width": 16, "heads": 2, "style": 4},
}


@pytest.mark.parametrize("kind", IMITATORS)
def test_every_imitating_policy_reaches_beyond_the_quantiles(kind: str) -> None:
    """2% of the data lie outside of the quantiles: an action there is learned, not clamped."""
    torch.manual_seed(0)
    node = node_of(f"policies.{kind.partition(',')[0]}", **IMITATORS[kind])
    policy = build({**arm(reach=4.0).node, "base": node}, PhysicalUnits, spec=ARM)
    target = ACTION.to_physical(torch.tensor([2.5, -2.5]))
    rows = {
        "obs/state": torch.randn(64, 3) * 10,
        "action": target.expand(64, policy.chunk, 2),
        "valid": torch.ones(64, policy.chunk, dtype=torch.bool),
    }
    policy.fit(rows)
    fit(policy.parameters(), lambda: policy.loss(rows).mean(), 200, lr=0.02)
    policy.eval()
    with torch.no_grad():
        obs, noise = {"state": rows["obs/state"][:16]}, policy.sample_noise(16)
        actions, _ = policy.act(obs, policy.initial(16), noise)
    found = ACTION.to_unit(actions).mean((0, 1))
    assert found[0] > 1.1 and found[1] < -1.1


def test_observations_are_normalised_once() -> None:
    policy, values = arm(reach=4.0), torch.full((1, 3), 50.0)
    policy.fit({"obs/state": torch.randn(100, 3) * 1000, "action": torch.zeros(100, 4, 2)})
    assert torch.equal(policy.base.encoder({"state": values}), values)


SMOOTHED_SPEC = Spec(
    {"state": Leaf((3,)), "goal": Leaf((2,)), "privileged/mass": Leaf((1,))},
    Leaf((2,), low=-1.0, high=1.0),
    dt=0.1,
)
SMOOTHED_BASE = node_of("policies.gaussian.Gaussian", hidden=[16])


def smoothed(**settings: Any) -> Any:
    return make_policy("wrappers.smoothed.Smoothed", SMOOTHED_SPEC, base=SMOOTHED_BASE, **settings)


def observations(n: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(n, *leaf.shape) for name, leaf in SMOOTHED_SPEC.obs.items()}


@pytest.mark.parametrize("names", [None, ["goal"]])
def test_the_policy_decides_on_noisy_observations(names: list[str] | None) -> None:
    """Also without exploration; what is not named, and what the policy does not see, is as it
    was."""
    policy, obs = smoothed(sigma=0.2, names=names), observations(4000)
    noise = policy.sample_noise(4000)
    seen, carry = policy.observe(obs, policy.initial(4000), noise)
    for name in ("state", "goal"):
        off = seen[name] - obs[name]
        expected = 0.2 if names is None or name in names else 0.0
        assert off.std().item() == pytest.approx(expected, abs=0.01)
    assert torch.equal(seen["privileged/mass"], obs["privileged/mass"])
    action, carry = policy.act(seen, carry, noise)
    base = policy.base.act(seen, {}, noise[:, :2])[0]
    assert torch.equal(action, base) and carry["decisions"].tolist() == [1] * 4000


@pytest.mark.parametrize("attack", ["random", "away"])
def test_an_attack_spends_its_budget_and_no_more(attack: str) -> None:
    """0.6 in four decisions are 0.3 in each; the fifth has nothing left."""
    policy = smoothed(sigma=0.0, attack=attack, radius=0.6, attack_decisions=4)
    obs, carry = observations(8), policy.initial(8)
    for decision in range(5):
        noise = policy.sample_noise(8)
        seen, carry = policy.observe(obs, carry, noise)
        off = torch.cat([seen[name] - obs[name] for name in ("state", "goal")], 1).norm(dim=1)
        assert off.tolist() == pytest.approx([0.3 if decision < 4 else 0.0] * 8, abs=1e-5)


def test_gradient_steps_move_the_action_further_than_chance() -> None:
    obs, moved = observations(64), {}
    for attack in ("random", "away"):
        policy = smoothed(sigma=0.0, attack=attack, radius=0.1)
        torch.manual_seed(1)
        noise = policy.sample_noise(64)
        with torch.no_grad():
            seen, _ = policy.observe(obs, policy.initial(64), noise)
            changed = policy.base.act(seen, {}, noise[:, :2])[0]
            usual = policy.base.act(obs, {}, noise[:, :2])[0]
        moved[attack] = (changed - usual).norm(dim=-1).mean().item()
    assert moved["away"] > 1.3 * moved["random"] > 0


def test_what_smoothing_refuses() -> None:
    past = node_of("policies.generative.flow.Flow", chunk=2, width=16, obs_steps=2)
    for settings, says in (
        ({"names": ["stat"]}, "did you mean"),
        ({"names": ["privileged/mass"]}, "no vector"),
        ({"attack": "away"}, "belong together"),
        ({"radius": 0.1}, "belong together"),
    ):
        with pytest.raises(ConfigError, match=says):
            smoothed(**settings)
    with pytest.raises(ConfigError, match="past observations"):
        make_policy("wrappers.smoothed.Smoothed", SMOOTHED_SPEC, base=past)


def test_clopper_and_pearson_by_hand() -> None:
    """All of n: p^n = alpha. One of two: 1 - (1 - p)^2 = alpha. None: 0."""
    assert lower_bound(10, 10, 0.05) == pytest.approx(0.05**0.1)
    assert lower_bound(1, 2, 0.05) == pytest.approx(1 - math.sqrt(0.95))
    assert lower_bound(0, 5, 0.05) == 0.0


@pytest.mark.parametrize("k", [1, 37, 9_990])
def test_clopper_and_pearson_equal_the_beta_quantile(k: int) -> None:
    special = pytest.importorskip("scipy.special")
    expected = special.betaincinv(k, 10_000 - k + 1, 2.5e-4)
    assert lower_bound(k, 10_000, 2.5e-4) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("method", "shares"),
    [
        ("clopper_pearson", (0.996, 0.984, 0.874, 0.558, 0.032)),
        ("dkw", (0.956, 0.887, 0.583, 0.215, 0.003)),
    ],
)
def test_the_best_that_can_be_certified(method: str, shares: tuple[float, ...]) -> None:
    """10,000 perfect episodes of CartPole, sigma 0.2: known shares of the largest return."""
    config = Config(lowest=0, highest=200, method=method)  # type: ignore[arg-type]
    returns = torch.full((10_000,), 200.0)
    for radius, share in zip((0.1, 0.2, 0.4, 0.6, 1.0), shares, strict=True):
        found = mean_return(returns, radius, 0.2, config) / 200
        assert found == pytest.approx(share, abs=6e-4)


def test_the_mean_by_hand() -> None:
    """Half of 400 returns 1, half 3, above 0. In steps of 1 the shares are 1, 1/2, 1/2; without an
    attack the certificate is the sum of their lower bounds, with the least return as an offset."""
    returns = torch.tensor([1.0, 3.0]).repeat(200)
    config = Config(lowest=0, highest=3, thresholds=3)
    part = 0.05 / 3
    expected = lower_bound(400, 400, part) + 2 * lower_bound(200, 400, part)
    assert mean_return(returns, 0.0, 1.0, config) == pytest.approx(expected)
    shifted = Config(lowest=-5, highest=-2, thresholds=3)
    assert mean_return(returns - 5, 0.3, 0.5, shifted) == pytest.approx(
        mean_return(returns, 0.3, 0.5, config) - 5
    )
    slack = math.sqrt(math.log(40) / 800)
    dkw = Config(lowest=0, method="dkw")
    assert mean_return(returns, 0.0, 1.0, dkw) == pytest.approx((1 - slack) + 2 * (0.5 - slack))


def test_the_bound_is_tight_for_a_threshold() -> None:
    """Success if o + n > 0 in one decision, o = 0.3, sigma 0.5: moving o by -B is the worst attack,
    and leaves exactly the bound."""
    clean = 0.5 * (1 + math.erf(0.3 / 0.5 / math.sqrt(2)))
    for radius in (0.1, 0.3, 1.0):
        left = 0.5 * (1 + math.erf((0.3 - radius) / 0.5 / math.sqrt(2)))
        assert attacked(clean, radius, 0.5) == pytest.approx(left, rel=1e-9)
    assert attacked(0.0, 0.1, 1.0) == 0.0 and attacked(0.7, 0.0, 1.0) == 0.7
    assert 0 < attacked(1 - 1e-12, 12.0, 1.0) < 1e-6


def test_certificates_of_an_evaluation() -> None:
    result = Evaluation(torch.ones(50, dtype=torch.bool), torch.ones(50), torch.ones(50))
    known = certificates(result, 0.5, Config(radii=(0.0, 0.1)))
    bound = 0.05 ** (1 / 50)
    assert known[0] == Certificate(0.0, None, pytest.approx(bound))
    assert known[1].success == pytest.approx(attacked(bound, 0.1, 0.5))
    for config, says in (
        (Config(radii=(0.1,), lowest=2, highest=3), "a return was 1"),
        (Config(radii=(0.1,), lowest=0, highest=-1), "above certify.lowest"),
    ):
        with pytest.raises(ConfigError, match=says):
            certificates(result, 0.5, config)
    with pytest.raises(ConfigError, match=r"certify\.lowest=R"):
        certificates(Evaluation(None, torch.ones(5), torch.ones(5)), 0.5, Config(radii=(0.1,)))


def test_the_command_certifies_smoothed_policies_alone(tmp_path: Path) -> None:
    env = {**node_of("envs.fr3.env.Fr3", task="reach", horizon=3), "threads": 1}
    run = run_folder(tmp_path / "run", env, SMOOTHED_BASE, (1,))
    words = ["execute=1", "episodes=3", "certify.radii=[0.1]", "certify.lowest=-1"]
    words += ["certify.highest=1", f"out={tmp_path / 'out'}"]
    row = evaluate_run(run, ["policy=smoothed", *words], [])
    (found,) = row["certified"]
    assert found["radius"] == 0.1 and -1 <= found["mean_return"] <= row["return"]
    last = read_metrics(tmp_path / "out")[-1]
    assert last["eval/certified_return_0.1"] == found["mean_return"]
    assert last["eval/certified_success_0.1"] == found["success"] == 0.0
    for policy in ([], ["policy=smoothed", "policy.sigma=0"]):
        with pytest.raises(ConfigError, match="policy=smoothed"):
            evaluate_run(run, [*policy, *words], [])
    attacked_too = ["policy=smoothed", "policy.attack=random", "policy.radius=0.1"]
    with pytest.raises(ConfigError, match=r"policy\.attack"):
        evaluate_run(run, [*attacked_too, *words], [])
