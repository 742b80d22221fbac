"""Teachers with networks and distributions: losses, flows, divergences and bounds by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from embodied.core.build import ConfigError
from embodied.teachers.tasks.goalgan import critic_loss
from embodied.teachers.tasks.mpts import correlated, divergence, standard
from embodied.teachers.tasks.selfpaced import Gaussian, kl, log_density, step
from embodied.teachers.tasks.settersolver import Flow, normal
from embodied.teachers.teacher import Outcome
from embodied.teachers.torch_teacher import tensor
from tests.teachers.place import LINE, ended, made, point, rng

GAN = "tasks.goalgan.GoalGan"
SETTER = "tasks.settersolver.SetterSolver"


def test_the_least_squares_loss_by_hand() -> None:
    """y = 1: (0.5 - 1)^2; y = 0: (0.5 + 1)^2; made: (0 + 1)^2 and (-1 + 1)^2, means of each."""
    loss = critic_loss(tensor([0.5, 0.5]), tensor([1.0, 0.0]), tensor([0.0, -1.0]))
    assert loss.item() == pytest.approx((0.25 + 2.25) / 2 + 0.5)


def test_each_goal_is_played_its_rollouts_whoever_asks() -> None:
    teacher = made(GAN, rollouts=3, pretrain=0)
    numbers = [memo for n in (1, 1, 4, 2, 1) for _, memo in teacher.propose(n)]
    assert numbers == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    points = [goal["point"].tolist() for goal in teacher.open.values()]
    assert len({tuple(p) for p in points}) == 3


def test_labels_are_by_the_mean_of_a_goals_own_rollouts() -> None:
    """Three goals of two rollouts, ended in another order: means 0, 0.5, 1 -> labels 0, 1, 0."""
    teacher = made(GAN, rollouts=2, pretrain=0, random=1.0)
    _, tickets = teacher.sample(6)
    first, second, third = (teacher.open[number]["point"].tolist() for number in range(3))
    teacher.update(tickets[[4, 0, 2]], ended(1.0, 0.0, 1.0))
    assert not teacher.labels
    teacher.update(tickets[[3, 1, 5]], ended(0.0, 0.0, 1.0))
    assert teacher.labels == [1.0, 0.0, 0.0] and teacher.labelled == [second, first, third]
    assert teacher.passed.tolist() == [third] and not teacher.open


def test_passed_goals_are_kept_apart() -> None:
    """0.1 of the diagonal of the square is 0.141."""
    teacher = made(GAN, pretrain=0, apart=0.1)
    for x in (0.2, 0.33, 0.35, 0.2):
        teacher.keep(point(x, 0.5))
    assert teacher.passed[:, 0].tolist() == [0.2, 0.35]


def test_it_learns_to_make_the_good_goals() -> None:
    """It starts around the easy task. Good goals are those with x in [0.6, 0.8]: they become
    several times as many. Without a good goal nothing is learned."""
    widths = {"generator_width": 64, "discriminator_width": 64}
    settings = {"rollouts": 1, "random": 0.3, "old": 0.0, "pretrain": 150, "iterations": 60}
    teacher = made(GAN, every=100, easy={"x": 0.2, "y": 0.8}, **settings, **widths)
    with torch.no_grad():
        before = teacher.made(200).mean(0).tolist()
    assert before == pytest.approx([0.2, 0.8], abs=0.15)
    teacher.update(teacher.sample(100)[1], ended(*[0.0] * 100))
    assert teacher.trained == 0 and not teacher.labels
    for _ in range(7):
        tasks, tickets = teacher.sample(100)
        good = (tasks[:, 0] > 0.6) & (tasks[:, 0] < 0.8)
        teacher.update(tickets, ended(*(0.5 * good).tolist()))
    with torch.no_grad():
        x = teacher.made(500)[:, 0]
    assert ((x > 0.55) & (x < 0.85)).float().mean() > 0.5


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_the_flow_goes_both_ways(d: int) -> None:
    flow = Flow(d, 3, 16, 2, rng()).double()
    z = torch.from_numpy(rng(1).standard_normal((50, d)))
    wanted = torch.from_numpy(rng(2).random(50))
    goals, log = flow(z, wanted)
    assert (goals > 0).all() and (goals < 1).all()
    back, same = flow.inverse(goals, wanted)
    assert back.detach().numpy() == pytest.approx(z.numpy(), abs=1e-5)
    assert same.detach().numpy() == pytest.approx(log.detach().numpy(), abs=1e-5)


def test_the_flows_density_is_the_jacobians() -> None:
    flow = Flow(3, 2, 16, 1, rng()).double()
    z = torch.from_numpy(rng(1).standard_normal((1, 3)))
    wanted = torch.tensor([0.3]).double()
    jacobian = torch.autograd.functional.jacobian(lambda x: flow(x, wanted)[0][0], z)[:, 0]
    expected = normal(z) - torch.linalg.slogdet(jacobian)[1]
    assert flow(z, wanted)[1].item() == pytest.approx(expected.item(), abs=1e-9)


def test_the_setter_makes_goals_as_feasible_as_asked_for() -> None:
    """Success falls from 1 to 0 along x: probability 1 - x."""
    small = {"width": 32, "layers": 1, "blocks": 1, "judge": [32, 32], "lr": 5e-3}
    teacher = made(SETTER, steps=30, every=100, random=0.5, validity=0.1, coverage=0.1, **small)
    random = rng(3)
    for _ in range(8):
        tasks, tickets = teacher.sample(100)
        won = random.random(100) < 1 - tasks[:, 0].numpy()
        teacher.update(tickets, ended(*won.astype(float)))
    wanted = torch.tensor([0.2, 0.5, 0.8])
    with torch.no_grad():
        goals = teacher.setter(teacher.normal(1200, 2), wanted.repeat(400))[0].view(400, 3, 2)
    assert (1 - goals[:, :, 0].mean(0)).tolist() == pytest.approx(wanted.tolist(), abs=0.15)
    assert (goals[:, :, 1].std(0) > 0.15).all()  # y is free, and is used


def test_only_episodes_above_the_threshold_count_as_success() -> None:
    """Returns of 0.01, 0.4, 0.6 and 1 with solved=0.6: two successes, for judge and setter."""
    teacher = made(SETTER, every=100, solved=0.6)
    outcome = replace(ended(*[0.0] * 4), ret=torch.tensor([0.01, 0.4, 0.6, 1.0]))
    teacher.update(teacher.sample(4)[1], outcome)
    assert [row[-1] for row in teacher.rows] == [0.0, 0.0, 1.0, 1.0]


def test_an_update_of_the_setter_makes_new_goals() -> None:
    teacher = made(SETTER, every=20, steps=1, random=0.0)
    teacher.update(teacher.sample(20)[1], ended(*[1.0, 0.0] * 10))
    teacher.sample(3)
    assert teacher.trained == 1 and len(teacher.plan) == 61
    before = teacher.plan[0]
    teacher.update(teacher.sample(20)[1], ended(*[1.0, 0.0] * 10))
    assert teacher.plan == [] and before not in teacher.plan
    assert len(teacher.rows) == 40 and {row[2] for row in teacher.rows[:20]} == {-1.0}
    assert all(0.05 <= row[2] <= 0.95 for row in teacher.rows[20:])


MPTS = "tasks.mpts.Mpts"


def test_divergence_risk_and_correlation_by_hand() -> None:
    """(N(1, 2) || N(0, 1)): (4 + 1 - 1) / 2 - log 2; nothing to itself. Risk is standard in its
    batch; tasks that were not predicted do not count."""
    p = (torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]))
    q = (torch.zeros(2), torch.ones(2))
    assert divergence(p, q).item() == pytest.approx(2 - np.log(2), abs=1e-6)
    assert divergence(p, p).item() == pytest.approx(0, abs=1e-6)
    assert standard(np.array([1.0, 3.0])).tolist() == [-1, 1]
    assert standard(np.full(3, 0.7)).tolist() == [0, 0, 0]
    predicted = np.array([np.nan, 1.0, 2.0, 3.0])
    for risk, expected in (([9, 2, 4, 6], 1.0), ([9, 6, 4, 2], -1.0), ([9, 4, 4, 4], 0.3)):
        found = correlated(predicted, np.array(risk, float), 0.3)
        assert found == pytest.approx(expected)


def test_the_posterior_is_the_next_prior() -> None:
    teacher = made(MPTS, batch=4)
    assert teacher.posterior[0].tolist() == [0] * 10 and teacher.posterior[1].tolist() == [1] * 10
    teacher.update(teacher.sample(3)[1], ended(0.0, 0.5, 1.0))
    assert teacher.learned == 0
    teacher.update(teacher.sample(2)[1], ended(0.2, 0.9))
    assert teacher.learned == 1 and len(teacher.rows) == 1
    first = [each.clone() for each in teacher.posterior]
    assert (first[1] > 0.1).all() and (first[1] < 1).all()
    teacher.update(teacher.sample(3)[1], ended(0.0, 0.5, 1.0))
    assert teacher.learned == 2 and not torch.equal(first[0], teacher.posterior[0])


def test_the_hardest_by_mean_and_deviation_and_others_at_random() -> None:
    """A model that says: mean x, deviation y. With weights (1, 5) those with x + 5 y highest."""
    teacher = made(MPTS, batch=10, candidates=4.0, hardest=0.5, warmup=0)
    teacher.learned, asked = 1, []

    def predicted(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(points)
        return points[:, 0], points[:, 1]

    teacher.predicted = predicted
    rows = np.array(teacher.planned())
    (points,) = asked
    assert points.shape == (40, 2) and rows.shape == (10, 3)
    assert np.array_equal(rows[:, 2], rows[:, 0])  # the predicted mean goes with the ticket
    top = {tuple(point) for point in points[np.argsort(-points @ [1.0, 5.0])[:5]]}
    played = [tuple(row[:2]) for row in rows]
    assert top <= set(played) and len(set(played)) == 10
    assert set(played[:5]) != top  # shuffled


def test_it_is_uniform_before_it_knows() -> None:
    teacher = made(MPTS, batch=8, warmup=20)
    predicted = []
    for _ in range(5):
        _, tickets = teacher.sample(8)
        predicted += [teacher.pending[ticket][1] for ticket in tickets.tolist()]
        teacher.update(tickets, ended(*[0.0, 1.0] * 4))
    known = np.isfinite(predicted)
    assert not known[:24].any() and known[24:].all()


def test_it_learns_where_it_goes_wrong() -> None:
    """Risk rises with x: predictions of tasks not yet played follow it, and those are played."""
    teacher = made(MPTS, warmup=64, weights=[1.0, 0.0])
    for _ in range(60):
        tasks, tickets = teacher.sample(16)
        teacher.update(tickets, ended(*(1 - tasks[:, 0]).tolist()))
    points = np.random.default_rng(1).random((200, 2))
    mean, _ = teacher.predicted(points)
    assert np.corrcoef(mean, points[:, 0])[0, 1] > 0.8
    assert teacher.metrics()["correlation"] > 0.5
    assert float(teacher.sample(160)[0][:, 0].mean()) > 0.55


SPDL = "tasks.selfpaced.SelfPaced"


def gaussian(seed: int, d: int = 3) -> Gaussian:
    random = np.random.Generator(np.random.PCG64(seed))
    return Gaussian.unflat(torch.from_numpy(0.5 * random.standard_normal(2 * d + 3)), d)


def theirs(own: Gaussian) -> MultivariateNormal:
    return MultivariateNormal(own.mean, scale_tril=own.root())


def test_divergence_and_density_are_torchs() -> None:
    p, q = gaussian(0), gaussian(1)
    assert kl(p, q).item() == pytest.approx(kl_divergence(theirs(p), theirs(q)).item())
    assert kl(p, p).item() == pytest.approx(0, abs=1e-12)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(log_density(p, x), theirs(p).log_prob(x))
    assert torch.equal(Gaussian.unflat(p.flat(), 3).root(), p.root())


NARROW = Gaussian(torch.zeros(1).double(), torch.zeros(1, 1).double())


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.5])
def test_a_step_goes_to_the_bound_and_no_further(eps: float) -> None:
    """A linear gain, whose best step is along the mean: KL = m^2 / 2 s^2 = eps."""
    new = step(NARROW, lambda g: 3 * g.mean[0], eps, 0.0, 10)
    assert kl(NARROW, new).item() <= eps * (1 + 1e-6)
    shares = new.mean.item() / math.sqrt(2 * eps)
    assert shares == pytest.approx(1) or shares == pytest.approx(0.5)


def test_the_line_search_halves_until_it_gains() -> None:
    """The gain is highest at 0.1; a full step to 0.447 loses, as does half of it."""

    def gain(g: Gaussian) -> Any:
        return -((g.mean[0] - 0.1) ** 2)

    new = step(NARROW, gain, 0.1, 0.0, 10)
    assert new.mean.item() == pytest.approx(math.sqrt(0.2) / 4)
    assert torch.equal(step(NARROW, gain, 0.1, 0.0, 2).mean, NARROW.mean)  # two are not enough
    flat = step(NARROW, lambda g: 0 * g.mean[0], 0.1, 0.0, 10)
    assert torch.equal(flat.mean, NARROW.mean)


def test_the_pull_of_the_target() -> None:
    """alpha = zeta mean V / KL; nothing for negative values and in the first `offset` updates."""
    teacher = made(SPDL, spec=LINE, easy={"x": 0.2}, width=0.25, zeta=0.5)
    gap = 0.3**2 / (2 * 0.25**2)  # to (0.5, 0.25)
    assert teacher.weight(torch.tensor([1.0, 3.0])) == pytest.approx(0.5 * 2 / gap)
    assert teacher.weight(torch.tensor([-1.0, -3.0])) == 0
    assert made(SPDL, offset=1).weight(torch.tensor([1.0])) == 0
    there = made(SPDL, spec=LINE, easy={"x": 0.5}, width=0.25)
    assert there.weight(torch.tensor([1.0])) == 1e5  # already there: capped


def test_it_follows_values_that_move() -> None:
    """V(c) = 1 - |c - c*|, c* moving from 0.2 to 0.8: never more than eps, and it arrives."""
    ends = {"easy": {"x": 0.2, "y": 0.2}, "hard": {"x": 0.8, "y": 0.8}, "spread": 0.1}
    teacher = made(SPDL, zeta=0.5, **ends)
    far = teacher.metrics()["target_kl"]
    for update in range(60):
        centre = 0.2 + 0.6 * min(update / 40, 1)
        tasks, tickets = teacher.sample(100)
        values = (1 - (tasks - centre).norm(dim=1)).clamp(0, 1)
        teacher.update(tickets, ended(*values.tolist()))
        assert teacher.step_kl <= 0.1 + 1e-9
    assert teacher.updates == 60
    assert teacher.mean.tolist() == pytest.approx([0.8, 0.8], abs=0.08)
    assert teacher.metrics()["target_kl"] < 0.1 * far


def test_tickets_hold_where_it_was_drawn() -> None:
    """Before it was clipped into the box, with its density."""
    teacher = made(SPDL, easy={"x": 0.0, "y": 0.0})
    played, memos = map(np.array, zip(*teacher.propose(200), strict=True))
    assert (played >= 0).all() and memos[:, :2].min() < 0
    logs = log_density(teacher.now(), torch.from_numpy(memos[:, :2]))
    assert memos[:, 2] == pytest.approx(logs.numpy())


def test_values_are_the_critics_the_score_or_discounted() -> None:
    outcome = Outcome(torch.tensor([1.0, 0.5]), torch.ones(2), torch.tensor([2.0, 1.0]))
    assert made(SPDL, value="discounted", gamma=0.5).scores(outcome).tolist() == [0.25, 0.25]
    critic = made(SPDL, value="critic", every=2, box={"x": [0.0, 0.5]})
    tasks = torch.tensor([[0.5, 0.0], [1.0, 0.0]]).double()
    with pytest.raises(ConfigError, match="value=score"):
        critic.values(tasks, torch.zeros(2))
    critic.student = SimpleNamespace(values=lambda tasks: 10 * tasks[:, 0])
    asked = critic.values(tasks, torch.zeros(2))
    assert asked.tolist() == [2.5, 5.0]  # of tasks as the world counts them
