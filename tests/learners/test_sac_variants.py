"""MDPO, priors, H2O and IWOCS: exact divergences, ratios and values, and SAC as a special case."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from embodied.commands.eval import evaluate_run
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.spec import MASK, Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors, each
from embodied.learners.learner import RunPlan
from embodied.learners.off_policy.h2o import even_cross_entropy, gap_term
from embodied.learners.prior import PriorConfig, prior_of
from embodied.policies.wrappers.iwocs import most_pessimistic
from tests.builders import (
    LINE,
    SPEC,
    make_learner,
    make_policy,
    node_of,
    run_folder,
    still,
    transitions,
)
from tests.contract.test_learner import segment
from tests.learners.parts import constant, copies, moved, slopes

OBS = {"state": Leaf((3,))}
ARMS = Spec(OBS, Leaf((), "int64", 0, 2), dt=0.1)
MIXED = Spec({**OBS, MASK: Leaf((5,), low=0.0, high=1.0)}, mixed_leaf((3, 0, 2)), dt=0.1)


def pair(target: str, spec: Spec, **settings: Any) -> tuple[Any, Any, Tensors]:
    """Two policies and five observations."""
    one, other = (make_policy(target, spec, seed, hidden=[8], **settings) for seed in (0, 1))
    if getattr(one, "log_std", None) is not None:
        one.log_std.data.normal_()
        other.log_std.data.normal_()
    return one, other, {"state": torch.randn(5, 3)}


@pytest.mark.parametrize("kind", ["diagonal_gaussian", "gaussian", "categorical"])
def test_divergences_are_those_of_torch(kind: str) -> None:
    name = "".join(word.capitalize() for word in kind.split("_"))
    settings = {} if kind == "gaussian" else {"head": 1.0}
    spec = ARMS if kind == "categorical" else SPEC
    one, other, obs = pair(f"{kind}.{name}", spec, **settings)
    made: dict[str, Callable[[Any], Any]] = {
        "diagonal_gaussian": lambda policy: Normal(policy(obs), policy.log_std.exp()),
        "gaussian": lambda policy: Normal(policy(obs)[0], policy(obs)[1].exp()),
        "categorical": lambda policy: Categorical(logits=policy(obs)[0][:, 0]),
    }
    expected = kl_divergence(made[kind](one), made[kind](other)).sum(1)
    torch.testing.assert_close(one.kl(obs, other), expected)


def test_a_forbidden_class_adds_no_divergence() -> None:
    one, other, obs = pair("categorical.Categorical", MIXED, head=1.0)
    obs[MASK] = torch.tensor([1.0, 0, 1, 1, 0]).expand(5, 5)
    (logs, mean), (other_logs, other_mean) = one(obs), other(obs)
    normal = kl_divergence(Normal(mean, one.log_std.exp()), Normal(other_mean, other.log_std.exp()))
    allowed = [Categorical(logits=part[:, 0, 0, [0, 2]]) for part in (logs, other_logs)]
    expected = kl_divergence(*allowed) + normal.sum((1, 2))
    torch.testing.assert_close(one.kl(obs, other), expected)


START = torch.tensor([0.5, 0.25, 0.25])
REWARD = torch.tensor([1.0, 0.0, -1.0])


def pull(learner: Any) -> Tensors:
    """A batch of four arms as often as START says, whose rewards are REWARD."""
    arm = torch.tensor([[0, 0, 1, 2]])
    yes = torch.ones(1, 4, dtype=torch.bool)
    state = torch.zeros(1, 4, 3)
    return {
        "obs/state": state,
        "next_obs/state": state,
        "action": arm,
        "reward": REWARD[arm],
        "discount": torch.zeros(1, 4),
        **{key: yes for key in ("ended", "first", "valid")},
    }


def bandit(**settings: Any) -> Any:
    policy = make_policy("categorical.Categorical", ARMS, hidden=[4])
    policy.net[-1].weight.data.zero_()
    policy.net[-1].bias.data.copy_(START.log())
    given = {"normalize": False, "advantage": "raw", "grad_clip": 0.0, "lr": 0.03, **settings}
    sizes = {"horizon": 1, "batch_size": 4, "epochs": 1}
    return make_learner("mdpo.Mdpo", policy, RunPlan(decisions=8), **sizes, **given)


@pytest.mark.parametrize("t", [0.7, 2.0])
def test_one_iteration_is_the_step_of_mirror_descent(t: float) -> None:
    """pi_{k+1} = pi_k exp(t A) / Z, where PPO would stop at its clip."""
    learner = bandit(t=t, anneal=False, policy_steps=600)
    metrics = learner.update(pull(learner))
    expected = START * (t * REWARD).exp()
    expected = expected / expected.sum()
    chances = learner.policy({"state": torch.zeros(1, 3)})[0].detach().exp().flatten()
    torch.testing.assert_close(chances, expected, atol=2e-3, rtol=0)
    divergence = (expected * (expected / START).log()).sum()
    assert metrics["kl"].item() == pytest.approx(divergence.item(), abs=5e-3)


def test_steps_become_smaller() -> None:
    """A run of two batches of four: t is 1, then a half; beyond the end it stays above 0."""
    learner = bandit()
    seen = [learner.update(pull(learner))["t"].item() for _ in range(3)]
    assert seen == pytest.approx([1.0, 0.5, 1e-3])


def trained(target: str, updates: int = 12, **settings: Any) -> Any:
    given = {"hidden": [16], "batch_size": 16, "actor_lr": 3e-3, "temperature_lr": 0.0}
    given |= {"initial_temperature": 1.0, **settings}
    learner = make_learner(target, make_policy("gaussian.Gaussian", SPEC, hidden=[16]), **given)
    for seed in range(updates):
        torch.manual_seed(seed)
        learner.update(transitions(16, SPEC))
    return learner


@pytest.mark.parametrize(("c", "same"), [(1.0, True), (3.0, False)])
def test_it_is_sac_where_c_is_lambda(c: float, same: bool) -> None:
    sac = trained("off_policy.sac.Sac").state_dict()
    mdpo = trained("mdpo.MdpoOffPolicy", c=c, refresh=5).state_dict()
    assert all(torch.equal(mdpo[key], sac[key]) for key in sac) == same


@torch.no_grad()
def test_its_actor_loss_is_that_of_the_paper() -> None:
    """Against E[c log pi + (lambda - c) log pi_k - Q] over many samples."""
    with torch.enable_grad():
        learner = trained("mdpo.MdpoOffPolicy", c=2.0, refresh=100)
    obs = {"state": torch.randn(3, 3).repeat(20_000, 1)}
    loss, _ = learner._actor_loss({"obs/state": obs["state"]})
    action, log_prob = learner.policy.sample(obs, torch.randn(60_000, 2))
    before = learner.before.log_prob(obs, action)
    sampled = 2.0 * log_prob - before - learner.critic(obs, action).amin(0)
    assert (log_prob - before).mean() > 0.01
    assert loss.item() == pytest.approx(sampled.mean().item(), abs=0.02)


def test_the_copy_is_renewed_every_m_updates() -> None:
    held = copies(trained("mdpo.MdpoOffPolicy", 4, refresh=4).policy.parameters())
    kept = (
        trained("mdpo.MdpoOffPolicy", updates, refresh=4).before.parameters()
        for updates in (4, 5, 8, 9)
    )
    assert [any(moved(held, before)) for before in kept] == [True, False, False, True]


ZERO = {"state": torch.zeros(4000, 1)}
IDLE = still(torch.zeros(256, 1), torch.zeros(256, 1), torch.zeros(256))


def gaussian(std: float, mean: float) -> Any:
    """A policy on a line with one mean and, at the start, one deviation everywhere."""
    bounds = [math.log(std) - 2, math.log(std) + 2]
    policy = make_policy("gaussian.Gaussian", LINE, hidden=[16], log_std=bounds, zero_head=True)
    policy.net[-1].bias.data[0] = mean
    return policy


def make_prior(policy: Any, **settings: Any) -> Any:
    given = {"hidden": (), "actor_lr": 1e-2, **settings}
    return make_learner("prior.SacPrior", policy, **given)


def test_the_divergence_by_hand() -> None:
    """The prior is the saved policy with its deviation held to 0.2."""
    learner = make_prior(gaussian(0.4, 0.1), prior_std=[0.2, 0.2])
    learner.prior_policy = gaussian(0.4, 0.3).requires_grad_(False)
    action, gap = learner.drawn(ZERO)
    exact = kl_divergence(Normal(0.1, 0.4), Normal(0.3, 0.2)).item()
    assert gap.mean().item() == pytest.approx(exact, abs=0.15)
    kept = action.abs()[:, 0] < 0.9
    own = learner.policy.log_prob(ZERO, action)
    prior = Normal(0.3, 0.2).log_prob(torch.atanh(action)) - (1 - action.square()).log()
    found, expected = gap[kept], (own - prior.sum(1))[kept]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_regularised_optimum_is_the_closed_form() -> None:
    """V = lambda log E_rho exp(Q / lambda), which the policy that is trained on Q reaches."""
    slope, lam = 2.0, 0.5
    fixed = {"initial_temperature": lam, "temperature_lr": 0.0}
    learner = make_prior(gaussian(0.3, -0.2), prior_std=[0.3, 0.3], **fixed)
    slopes(learner.critic, [slope, slope])
    for _ in range(400):
        learner.soft_actor_step(IDLE)
    u = torch.linspace(-4, 4, 20_001, dtype=torch.float64)
    prior = (-0.5 * ((u + 0.2) / 0.3).square()).exp()
    exact = lam * math.log(((prior / prior.sum()) * (slope * torch.tanh(u) / lam).exp()).sum())
    assert exact > -2.0 * math.tanh(0.2) + 0.2, "more than the value of the prior itself"
    slopes(learner.target, [slope, slope])
    backup = learner._backup(torch.ones(4000), torch.full((4000,), 0.9), ZERO)
    assert backup.mean().item() == pytest.approx(1 + 0.9 * exact, abs=0.03)


def test_lambda_is_tuned_to_the_divergence() -> None:
    learner = make_prior(gaussian(0.3, 0.0), prior_std=[0.3, 0.3], kl=0.5, temperature_lr=2e-2)
    slopes(learner.critic, [3.0, 3.0])
    for _ in range(600):
        metrics = learner.soft_actor_step(IDLE)
    assert metrics["prior_kl"].item() == pytest.approx(0.5, abs=0.15)


def advantages(**settings: Any) -> tuple[Tensor, Tensor]:
    """PPO's advantages [24] of a batch, and the log ratios [24] by hand."""
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", SPEC, hidden=[16])
    given = {"horizon": 6, "batch_size": 8, "lam": 0.0, "advantage": "raw", **settings}
    learner = make_learner("prior.PpoPrior", policy, **given)
    batch = segment(learner, torch.Generator().manual_seed(0))
    table, _ = learner._table(batch, {})
    u = batch["action"].flatten(0, 1)
    mean = learner.policy({"state": batch["obs/state"].flatten(0, 1)})
    ratio = Normal(mean, 1.0).log_prob(u) - Normal(mean, 0.5).log_prob(u)
    return table["advantage"], ratio.sum(1)


