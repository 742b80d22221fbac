"""Policy smoothing: the noise, attacks within their budget, certificates by hand and in a case
where they are tight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.commands.eval import evaluate_run
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.evaluation.certificate import (
    Certificate,
    Config,
    attacked,
    certificates,
    lower_bound,
    mean_return,
)
from embodied.evaluation.evaluate import Evaluation
from embodied.training.logger import read_metrics
from tests.builders import make_policy, node_of, run_folder

SPEC = Spec(
    {"state": Leaf((3,)), "goal": Leaf((2,)), "privileged/mass": Leaf((1,))},
    Leaf((2,), low=-1.0, high=1.0),
    dt=0.1,
)
BASE = node_of("policies.gaussian.Gaussian", hidden=[16])


def made(**settings: Any) -> Any:
    return make_policy("wrappers.smoothed.Smoothed", SPEC, base=BASE, **settings)


def observations(n: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(n, *leaf.shape) for name, leaf in SPEC.obs.items()}


@pytest.mark.parametrize("names", [None, ["goal"]])
def test_the_policy_decides_on_noisy_observations(names: list[str] | None) -> None:
    """Also without exploration; what is not named, and what the policy does not see, is as it
    was."""
    policy, obs = made(sigma=0.2, names=names), observations(4000)
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
    policy = made(sigma=0.0, attack=attack, radius=0.6, attack_decisions=4)
    obs, carry = observations(8), policy.initial(8)
    for decision in range(5):
        noise = policy.sample_noise(8)
        seen, carry = policy.observe(obs, carry, noise)
        off = torch.cat([seen[name] - obs[name] for name in ("state", "goal")], 1).norm(dim=1)
        assert off.tolist() == pytest.approx([0.3 if decision < 4 else 0.0] * 8, abs=1e-5)


def test_gradient_steps_move_the_action_further_than_chance() -> None:
    obs, moved = observations(64), {}
    for attack in ("random", "away"):
        policy = made(sigma=0.0, attack=attack, radius=0.1)
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
            made(**settings)
    with pytest.raises(ConfigError, match="past observations"):
        make_policy("wrappers.smoothed.Smoothed", SPEC, base=past)


def test_clopper_and_pearson_by_hand() -> None:
    """All of n: p^n = alpha. One of two: 1 - (1 - p)^2 = alpha. None: 0."""
    assert lower_bound(10, 10, 0.05) == pytest.approx(0.05**0.1)
    assert lower_bound(1, 2, 0.05) == pytest.approx(1 - math.sqrt(0.95))
    assert lower_bound(0, 5, 0.05) == 0.0
    assert lower_bound(9_000, 10_000, 2.5e-4) < lower_bound(9_000, 10_000, 0.05) < 0.9


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


def test_more_noise_less_attack_and_more_episodes_certify_more() -> None:
    config = Config(lowest=0, highest=1, thresholds=10)
    few, many = torch.linspace(0, 1, 100), torch.linspace(0, 1, 100).repeat(10)
    radii = [mean_return(few, radius, 0.2, config) for radius in (0.0, 0.1, 0.2, 0.9)]
    noises = [mean_return(few, 0.2, sigma, config) for sigma in (0.1, 0.2, 0.4)]
    assert radii == sorted(radii, reverse=True) and noises == sorted(noises)
    assert mean_return(few, 0.1, 0.2, config) < mean_return(many, 0.1, 0.2, config)
    assert all(0 <= bound <= few.mean() for bound in (*radii, *noises))


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
    run = run_folder(tmp_path / "run", env, BASE, (1,))
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
