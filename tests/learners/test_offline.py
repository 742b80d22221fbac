"""IQL, Cal-QL, FQL, Q-chunking, f-DVL, ReCOIL, CPL, Uni-O4: losses by hand, problems to solve."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, cat, under
from embodied.learners.imitation.behavior_cloning import behaviour
from embodied.learners.learner import RunPlan
from embodied.learners.off_policy.sac import Sac
from embodied.learners.offline.calql import CalQl, calibrated, conservative_gap
from embodied.learners.offline.cpl import contrastive_loss
from embodied.learners.offline.f_dvl import Divergence, dual_loss, reverse_kl_loss
from embodied.learners.offline.fql import Fql, value_loss
from embodied.learners.offline.iql import Iql, awr_weight, expectile_loss, falling
from embodied.learners.offline.qchunking import QChunking
from embodied.learners.offline.uni_o4 import ModelGate
from embodied.models.dynamics import Dynamics, Fit, Prediction
from embodied.training.collector import Collector
from tests.builders import LINE, SPEC, make_learner, make_policy, node_of, still, transitions
from tests.learners.parts import constant, learner_of, slopes, two_modes
from tests.toy_envs import Config, Counter

IQL = partial(learner_of, "offline.iql.Iql", hidden=[32], batch_size=4, run=RunPlan(100))
make = partial(IQL, "deterministic.Deterministic")


def batch_of(n: int) -> Tensors:
    batch = transitions(n, SPEC)
    batch["discount"][-1] = 0.0
    return batch


def sure(learner: Iql, q: list[float]) -> None:
    """Target critic i answers q[i] everywhere, V is 1."""
    constant(learner.target.ensemble, q)
    constant(learner.value.net, [1.0])


def test_expectile_and_weights_by_hand() -> None:
    gap = torch.tensor([2.0, -1.0, 0.5])
    expected = (0.7 * 4 + 0.3 * 1 + 0.7 * 0.25) / 3
    assert expectile_loss(gap, 0.7).item() == pytest.approx(expected)
    assert expectile_loss(gap, 0.5).item() == pytest.approx(0.5 * gap.square().mean().item())
    weight = awr_weight(torch.tensor([0.0, 1.0, -2.0, 5.0, 1e9]), 3.0, 100.0)
    assert weight.tolist() == pytest.approx([1, math.exp(3), math.exp(-6), 100, 100], rel=1e-5)
    even = awr_weight(torch.tensor([-2.0, 1e9]), make(beta=0.0).config.beta, 100.0)
    assert even.tolist() == [1, 1]  # the control: IQL whose advantages do not weigh


def test_a_deviation_that_the_loss_leaves_out_stays_as_it_is() -> None:
    learner = IQL("diagonal_gaussian.DiagonalGaussian")
    before = learner.policy.log_std.detach().clone()
    means = [p.detach().clone() for p in learner.policy.net.parameters()]
    learner.update(batch_of(4))
    assert torch.equal(learner.policy.log_std, before)
    assert any(
        not torch.equal(a, b) for a, b in zip(means, learner.policy.net.parameters(), strict=True)
    )


def test_the_rate_falls_to_zero() -> None:
    assert [falling(p) for p in (0.0, 0.5, 1.0, 2.0)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    for cosine, expected in ((True, 1.5e-4), (False, 3e-4)):
        learner = make(cosine=cosine)
        learner.done = 50
        learner.update(batch_of(4))
        assert learner.optims["actor"].param_groups[0]["lr"] == pytest.approx(expected)


def test_the_three_losses_by_hand() -> None:
    """Q' = min(4, 3) = 3 and V = 1 everywhere: the advantage is 2, the weight exp(0.2)."""
    learner = make(expectile=0.8, beta=0.1)
    sure(learner, [4.0, 3.0])
    batch = batch_of(4)
    losses, metrics = learner._loss(batch)
    obs = {"state": batch["obs/state"]}
    regression = (learner.policy(obs) - batch["action"]).square().mean()
    backup = torch.tensor([0.9, 1.9, 2.9, 3.0])  # r + 0.9 V, and r where the world ended
    error = (learner.critic(obs, batch["action"]) - backup).square().mean(1).sum()
    expected = [0.8 * 4, math.exp(0.2) * regression.item(), error.item()]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert metrics["advantage"].item() == 2
    assert metrics["weight"].item() == pytest.approx(math.exp(0.2))