def test_ppo_pays_for_the_log_ratio() -> None:
    """The prior is the policy itself, with the deviation 1 held to 0.5."""
    plain, _ = advantages(prior_weight=0.0)
    paying, ratio = advantages(prior_weight=0.3)
    torch.testing.assert_close(paying, plain - 0.3 * ratio, rtol=1e-4, atol=1e-5)


def test_the_prior_of_a_run(tmp_path: Path) -> None:
    saved = gaussian(0.3, 0.1)
    checkpoint.save(tmp_path / "checkpoints" / "00000001", saved, 1)
    policy = make_policy("gaussian.Gaussian", LINE, hidden=[32])
    prior = prior_of(PriorConfig(prior=str(tmp_path)), policy, LINE)
    before = each(saved.state_dict(), torch.clone)
    assert all(torch.equal(prior.state_dict()[key], value) for key, value in before.items())
    assert not any(weight.requires_grad for weight in prior.parameters())
    other = make_policy("deterministic.Deterministic", LINE)
    with pytest.raises(ConfigError, match="have to be the same"):
        prior_of(PriorConfig(prior=str(tmp_path)), other, LINE)


NOISE = 0.3  # std of both dynamics


def make_h2o(**settings: Any) -> Any:
    policy = make_policy("gaussian.Gaussian", LINE, hidden=[16])
    given = {"hidden": [16], "classifier_hidden": [64, 64], "classifier_lr": 3e-3, **settings}
    return make_learner("off_policy.h2o.H2o", policy, **given)


