"""MDPO, priors, H2O and IWOCS: exact divergences, ratios and values, and SAC as a special case."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from embodied.commands.eval import evaluate_run
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.spec import MASK, Leaf, Spec, mixed_leaf
from embodied.core.tensors import Tensors, each
from embodied.evaluation.task_grid import Floats
from embodied.learners.learner import RunPlan
from embodied.learners.off_policy.h2o import even_cross_entropy, gap_term
from embodied.learners.prior import PriorConfig, prior_of
from embodied.policies.wrappers.iwocs import Iwocs, Member, most_pessimistic
from embodied.training.logger import read_metrics
from tests.builders import (
    LINE,
    SPEC,
    make_learner,
    make_policy,
    node_of,
    random_demos,
    run_folder,
    still,
    transitions,
)
from tests.contract.test_learner import segment
from tests.learners.parts import slopes
from tests.training.test_train import run, settings

OBS = {"state": Leaf((3,))}
ARMS = Spec(OBS, Leaf((), "int64", 0, 2), dt=0.1)
MIXED = Spec({**OBS, MASK: Leaf((5,), low=0.0, high=1.0)}, mixed_leaf((3, 0, 2)), dt=0.1)


def pair(target: str, spec: Spec, **settings: Any) -> tuple[Any, Any, Tensors]:
    """Two policies and five observations."""
    one, other = (make_policy(target, spec, seed, hidden=[8], **settings) for seed in (0, 1))
    for policy in (one, other):
        if getattr(policy, "log_std", None) is not None:
            policy.log_std.data.normal_()
    return one, other, {"state": torch.randn(5, 3)}


def test_divergences_are_those_of_torch() -> None:
    one, other, obs = pair("diagonal_gaussian.DiagonalGaussian", SPEC, head=1.0)
    normal = [Normal(policy(obs), policy.log_std.exp()) for policy in (one, other)]
    torch.testing.assert_close(one.kl(obs, other), kl_divergence(*normal).sum(1))
    one, other, obs = pair("gaussian.Gaussian", SPEC)
    normal = [Normal(mean, log_std.exp()) for mean, log_std in (one(obs), other(obs))]
    torch.testing.assert_close(one.kl(obs, other), kl_divergence(*normal).sum(1))
    one, other, obs = pair("categorical.Categorical", ARMS, head=1.0)
    choice = [Categorical(logits=policy(obs)[0][:, 0, 0]) for policy in (one, other)]
    torch.testing.assert_close(one.kl(obs, other), kl_divergence(*choice))


def test_a_forbidden_class_adds_no_divergence() -> None:
    one, other, obs = pair("categorical.Categorical", MIXED, head=1.0)
    obs[MASK] = torch.tensor([1.0, 0, 1, 1, 0]).expand(5, 5)
    (logs, mean), (other_logs, other_mean) = one(obs), other(obs)
    normal = kl_divergence(Normal(mean, one.log_std.exp()), Normal(other_mean, other.log_std.exp()))
    first = kl_divergence(
        *(Categorical(logits=part[:, 0, 0, [0, 2]]) for part in (logs, other_logs))
    )
    torch.testing.assert_close(one.kl(obs, other), first + normal.sum((1, 2)))


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


def chances(learner: Any) -> Tensor:
    return learner.policy({"state": torch.zeros(1, 3)})[0].detach().exp().flatten()


@pytest.mark.parametrize("t", [0.7, 2.0])
def test_one_iteration_is_the_step_of_mirror_descent(t: float) -> None:
    """pi_{k+1} = pi_k exp(t A) / Z, where PPO would stop at its clip."""
    learner = bandit(t=t, anneal=False, policy_steps=600)
    metrics = learner.update(pull(learner))
    expected = START * (t * REWARD).exp()
    expected = expected / expected.sum()
    torch.testing.assert_close(chances(learner), expected, atol=2e-3, rtol=0)
    divergence = (expected * (expected / START).log()).sum()
    assert metrics["kl"].item() == pytest.approx(divergence.item(), abs=5e-3)


def test_steps_become_smaller() -> None:
    """A run of two batches of four: t is 1, then a half; beyond the end it stays above 0."""
    learner = bandit()
    seen = [learner.update(pull(learner))["t"].item() for _ in range(3)]
    assert seen == pytest.approx([1.0, 0.5, 1e-3])


def test_a_policy_without_a_known_divergence_is_refused() -> None:
    inner = {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian"}
    policy = make_policy("recurrent.Recurrent", SPEC, inner=inner)
    with pytest.raises(ConfigError, match="policy=diagonal_gaussian"):
        make_learner("mdpo.Mdpo", policy)


def trained(target: str, updates: int = 12, **settings: Any) -> Any:
    given = {"hidden": [16], "batch_size": 16, "actor_lr": 3e-3, "temperature_lr": 0.0}
    given |= {"initial_temperature": 1.0, **settings}
    learner = make_learner(target, make_policy("gaussian.Gaussian", SPEC, hidden=[16]), **given)
    for seed in range(updates):
        torch.manual_seed(seed)
        learner.update(transitions(16, SPEC))
    return learner


def test_it_is_sac_where_c_is_lambda() -> None:
    sac = trained("off_policy.sac.Sac").state_dict()
    for c, same in ((1.0, True), (3.0, False)):
        mdpo = trained("mdpo.MdpoOffPolicy", c=c, refresh=5).state_dict()
        assert all(torch.equal(mdpo[key], sac[key]) for key in sac) == same


def test_its_actor_loss_is_that_of_the_paper() -> None:
    """Against E[c log pi + (lambda - c) log pi_k - Q] over many samples."""
    learner = trained("mdpo.MdpoOffPolicy", c=2.0, refresh=100)
    obs = {"state": torch.randn(3, 3).repeat(20_000, 1)}
    with torch.no_grad():
        loss, _ = learner._actor_loss({"obs/state": obs["state"]})
        action, log_prob = learner.policy.sample(obs, torch.randn(60_000, 2))
        before = learner.before.log_prob(obs, action)
        sampled = 2.0 * log_prob + (1.0 - 2.0) * before - learner.critic(obs, action).amin(0)
    assert (log_prob - before).mean() > 0.01
    assert loss.item() == pytest.approx(sampled.mean().item(), abs=0.02)


def test_the_copy_is_renewed_every_m_updates() -> None:
    def is_copy(updates: int) -> bool:
        learner = trained("mdpo.MdpoOffPolicy", updates, refresh=4)
        held = trained("mdpo.MdpoOffPolicy", 4, refresh=4).policy.state_dict()
        return all(
            torch.equal(held[key], value) for key, value in learner.before.state_dict().items()
        )

    assert [is_copy(updates) for updates in (4, 5, 8, 9)] == [False, True, True, False]


ZERO = {"state": torch.zeros(4000, 1)}


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
    learner = make_prior(gaussian(0.4, 0.1), prior_std=[0.2, 0.2])
    learner.prior_policy = gaussian(0.4, 0.3).requires_grad_(False)
    torch.manual_seed(0)
    _, gap = learner.drawn(ZERO)
    exact = math.log(0.2 / 0.4) + (0.4**2 + 0.2**2) / (2 * 0.2**2) - 0.5
    assert gap.mean().item() == pytest.approx(exact, abs=0.15)
    action, gap = learner.drawn({"state": torch.zeros(50, 1)})
    own = learner.policy.log_prob({"state": torch.zeros(50, 1)}, action)
    z, log_std = (torch.atanh(action) - 0.3) / 0.2, math.log(0.2)
    prior = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
    prior = prior.sum(1) - (1 - action.square()).log().sum(1)
    torch.testing.assert_close(gap, own - prior, rtol=1e-3, atol=1e-3)


def test_the_regularised_optimum_is_the_closed_form() -> None:
    """V = lambda log E_rho exp(Q / lambda), which the policy that is trained on Q reaches."""
    slope, lam = 2.0, 0.5
    learner = make_prior(
        gaussian(0.3, -0.2), prior_std=[0.3, 0.3], initial_temperature=lam, temperature_lr=0.0
    )
    slopes(learner.critic, [slope, slope])
    batch = still(torch.zeros(256, 1), torch.zeros(256, 1), torch.zeros(256))
    for _ in range(400):
        learner.soft_actor_step(batch)
    u = torch.linspace(-4, 4, 20_001, dtype=torch.float64)
    prior = (-0.5 * ((u + 0.2) / 0.3).square()).exp()
    exact = lam * math.log(((prior / prior.sum()) * (slope * torch.tanh(u) / lam).exp()).sum())
    action, gap = learner.drawn(ZERO)
    reached = (slope * action[:, 0] - lam * gap).mean().item()
    assert reached == pytest.approx(exact, abs=0.03)
    before = -2.0 * math.tanh(0.2)  # the value of the prior itself
    assert exact > before + 0.2
    slopes(learner.target, [slope, slope])
    backup = learner._backup(torch.ones(4000), torch.full((4000,), 0.9), ZERO)
    assert backup.mean().item() == pytest.approx(1 + 0.9 * exact, abs=0.05)


def test_the_prior_is_a_fixed_point_where_all_is_worth_the_same() -> None:
    learner = make_prior(
        gaussian(0.3, 0.4), prior_std=[0.1, 0.5], temperature_lr=0.0, actor_lr=1e-3
    )
    slopes(learner.critic, [0.0, 0.0])
    batch = still(torch.zeros(512, 1), torch.zeros(512, 1), torch.zeros(512))
    for _ in range(100):
        metrics = learner.soft_actor_step(batch)
    assert metrics["prior_kl"].abs() < 0.02 and "entropy" not in metrics


def test_lambda_is_tuned_to_the_divergence() -> None:
    learner = make_prior(gaussian(0.3, 0.0), prior_std=[0.3, 0.3], kl=0.5, temperature_lr=2e-2)
    slopes(learner.critic, [3.0, 3.0])
    batch = still(torch.zeros(256, 1), torch.zeros(256, 1), torch.zeros(256))
    for _ in range(600):
        metrics = learner.soft_actor_step(batch)
    assert metrics["prior_kl"].item() == pytest.approx(0.5, abs=0.15)


def ppo(**settings: Any) -> Any:
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", SPEC, hidden=[16])
    given = {"horizon": 6, "batch_size": 8, "lam": 0.0, "advantage": "raw", **settings}
    return make_learner("prior.PpoPrior", policy, **given)


def advantages(learner: Any) -> tuple[Tensor, Tensor]:
    """The advantages [24] of a batch and the log ratios [24] by hand."""
    batch = segment(learner, torch.Generator().manual_seed(0))
    table, _ = learner._table(batch, {})
    u = batch["action"].flatten(0, 1)
    obs = {"state": batch["obs/state"].flatten(0, 1)}
    mean = learner.policy(obs)
    own = -0.5 * (u - mean).square() - 0.5 * math.log(2 * math.pi)
    prior = -0.5 * ((u - mean) / 0.5).square() - math.log(0.5) - 0.5 * math.log(2 * math.pi)
    return table["advantage"], (own - prior).sum(1)


def test_ppo_pays_for_the_log_ratio() -> None:
    """The prior is the policy itself, with the deviation 1 held to 0.5."""
    plain, _ = advantages(ppo(prior_weight=0.0))
    paying, ratio = advantages(ppo(prior_weight=0.3))
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


def moved(n: int, gain: float) -> tuple[Tensors, Tensor]:
    """Half real transitions s' = s + a / 2 + noise, half simulated ones of another gain; and the
    analytic log ratios [n]."""
    batch = transitions(n, LINE)
    real, action = torch.arange(n) % 2 == 0, batch["action"]
    means = [0.5 * action, gain * action]
    change = torch.where(real[:, None], *means) + NOISE * torch.randn(n, 1)
    batch |= {"next_obs/state": batch["obs/state"] + change, "real": real}
    exact = sum(sign * (change - mean).square() for sign, mean in zip((-1, 1), means, strict=True))
    assert isinstance(exact, Tensor)
    return batch, exact.squeeze(1) / (2 * NOISE**2)


def trained_h2o(gain: float) -> tuple[Any, Tensors, Tensor]:
    torch.manual_seed(0)
    learner = make_h2o(classifier_noise=0.0)
    first, _ = moved(4000, gain)
    learner.fit({key: value[first["real"]] for key, value in first.items()})
    for _ in range(500):
        learner.descend("classifiers", learner.classifier_loss(moved(256, gain)[0]))
    return learner, *moved(4000, gain)


def test_the_ratio_is_that_of_the_dynamics() -> None:
    learner, batch, exact = trained_h2o(gain=-0.5)
    found = learner.log_ratio(batch)
    assert torch.corrcoef(torch.stack([found, exact]))[0, 1] > 0.9
    assert found.abs().max() <= 4


def test_equal_dynamics_have_the_ratio_one() -> None:
    learner, batch, _ = trained_h2o(gain=0.5)
    assert learner.log_ratio(batch).exp().mean().item() == pytest.approx(1.0, abs=0.05)


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
    batch, _ = moved(8, 0.0)
    q = learner.critic({"state": batch["obs/state"]}, batch["action"])
    torch.manual_seed(3)
    loss, _ = learner._critic_loss(batch)
    torch.manual_seed(3)
    backup = learner._backup(batch["reward"], batch["discount"], {"state": batch["next_obs/state"]})
    ratio = learner.log_ratio(batch).exp().clamp(1e-5, 1.0)
    weight = torch.where(batch["real"], 1.0, ratio)
    assert ratio.min() < 1
    torch.testing.assert_close(loss, ((q - backup).square() * weight).mean(1).sum())


def test_a_run_mixes_recordings_and_the_simulator(tmp_path: Path) -> None:
    demos = random_demos(tmp_path / "set", 4)
    node = settings(tmp_path / "run", demos=demos, steps=60, warmup_steps=20, log_every=20)
    node["learner"] = {"_target_": "embodied.learners.off_policy.h2o.H2o", "batch_size": 16}
    run(node)
    last = [row for row in read_metrics(tmp_path / "run") if "train/classifier_loss" in row][-1]
    assert 0 < last["train/classifier_loss"] < 3


def test_n_step_returns_are_refused() -> None:
    with pytest.raises(ConfigError, match="single steps"):
        make_h2o(n_step=3)


GAMMA = 0.95
CORRIDORS = ((2, 1), (4, 3), (7, 6))  # cells, and the power of the wind with which one slips
WINDS = np.linspace(0, 0.5, 25)
MEMBER = node_of("policies.wrappers.iwocs.Member", hidden=[8], predictor=[8])


def backup(values: Floats, wind: float, corridor: int) -> float:
    """One step of the corridor's value from its start: each cell is passed with probability
    1 - wind^power, else one is back at the start; the end pays 1."""
    cells, power = CORRIDORS[corridor]
    slip = wind**power
    value = 1.0
    for _ in range(cells):
        value = GAMMA * ((1 - slip) * value + slip * values)
    return value


def solve(choice: Any) -> float:
    """The fixed point of the value of the start, the only state with a choice."""
    value = 0.0
    for _ in range(500):
        value = choice([[backup(value, wind, c) for c in range(3)] for wind in WINDS])
    return value


def test_the_windy_walk_equals_robust_value_iteration() -> None:
    """Members are solved for one wind each; the set acts as its most pessimistic member; the next
    wind is the worst one for that. The value that is left equals the robust one."""
    robust = solve(lambda q: np.max(np.min(q, axis=0)))
    winds, members = [0], []  # of WINDS; values and corridors
    for _ in range(3):
        value = solve(lambda q, at=winds[-1]: np.max(q[at]))
        members.append(
            (value, int(np.argmax([backup(value, WINDS[winds[-1]], c) for c in range(3)])))
        )
        values = torch.tensor([[value] for value, _ in members])
        index, known = most_pessimistic(values, torch.ones(len(members), 1, dtype=torch.bool))
        corridor = members[int(index)][1]
        played = [solve(lambda q, at=at, c=corridor: q[at][c]) for at in range(len(WINDS))]
        assert known.all() and min(played) <= values.min().item() + 1e-9
        if min(played) >= values.min().item() - 1e-9:
            break
        winds.append(int(np.argmin(played)))
    assert len(members) == 2 and winds[1] == len(WINDS) - 1
    assert min(played) == pytest.approx(robust, abs=1e-9)
    assert [corridor for _, corridor in members] == [0, 1], "a longer corridor than without wind"


def test_the_least_value_among_those_that_fit() -> None:
    values = torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]])
    fits = torch.tensor([[True, False, False], [True, True, False]])
    index, known = most_pessimistic(values, fits)
    assert index.tolist()[:2] == [1, 1] and known.tolist() == [True, True, False]


def member() -> Member:
    torch.manual_seed(0)
    policy = make_policy("wrappers.iwocs.Member", LINE, hidden=[8], predictor=[8])
    assert isinstance(policy, Member)
    return policy


def test_the_error_and_the_values_by_hand() -> None:
    """A predictor of no change misses by the change in units of the normaliser; the values' target
    has no entropy bonus."""
    policy = member()
    torch.nn.init.zeros_(policy.predictor[-1].weight)
    torch.nn.init.zeros_(policy.predictor[-1].bias)
    policy.encoder.norm.std.fill_(2.0)
    state = torch.tensor([[1.0], [3.0]])
    assert policy.error(state, torch.zeros(2, 1), state + 0.5).tolist() == [0.25, 0.25]
    learner: Any = make_learner("off_policy.iwocs.Iwocs", policy, hidden=[8])
    batch = transitions(6, LINE)
    torch.manual_seed(1)
    found = learner.value_loss(batch)
    torch.manual_seed(1)
    after = {"state": batch["next_obs/state"]}
    action, _ = policy.sample(after, policy.sample_noise(6, True))
    target = batch["reward"] + 0.9 * policy.value(after, action).amin(0).detach()
    error = policy.value({"state": batch["obs/state"]}, batch["action"]) - target
    assert found.item() == pytest.approx(error.square().mean(1).sum().item(), rel=1e-5)


def test_it_learns_to_predict_and_leaves_the_policy_to_sac() -> None:
    """The predictor of s' = s + a / 2 misses by less than a quarter of the change."""
    learner: Any = make_learner("off_policy.iwocs.Iwocs", member(), hidden=[8], batch_size=64)
    names = {id(each) for each in learner.actor_params}
    assert names == {
        id(each)
        for name, each in learner.policy.named_parameters()
        if not name.startswith(("value", "predictor"))
    }
    for _ in range(400):
        batch = transitions(64, LINE)
        batch["next_obs/state"] = batch["obs/state"] + batch["action"] / 2
        metrics = learner.update(batch)
    assert metrics["prediction_error"].item() < 0.06


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
        for weight in part.value.parameters():
            torch.nn.init.zeros_(weight)
        torch.nn.init.constant_(part.value.ensemble.biases[-1], value)
    return made


def test_the_base_acts_until_something_was_seen_and_where_nothing_fits() -> None:
    policy = chooser(2.0, 1.0)
    obs, noise = {"state": torch.tensor([[0.3], [0.3]])}, policy.sample_noise(2)
    usual = policy.base.act(obs, {}, noise[:, :1])[0]
    first, carry = policy.act(obs, policy.initial(2), noise)
    assert torch.equal(first, usual) and torch.equal(carry["acted"], usual.flatten(1))
    moved = {"state": torch.tensor([[0.7], [0.9]])}  # by 0.4 and by 0.6; rho is 0.5
    action, _ = policy.act(moved, carry, noise)
    assert action[0].item() == pytest.approx(np.tanh(2.0)), "the member with the least value"
    assert torch.equal(action[1], policy.base.act(moved, {}, noise[:, :1])[0][1])


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


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="policy=iwocs_member"):
        make_learner("off_policy.iwocs.Iwocs", make_policy("gaussian.Gaussian", LINE))
    with pytest.raises(ConfigError, match="n_step=1"):
        make_learner("off_policy.iwocs.Iwocs", member(), n_step=3)
    assert Iwocs.for_evaluation