def test_each_loss_moves_its_own_part() -> None:
    learner = make()
    losses, _ = learner._loss(batch_of(4))
    parts = (learner.value, learner.policy, learner.critic)
    for loss, mine in zip(losses, parts, strict=True):
        learner.zero_grad()
        loss.backward(retain_graph=True)
        for part in parts:
            grads = [p.grad for p in part.parameters() if p.grad is not None]
            assert any(grad.any() for grad in grads) == (part is mine)


def test_the_gaussian_likelihood_is_weighted() -> None:
    """With policy.imitate=nll the loss is -exp(beta A) log pi(a|s), per action element."""
    learner = IQL("gaussian.Gaussian", shape={"hidden": [32], "imitate": "nll"}, beta=0.1)
    sure(learner, [3.0, 3.0])
    batch = batch_of(4)
    log_prob = learner.policy.log_prob({"state": batch["obs/state"]}, batch["action"])
    losses, _ = learner._loss(batch)
    assert losses[1].item() == pytest.approx(-math.exp(0.2) * log_prob.mean().item() / 2, rel=1e-5)


def test_a_flow_policy_can_be_extracted() -> None:
    learner = IQL("generative.flow.Flow", shape={"chunk": 3, "width": 16, "depth": 1})
    steps = {"executed_steps": torch.tensor([3, 3, 2, 1])}
    batch = batch_of(4) | {"action": torch.rand(4, 6) * 2 - 1} | steps
    assert torch.isfinite(learner.update(batch)["actor_loss"])


def test_prefers_the_better_half_of_the_data() -> None:
    """One state; the data pulls to -0.5 with reward 0 three times in four, to 0.5 with reward 1.

    Plain cloning ends at their mean, -0.25; V_0.9 is 0.75 (0.9 p (1 - v) = 0.1 (1 - p) v, p = 1/4),
    the weights e^1.25 = 3.49 and, three times, e^-3.75 = 0.0235; (3.49 - 0.07) / (3.49 + 0.07) / 2
    is 0.48.
    """
    rates = {"actor_lr": 3e-3, "critic_lr": 3e-3, "value_lr": 3e-3}
    learner = make(beta=5.0, expectile=0.9, cosine=False, tau=0.1, **rates)
    good = torch.arange(256) % 4 == 0
    side = torch.where(good, 0.5, -0.5)
    for _ in range(400):
        learner.update(still(torch.zeros(256, 3), side[:, None].expand(-1, 2), good.float()))
    value = learner.value({"state": torch.zeros(1, 3)}).item()
    action = learner.policy.act({"state": torch.zeros(1, 3)}, {}, torch.zeros(1, 2))[0]
    assert value == pytest.approx(0.75, abs=0.02)
    assert action.flatten().tolist() == pytest.approx([0.48, 0.48], abs=0.01)


SAC = "off_policy.sac.Sac"


def make_calql(
    target: str = "offline.calql.CalQl", std: float = math.exp(-1.5), **settings: object
) -> Sac:
    """With a policy that starts at the deviation `std` before squashing."""
    log_std = [math.log(std) - 1, math.log(std) + 1]
    policy = make_policy("gaussian.Gaussian", SPEC, hidden=[32], log_std=log_std)
    return make_learner(target, policy, **{"hidden": [32], "batch_size": 4, **settings})


def batch_of_calql(n: int) -> Tensors:
    torch.manual_seed(1)
    return {**transitions(n, SPEC), "returns": torch.arange(float(n)) * 10}