def from_both(n: int, gain: float) -> tuple[Tensors, Tensor]:
    """Half real transitions s' = s + a / 2 + noise, half simulated ones of another gain; and the
    analytic log ratios [n]."""
    batch = transitions(n, LINE)
    real, action = torch.arange(n) % 2 == 0, batch["action"]
    means = [0.5 * action, gain * action]
    change = torch.where(real[:, None], *means) + NOISE * torch.randn(n, 1)
    batch |= {"next_obs/state": batch["obs/state"] + change, "real": real}
    exact = (change - means[1]).square() - (change - means[0]).square()
    return batch, exact.squeeze(1) / (2 * NOISE**2)


def test_the_ratio_is_that_of_the_dynamics() -> None:
    torch.manual_seed(0)
    learner = make_h2o(classifier_noise=0.0)
    first, _ = from_both(4000, -0.5)
    learner.fit({key: value[first["real"]] for key, value in first.items()})
    for _ in range(500):
        learner.descend("classifiers", learner.classifier_loss(from_both(256, -0.5)[0]))
    batch, exact = from_both(4000, -0.5)
    found = learner.log_ratio(batch)
    assert torch.corrcoef(torch.stack([found, exact]))[0, 1] > 0.9
    assert found.abs().max() <= 4


def test_the_cross_entropy_counts_both_kinds_equally() -> None:
    logit, real = torch.tensor([2.0, -1.0, 0.0]), torch.tensor([True, False, False])
    expected = math.log1p(math.exp(-2)) + (math.log1p(math.exp(-1)) + math.log(2)) / 2
    assert even_cross_entropy(logit, real).item() == pytest.approx(expected / 2)