def test_the_floor_by_hand_and_below_it_nothing_is_pushed() -> None:
    """One critic, two rows, one action of each kind: here, there, uniform."""
    q = torch.tensor([[[1.0, 5.0, 1.0], [2.0, -3.0, 0.0]]])
    log_prob = torch.tensor([[0.5, 1.0, -1.0], [0.0, 0.0, -1.0]])
    floor = torch.tensor([3.0, -1.0])
    # The uniform action's value has no floor.
    expected = [[[3 - 0.5, 5 - 1.0, 1 + 1.0], [2.0, -1.0, 0 + 1.0]]]
    assert calibrated(q, log_prob, floor).tolist() == expected
    assert calibrated(q, log_prob, None).tolist() == [[[0.5, 4.0, 2.0], [2.0, -3.0, 1.0]]]
    one = torch.tensor([[[1.0, 5.0, 1.0]]], requires_grad=True)
    calibrated(one, torch.zeros(1, 3), torch.tensor([3.0])).logsumexp(2).sum().backward()
    assert one.grad is not None
    expected_slopes = torch.softmax(torch.tensor([3.0, 5.0, 1.0]), 0).tolist()
    assert one.grad.flatten().tolist() == pytest.approx([0.0, *expected_slopes[1:]])


def test_the_gap_by_hand() -> None:
    values = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]])
    q = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    # log 2 + (0 - 1 + 1 - 2) / 2, and log 2 + (2 - 0 + 2 - 4) / 2
    assert conservative_gap(values, q).item() == pytest.approx(2 * math.log(2) - 1)


def test_where_actions_come_from_and_how_dense_they_are() -> None:
    learner = make_calql(samples=3)
    assert isinstance(learner, CalQl)
    obs, following = ({"state": torch.randn(4, 3)} for _ in range(2))
    actions, log_prob = learner._elsewhere(obs, following)
    assert actions.shape == (4, 9, 2) and log_prob.shape == (4, 9)
    for first, seen in ((0, obs), (3, following)):
        many = {"state": seen["state"].repeat_interleave(3, 0)}
        density = learner.policy.log_prob(many, actions[:, first : first + 3].flatten(0, 1))
        found = log_prob[:, first : first + 3].flatten()
        torch.testing.assert_close(found, density, rtol=1e-3, atol=1e-3)
    assert torch.equal(log_prob[:, 6:], torch.full((4, 3), math.log(0.25)))
    assert actions[:, 6:].abs().max() <= 1


def test_without_the_term_it_is_sac_and_uncalibrated_it_needs_no_returns() -> None:
    one, other = make_calql(conservative=0.0, entropy_in_backup=True), make_calql(SAC)
    losses = [learner._critic_loss(batch_of_calql(4))[0].item() for learner in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    terms: list[float] = []
    for calibrate, returns in ((True, -1e9), (False, 0.0), (True, 0.0)):
        learner: Any = make_calql(calibrate=calibrate)
        batch = batch_of_calql(4) | {"returns": torch.full((4,), returns)}
        assert learner.columns == (("returns",) if calibrate else ())
        q = learner.critic({"state": batch["obs/state"]}, batch["action"])
        torch.manual_seed(2)
        terms.append(learner.critic_terms(batch, q).item())
    assert terms[0] == pytest.approx(terms[1]) and terms[2] > terms[1] + 0.01


FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "width": 16, "depth": 1}


def make_fql(chunk: int = 1, **settings: Any) -> Fql:
    policy = make_policy(
        "generative.one_step.OneStep", LINE, flow=FLOW, hidden=[32, 32], chunk=chunk
    )
    given = {"batch_size": 16, "hidden": [16], "normalize_q": False, **settings}
    return make_learner("offline.fql.Fql", policy, **given)


def test_value_loss_by_hand() -> None:
    q = torch.tensor([1.0, -3.0, 5.0], requires_grad=True)
    assert value_loss(q, False).item() == -1.0
    loss = value_loss(q, True)  # mean |Q| is 3
    assert loss.item() == pytest.approx(-1 / 3)
    loss.backward()
    assert q.grad is not None  # the scale has no slope: each of three gets -1/3 * 1/3
    torch.testing.assert_close(q.grad, torch.full((3,), -1 / 9))