def test_the_gap_by_hand() -> None:
    q = torch.tensor([[3.0, 1.0, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    gap, real = torch.tensor([9.0, 1.0, 3.0, 9.0]), torch.tensor([True, False, False, True])
    found = gap_term(q, gap, real)
    expected = math.log(math.e / 4 + 3 * math.e**2 / 4) - 4
    assert found.tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    found[1].backward()
    assert q.grad is not None
    assert q.grad[1].tolist() == pytest.approx([-0.5, 0.25, 0.75, -0.5])
    only = gap_term(q, gap, torch.ones(4, dtype=torch.bool))  # as in pretraining
    assert only.isfinite().all()


def test_simulated_transitions_weigh_by_the_ratio() -> None:
    learner = make_h2o(gap_weight=0.0)
    learner.td_errors = []
    batch, _ = from_both(8, 0.0)
    following = {"state": batch["next_obs/state"]}
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    torch.manual_seed(3)
    loss, _ = learner._critic_loss(batch)
    torch.manual_seed(3)
    backup = learner._backup(batch["reward"], batch["discount"], following)
    ratio = learner.log_ratio(batch).exp().clamp(1e-5, 1.0)
    weight = torch.where(batch["real"], 1.0, ratio)
    assert ratio.min() < 1
    torch.testing.assert_close(loss, ((q - backup).square() * weight).mean(1).sum())


MEMBER = node_of("policies.wrappers.iwocs.Member", hidden=[8], predictor=[8])


def test_the_least_value_among_those_that_fit() -> None:
    values = torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]])
    fits = torch.tensor([[True, False, False], [True, True, False]])
    index, known = most_pessimistic(values, fits)
    assert index.tolist()[:2] == [1, 1] and known.tolist() == [True, True, False]