def test_the_target_follows_the_one_step_policy() -> None:
    learner = make_fql(hidden=())
    torch.nn.init.constant_(learner.policy.net[-1].bias, 1.0)  # some actions are cut off
    slopes(learner.target, [1.0, -2.0])
    following, reward = {"state": torch.randn(8, 1)}, torch.arange(8.0)
    discount = torch.tensor([0.9] * 4 + [0.81] * 3 + [0.0])
    torch.manual_seed(2)
    action = learner.policy(following, torch.randn(8, 1))[:, 0].clamp(-1, 1)
    assert action.max() == 1.0 and action.min() < 1.0
    torch.manual_seed(2)
    backup = learner._backup(reward, discount, following)
    torch.testing.assert_close(backup, reward - discount * 0.5 * action)


def test_the_three_terms_by_hand() -> None:
    learner = make_fql(chunk=2, hidden=())
    slopes(learner.critic, [1.0, 3.0])  # of the last of two steps
    steps = {"executed_steps": torch.tensor([2, 1] * 8)}
    batch = two_modes(16) | {"action": torch.rand(16, 2) * 2 - 1} | steps
    obs = under(batch, "obs")
    torch.manual_seed(3)
    flow, distil, value = learner._actor_loss(batch)
    torch.manual_seed(3)
    noise = torch.randn(16, 2)
    mu, ode = learner.policy(obs, noise), learner.policy.flow.act(obs, {}, noise)[0].flatten(1)
    torch.testing.assert_close(distil, (mu - ode).square().mean())
    torch.testing.assert_close(value, -(2 * mu[:, 1].clamp(-1, 1)).mean())
    torch.testing.assert_close(
        flow, learner.policy.flow.loss(behaviour(batch, learner.policy)).mean()
    )


def test_what_each_term_moves() -> None:
    """Distillation and value move the one-step network only, never the flow."""
    learner = make_fql()
    flow, distil, value = learner._actor_loss(two_modes(16))
    (distil + value).backward(retain_graph=True)
    assert all(weight.grad is None for weight in learner.policy.flow.parameters())
    assert all(weight.grad is not None for weight in learner.policy.net.parameters())
    learner.policy.zero_grad()
    flow.backward()
    assert all(weight.grad is not None for weight in learner.policy.flow.parameters())
    assert all(weight.grad is None for weight in learner.policy.net.parameters())


def test_chunks_that_do_not_fit_are_refused() -> None:
    wide = node_of("policies.wrappers.best_of_n.BestOfN", base=FLOW, n=2, critic=CRITIC)
    with pytest.raises(ConfigError, match="as large as its chunk"):
        make_policy("generative.one_step.OneStep", LINE, flow=wide)
    with pytest.raises(ConfigError, match="hold 1 steps per decision"):
        make_qchunk(2)._actor_loss(two_modes(4))


GAMMA = 0.9
CRITIC = {"_target_": "embodied.learners.critics.Critic", "n": 2, "hidden": [16]}


def make_qchunk(
    chunk: int = 1, n: int = 3, hidden: tuple[int, ...] = (16,), **settings: Any
) -> QChunking:
    critic = {**CRITIC, "hidden": list(hidden)}
    policy = make_policy(
        "wrappers.best_of_n.BestOfN", LINE, base=FLOW, critic=critic, n=n, chunk=chunk
    )
    given = {"batch_size": 16, "gamma": GAMMA, **settings}
    return make_learner("offline.qchunking.QChunking", policy, **given)


class Known(nn.Module):
    """Two critics that know what the Counter still pays: its first row ends for good at 3, its
    second goes on for ever behind the clock, sum_i gamma^i (s + i)."""

    def forward(self, obs: Tensors, action: Tensor) -> Tensor:
        s = obs["state"][:, 0]
        ending = torch.tensor([GAMMA + 2 * GAMMA**2, 1 + 2 * GAMMA, 2.0, 0.0])
        going = s / (1 - GAMMA) + GAMMA / (1 - GAMMA) ** 2
        return torch.where(s < 100, ending[s.long().clamp(max=3)], going).expand(2, -1)


def lived(chunk: int) -> Tensors:
    """Rows of the running world; of recordings, see tests/datasets/test_transitions.py."""
    policy = make_qchunk(chunk).policy
    rollout = Collector(Counter(Config()), policy, GAMMA, executed_steps=True)
    return cat([rows for _ in range(20) if (rows := rollout.step()[0])])


@pytest.mark.parametrize("chunk", [1, 2, 4, 7])
def test_the_target_is_the_return_at_every_distance_from_the_end(chunk: int) -> None:
    learner, rows = make_qchunk(chunk), lived(chunk)
    learner.target = Known()
    backup = learner._backup(rows["reward"], rows["discount"], under(rows, "next_obs"))
    expected = learner.target({"state": rows["obs/state"]}, rows["action"])[0]
    torch.testing.assert_close(backup, expected)


def test_only_executed_steps_are_imitated() -> None:
    """A chunk that the end of an episode cuts short holds actions that nobody took."""
    rows = lived(4)
    s = rows["obs/state"][:, 0]
    left = torch.where(s < 100, 3 - s, 105 - s).clamp(max=4)
    assert left.min() == 1 and left.max() == 4
    imitated = behaviour(rows, make_qchunk(chunk=4).policy)["valid"]
    assert torch.equal(imitated, torch.arange(4) < left[:, None])  # from the first one on


def test_learning_critics_choose_and_their_averages_value() -> None:
    learner = make_qchunk(hidden=(), n=4)
    slopes(learner.critic, [-1.0, -1.0])  # the smallest action is the best
    slopes(learner.target, [2.0, 6.0])
    following, reward = {"state": torch.randn(6, 1)}, torch.arange(6.0)
    discount = torch.tensor([0.9, 0.9, 0.9, 0.81, 0.81, 0.0])
    torch.manual_seed(4)
    noise = learner.policy.sample_noise(6, explore=True)
    candidates = learner.policy.proposals(following, noise)[:, :, 0]
    torch.manual_seed(4)
    backup = learner._backup(reward, discount, following)
    torch.testing.assert_close(backup, reward + discount * 4 * candidates.amin(1))
    assert candidates.amin(1).max() < candidates.amax(1).min()


@pytest.mark.parametrize("method", ["fql", "qchunking"])
def test_keeps_both_modes_in_the_flow_and_acts_in_the_better_one(method: str) -> None:
    rates = {"batch_size": 64, "actor_lr": 3e-3, "critic_lr": 3e-3}
    if method == "fql":
        learner: Any = make_fql(alpha=0.3, normalize_q=True, **rates)
        flow = learner.policy.flow
    else:
        learner = make_qchunk(n=8, **rates)
        flow = learner.policy.base
    for _ in range(300):
        learner.update(two_modes(64))
    obs, policy = {"state": torch.zeros(200, 1)}, learner.policy
    cloned, acted = (part.act(obs, {}, part.sample_noise(200))[0] for part in (flow, policy))
    assert 0.3 < (cloned > 0).float().mean() < 0.7
    assert (acted > 0).float().mean() > 0.95