def test_the_error_and_the_values_by_hand() -> None:
    """A predictor of no change misses by the change in units of the normaliser; the values' target
    has no entropy bonus."""
    policy = make_policy("wrappers.iwocs.Member", LINE, hidden=[8], predictor=[8])
    torch.nn.init.zeros_(policy.predictor[-1].weight)
    torch.nn.init.zeros_(policy.predictor[-1].bias)
    policy.encoder.norm.std.fill_(2.0)
    state = torch.tensor([[1.0], [3.0]])
    assert policy.error(state, torch.zeros(2, 1), state + 0.5).tolist() == [0.25, 0.25]
    learner = make_learner("off_policy.iwocs.Iwocs", policy, hidden=[8])
    batch = transitions(6, LINE)
    torch.manual_seed(1)
    found = learner.value_loss(batch)
    torch.manual_seed(1)
    after = {"state": batch["next_obs/state"]}
    action, _ = policy.sample(after, policy.sample_noise(6, True))
    target = batch["reward"] + 0.9 * policy.value(after, action).amin(0).detach()
    error = policy.value({"state": batch["obs/state"]}, batch["action"]) - target
    assert found.item() == pytest.approx(error.square().mean(1).sum().item(), rel=1e-5)


def test_the_policy_of_a_member_is_left_to_sac() -> None:
    policy = make_policy("wrappers.iwocs.Member", LINE, hidden=[8], predictor=[8])
    learner = make_learner("off_policy.iwocs.Iwocs", policy, hidden=[8], batch_size=64)
    names = {name: id(each) for name, each in policy.named_parameters()}
    sacs = {each for name, each in names.items() if not name.startswith(("value", "predictor"))}
    assert {id(each) for each in learner.actor_params} == sacs
    before = copies(policy.predictor.parameters())
    learner.update(transitions(64, LINE))
    assert all(moved(before, policy.predictor.parameters()))


def chooser(*values: float, rho: float = 0.5) -> Any:
    """A set whose member i acts with tanh(i + 1), predicts no change and has a constant value."""
    base = node_of("policies.gaussian.Gaussian", hidden=[8])
    made: Any = make_policy(
        "wrappers.iwocs.Iwocs", LINE, base=base, members=[MEMBER] * len(values), rho=rho
    )
    for k, (part, value) in enumerate(zip(made.members, values, strict=True)):
        for net, end in ((part.net, k + 1.0), (part.predictor, 0.0)):
            torch.nn.init.zeros_(net[-1].weight)
            torch.nn.init.constant_(net[-1].bias, end)
        constant(part.value.ensemble, [value] * part.value.ensemble.n)
    return made


def test_the_base_acts_until_something_was_seen_and_where_nothing_fits() -> None:
    policy = chooser(2.0, 1.0)
    obs, noise = {"state": torch.tensor([[0.3], [0.3]])}, policy.sample_noise(2)
    usual = policy.base.act(obs, {}, noise[:, :1])[0]
    first, carry = policy.act(obs, policy.initial(2), noise)
    assert torch.equal(first, usual) and torch.equal(carry["acted"], usual.flatten(1))
    seen = {"state": torch.tensor([[0.7], [0.9]])}  # moved by 0.4 and by 0.6; rho is 0.5
    action, _ = policy.act(seen, carry, noise)
    assert action[0].item() == pytest.approx(math.tanh(2.0)), "the member with the least value"
    assert torch.equal(action[1], policy.base.act(seen, {}, noise[:, :1])[0][1])


def test_a_set_of_runs_is_evaluated(tmp_path: Path) -> None:
    env = {**node_of("envs.fr3.env.Fr3", task="reach", horizon=3), "threads": 1}
    base = run_folder(
        tmp_path / "base", env, node_of("policies.gaussian.Gaussian", hidden=[8]), (1,)
    )
    runs = [run_folder(tmp_path / str(step), env, MEMBER, (step,)) for step in (2, 3)]
    words = ["policy=iwocs", f"policy.members=[{runs[0]},{runs[1]}]", "execute=1", "episodes=2"]
    row = evaluate_run(base, words, [])
    assert row["episodes"] == 2 and len(row["policy"]["members"]) == 2
    assert json.loads((base / "evaluations.jsonl").read_text())["policy"] == row["policy"]
    for word in (f"policy.members=[{base}]", "policy.members=[]"):
        with pytest.raises(ConfigError, match=r"policy\.members"):
            evaluate_run(base, ["policy=iwocs", word, "execute=1"], [])