ONE = Spec({"state": Leaf((3,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


make_implicit = partial(
    learner_of, acting="deterministic.Deterministic", spec=ONE, run=RunPlan(1000)
)


def least(loss: Callable[[Tensor], Tensor], q: Tensor) -> float:
    """The V at which the loss of Q - V is least, by bisection of its slope."""
    low, high = q.min().item() - 20, q.max().item() + 20
    for _ in range(60):
        value = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        loss(q - value).backward()
        assert value.grad is not None
        low, high = (value.item(), high) if value.grad < 0 else (low, value.item())
    return low


def test_the_fixed_points_of_the_value_losses() -> None:
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
    cases: list[tuple[Divergence, list[float]]] = [
        ("chi2", [-1, -1, -0.75, 3]),
        ("chi2_reference", [3, 0, 0, 3]),
    ]
    for divergence, conjugate in cases:
        expected = 0.8 * torch.tensor(conjugate) - 0.2 * gap
        found = dual_loss(gap, divergence, 0.8)
        assert found.item() == pytest.approx(expected.mean().item())


@pytest.mark.parametrize("normalize", [True, False])
def test_normalised_f_dvl_does_not_depend_on_the_scale(normalize: bool) -> None:
    best, value = torch.arange(9.0), torch.ones(9)
    learner = make_implicit("offline.f_dvl.FDvl", normalize=normalize)
    one, other = learner.value_loss(best, value), learner.value_loss(100 * best, 100 * value)
    assert math.isclose(one.item(), other.item(), rel_tol=1e-4) == normalize


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (
            lambda: make_implicit("offline.f_dvl.FDvl", divergence="tv", lam=0.4),
            r"above 0\.5 and at most 1 with divergence=tv",
        ),
        (
            lambda: make_implicit("offline.recoil.Recoil").fit(
                transitions(4, ONE) | {"source": torch.zeros(4)}
            ),
            r"demos=\[EXPERT,OTHERS\]",
        ),
        (lambda: make_cpl(chunk=2), "single steps"),
        (lambda: make_uni_o4(10, clone=0.0).update(bandit(8)), "improves on a dataset"),
        (lambda: make_uni_o4(10, values={"batch_size": 4}), "no effect"),
    ],
)
def test_what_does_not_fit_is_refused(refused: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refused()


def test_the_target_and_the_level_of_recoil_by_hand() -> None:
    learner = make_implicit("offline.recoil.Recoil", hidden=(), ended=0.5, gamma=0.9, level=20.0)
    batch = transitions(4, ONE) | {"source": torch.tensor([0, 0, 1, 1])}
    batch["discount"] = torch.tensor([0.9, 0.81, 0.9, 0.0])
    for parameter in learner.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.constant_(learner.value.net.biases[-1], 5.0)
    losses, _ = learner._loss(batch)
    # -20 (1 - d) + 5 d; after the end -20 (1 - 0.9) + 0.9 * 0.5 * 20
    target = torch.tensor([-2 + 4.5, -3.8 + 4.05, -2 + 4.5, -2 + 9.0])
    assert losses[2].item() == pytest.approx(2 * (target.square().mean().item() + 20**2), rel=1e-5)


def make_cpl(chunk: int = 1, updates: int = 0, **settings: Any) -> Any:
    policy = make_policy("deterministic.Deterministic", SPEC, hidden=[32], chunk=chunk)
    return make_learner("offline.cpl.Cpl", policy, RunPlan(updates), segment=4, **settings)


def pairs(n: int) -> Tensors:
    """Segments of one state; preferred is the one with the larger actions."""
    action = torch.rand(n, 2, 4, 2) - 0.5
    total = action.sum((2, 3))
    label = (total[:, 1] > total[:, 0]).float()
    return {"obs/state": torch.zeros(n, 2, 4, 3), "action": action, "label": label}


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (1.0, math.log1p(math.exp(3 - 0.5))),
        (0.0, math.log1p(math.exp(1 - 1.5))),
        (0.5, (math.log1p(math.exp(2.5)) + math.log1p(math.exp(-0.5))) / 2),
    ],
)
def test_the_contrastive_loss_by_hand(label: float, expected: float) -> None:
    first, second = torch.tensor([-1.0]), torch.tensor([-3.0])
    loss = contrastive_loss(first, second, torch.tensor([label]), 0.5)
    assert loss.item() == pytest.approx(expected)


def test_the_score_of_cpl_is_the_squared_distance() -> None:
    learner = make_cpl()
    batch = pairs(5)
    mean = learner.policy({"state": torch.zeros(1, 3)})
    expected = -(batch["action"] - mean).square().sum(3)
    torch.testing.assert_close(learner.log_prob(batch), expected)


def test_cpl_clones_first_then_follows_the_preference() -> None:
    """Actions in [-0.5, 0.5]: cloned, their mean; preferred are those near 0.5."""
    learner = make_cpl(updates=500, clone=0.4, lr=3e-3, bias=0.9, alpha=1.0)
    means: list[float] = []
    for number in range(500):
        learner.update(pairs(32))
        if number in (199, 499):
            means.append(learner.policy({"state": torch.zeros(1, 3)}).mean().item())
    assert abs(means[0]) < 0.1 and means[1] > 0.3
    assert learner.update(pairs(256))["agreement"] > 0.9


RATES = {"critic_lr": 3e-3, "value_lr": 3e-3, "tau": 0.1, "hidden": [32]}


class Line(Dynamics):
    """s' = s + a, which ends beyond 2."""

    spec, noise_size = LINE, 1

    def fit(self, transitions: Tensors, progress: Any = None) -> Fit:
        raise NotImplementedError

    def step(self, obs: Tensors, action: Tensor, noise: Tensor) -> Prediction:
        state = obs["state"] + action
        return Prediction({"state": state}, state[:, 0], state[:, 0] > 2)


def policy_of(mean: float) -> Any:
    """A policy with one mean action everywhere."""
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", LINE, hidden=[8], zero_head=True)
    policy.net[-1].bias.data.fill_(mean)
    return policy


def state(obs: Tensors, action: Tensor) -> Tensor:
    return obs["state"][:, 0] + 10 * action[:, 0]


def test_scores_are_mean_values_along_the_roll_outs() -> None:
    """From 0 by 1: states 0, 1, 2, then the end; from -3: -3, -2, -1, 0."""
    starts = {"state": torch.tensor([[0.0], [-3.0]])}
    gate = ModelGate(starts, state, Line(), 3)
    expected = [10 + (0 + 1 + 2) / 3, 10 + (-3 - 2 - 1 + 0) / 4]
    assert gate.scores(policy_of(1.0)).tolist() == pytest.approx(expected)
    assert ModelGate(starts, state, None, 3).scores(policy_of(0.5)).tolist() == [5.0, 2.0]


def test_the_gate_asks_for_more_than_noise() -> None:
    gate = ModelGate({"state": torch.zeros(4, 1)}, state)
    than = torch.tensor([5.0, -5.0, 0.0, 1.0])
    assert gate.better(than + torch.tensor([1.0, 0.9, 1.1, 1.0]), than)
    assert not gate.better(than, than)
    assert not gate.better(than + torch.tensor([2.0, -1.0, -1.0, 1.0]), than)  # 0.25, error 0.75


def make_uni_o4(updates: int, **settings: Any) -> Any:
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", LINE, hidden=[16], log_std=-0.5)
    given = {"batch_size": 128, "members": 2, "lr": 3e-3, "values": RATES, **settings}
    return make_learner("offline.uni_o4.UniO4", policy, run=RunPlan(updates), **given)


def test_uni_o4_refuses_a_policy_that_it_would_not_use() -> None:
    """Its members are new ones; a policy of a run has a normaliser that was set."""
    policy = make_policy("diagonal_gaussian.DiagonalGaussian", LINE, hidden=[16])
    policy.fit(bandit(8))
    with pytest.raises(ConfigError, match="leave init out"):
        make_learner("offline.uni_o4.UniO4", policy, run=RunPlan(10))


def bandit(n: int) -> Tensors:
    """One state, all actions, the reward is the action."""
    action = torch.rand(n, 1) * 2 - 1
    return still(torch.zeros(n, 1), action, action[:, 0])


def test_the_cloning_loss_of_uni_o4_by_hand() -> None:
    learner = make_uni_o4(10, apart=0.5)
    batch = bandit(16)
    obs = {"state": batch["obs/state"]}
    log_prob = torch.stack([m.log_prob(obs, batch["action"]) for m in learner.members])
    best = torch.maximum(log_prob[0], log_prob[1])
    expected = -(1.5 * (log_prob[0] + log_prob[1]) - 0.5 * 2 * best).mean()
    torch.testing.assert_close(learner._clone(batch), expected.detach())


def test_uni_o4_improves_on_the_clone_and_deploys_the_best() -> None:
    torch.manual_seed(0)
    learner = make_uni_o4(500, clone=0.6, gate_every=20, clip=0.5)
    learner.fit(bandit(600))
    means: list[float] = []
    for number in range(500):
        metrics = learner.update(bandit(128))
        if number in (299, 499):
            means.append(learner.policy({"state": torch.zeros(1, 1)}).item())
    assert abs(means[0]) < 0.15 and means[1] > means[0] + 0.2
    assert metrics["accepted"] >= 2
    scores = learner.best.mean(1)
    kept = learner.kept[int(scores.argmax())]
    assert all(map(torch.equal, learner.policy.parameters(), kept.parameters()))
