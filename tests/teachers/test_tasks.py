"""Teachers of tasks: boxes that grow, learning progress, mixtures, networks and distributions."""

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
from embodied.teachers.tasks.gmm import best, draw, fit, pick, price
from embodied.teachers.tasks.goalgan import critic_loss
from embodied.teachers.tasks.mpts import correlated, divergence, standard
from embodied.teachers.tasks.selfpaced import Gaussian, kl, log_density, step
from embodied.teachers.tasks.settersolver import Flow, normal
from embodied.teachers.teacher import Outcome
from embodied.teachers.torch_teacher import tensor
from tests.teachers.place import LINE, ended, made, point, rng

ADR = "tasks.adr.Adr"
GROW = "tasks.easy_to_hard.EasyToHard"
HELP = "assistance.privilege.Privilege"
ALP, COVAR, RIAC = "tasks.alpgmm.AlpGmm", "tasks.covargmm.CovarGmm", "tasks.riac.Riac"


def played(teacher: Any, *scores: float) -> None:
    """One episode after the other."""
    for score in scores:
        teacher.update(teacher.sample(1)[1], ended(score))


def learned(teacher: Any, where: list[float], memo: Any, *scores: float) -> None:
    for score in scores:
        teacher.learn(np.array([where]), np.array([score]), [memo])


def test_the_box_around_the_easy_task() -> None:
    """Easy (0.5, 0): at share 0.2 it is [0.4, 0.6] x [0, 0.2]."""
    teacher = made(GROW, easy={"x": 0.5}, width=0.2)
    low, high = teacher.bounds()
    assert low.tolist() == pytest.approx([0.4, 0.0]) and high.tolist() == pytest.approx([0.6, 0.2])
    tasks, _ = teacher.sample(500)
    assert (tasks >= torch.tensor(low)).all() and (tasks <= torch.tensor(high)).all()
    assert tasks.amax(0).tolist() == pytest.approx([0.6, 0.2], abs=0.01)


def test_a_schedule_counts_episodes() -> None:
    teacher = made(GROW, pace="schedule", width=0.2, episodes=8)
    played(teacher, *[0.0] * 4)
    assert teacher.share == pytest.approx(0.6)
    played(teacher, *[0.0] * 10)
    assert teacher.share == 1.0


def test_success_grows_the_box() -> None:
    """Once the last four of 0 0 1 1 1 are good enough in the mean."""
    teacher = made(GROW, width=0.1, step=0.2, window=4, grow=0.75)
    played(teacher, 0.0, 0.0, 1.0, 1.0)
    assert teacher.share == pytest.approx(0.1)
    _, tickets = teacher.sample(5)
    teacher.update(tickets[:1], ended(1.0))
    assert teacher.share == pytest.approx(0.3)
    teacher.update(tickets[1:], ended(0.0, 0.0, 0.0, 0.0))  # of the smaller box: they say nothing
    assert teacher.share == pytest.approx(0.3) and not teacher.scored


@pytest.mark.parametrize(
    ("target", "settings", "metric"),
    [(GROW, {}, "share"), (ADR, {}, "volume"), (HELP, {"name": "x"}, "help")],
)
def test_short_episodes_are_not_judged_alone(target: str, settings: Any, metric: str) -> None:
    """Of 256 episodes at once three in ten succeed, in 10 steps; the others fail in 100."""
    teacher, random = made(target, **settings), rng()
    before, ends = teacher.metrics()[metric], dict[int, tuple[int, float]]()
    for now in range(400):
        over = [ticket for ticket, (end, _) in ends.items() if end == now]
        if over:
            teacher.update(torch.tensor(over), ended(*[ends.pop(ticket)[1] for ticket in over]))
        for ticket in teacher.sample(256 - len(ends))[1].tolist() if len(ends) < 256 else ():
            ends[ticket] = (now + 10, 1.0) if random.random() < 0.3 else (now + 100, 0.0)
    assert teacher.metrics()[metric] == before


def test_an_episode_that_never_ends_is_not_waited_for() -> None:
    teacher = made(GROW, window=10)
    teacher.sample(1)
    played(teacher, *[1.0] * 120)
    assert teacher.share > 0.1


def test_adr_starts_at_one_task_and_grows_outward() -> None:
    teacher = made(ADR, easy={"x": 0.25}, boundary=1.0, delta=0.1, queue=5)
    assert torch.equal(teacher.sample(20)[0], torch.tensor([[0.25, 0.5]]).expand(20, 2))
    teacher.forget()
    widths = []
    for _ in range(10):
        played(teacher, *[1.0] * 20)
        widths.append(teacher.metrics()["volume"])
    assert widths == sorted(widths) and widths[-1] > 0.1
    played(teacher, *[1.0] * 600)
    assert teacher.bounds.tolist() == [[0.0, 0.0], [1.0, 1.0]]  # not past the box
    played(teacher, *[0.0] * 1000)  # everything forgotten: both meet somewhere
    assert teacher.metrics()["width"] < 0.25 and (teacher.bounds[1] >= teacher.bounds[0]).all()


def test_a_bound_moves_by_its_own_tickets() -> None:
    """Five at the upper bound of x, in the same place as every other task: only that one moves.
    Tickets: side, element, how often the bound had moved."""
    teacher = made(ADR, boundary=0.5, delta=0.1, queue=5, high=0.6)
    middle = [0.5, 0.5]
    learned(teacher, middle, [1, 0, 0], 1.0, 1.0, 1.0, 0.0)
    learned(teacher, middle, None, 1.0)  # the same task, another ticket
    assert teacher.bounds.tolist() == [middle, middle]
    learned(teacher, middle, [1, 0, 0], 0.0)  # mean 0.6
    assert teacher.bounds.tolist() == [middle, [0.6, 0.5]]
    learned(teacher, middle, [1, 0, 0], *[1.0] * 5)  # late ones, of the bound where it was
    assert teacher.bounds.tolist() == [middle, [0.6, 0.5]]
    learned(teacher, [0.6, 0.5], [1, 0, 1], 0.9, 0.1, 0.9, 0.1, 0.5)  # between the thresholds
    assert teacher.bounds.tolist() == [middle, [0.6, 0.5]] and teacher.queues[1][0] == []
    learned(teacher, [0.6, 0.5], [1, 0, 1], *[0.1] * 5)  # mean <= low: back
    assert teacher.bounds.tolist() == [middle, middle]
    learned(teacher, middle, [1, 0, 2], *[0.0] * 5)  # and no further than the opposite bound
    assert teacher.bounds.tolist() == [middle, middle]


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (GROW, {"easy": {"z": 0.1}}, '"z" is no task parameter'),
        (ADR, {"easy": {"x": 0.9}, "box": {"x": [0.0, 0.5]}}, "outside its box"),
        (ADR, {"low": 0.9}, "low < high"),
        (ALP, {"every": 3}, "two episodes a component"),
        (RIAC, {"random": 0.95}, "random \\+ mutated"),
    ],
)
def test_settings_that_cannot_be(target: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(target, **settings)


def test_progress_is_the_difference_to_the_nearest_task() -> None:
    teacher = made(ALP)
    for i in range(5):
        teacher.row(point(0.1 * i, 0.0), 0.1 * i)
    assert teacher.progress(point(0.21, 0.0), 0.9) == 0  # five tasks are not yet enough
    teacher.row(point(0.5, 0.0), 0.5)
    assert teacher.row(point(0.21, 0.0), 0.9) == pytest.approx([0.21, 0.0, 0.7])
    # Now (0.21, 0) itself, with 0.9, is nearer than (0.2, 0), with 0.2.
    assert teacher.progress(point(0.22, 0.0), 0.4) == pytest.approx(0.5)
    assert teacher.progress(point(0.4, 0.3), 0.1) == pytest.approx(0.3)


def test_a_limited_memory_forgets_the_oldest() -> None:
    """Of tasks as near the newest is compared with."""
    teacher, unlimited = made(ALP, memory=6), made(ALP, memory=0)
    for i in range(8):  # 0 and 1 are forgotten; 6 and 7 lie where those were
        teacher.keep(point(0.1 * i, 0.0), 0.1 * i)
    assert teacher.progress(point(0.0, 0.0), 0.0) == pytest.approx(0.2)
    for each in (teacher, unlimited):
        for i in range(8):
            each.keep(point(0.5, 0.5), 0.01 * i)
        assert each.progress(point(0.5, 0.5), 0.17) == pytest.approx(0.1)
    for i in range(200):  # the arrays grow
        unlimited.keep(point(i / 200, 0.0), i / 200)
    assert unlimited.progress(point(0.0, 0.0), 0.0) == 0


def test_components_are_drawn_by_their_progress_not_by_their_weight() -> None:
    """Beside random tasks of the whole box."""
    teacher = made(ALP, random=0.2)
    cov = np.repeat(1e-8 * np.eye(3)[None], 3, 0)
    mean = np.array([[0.1, 0.1, 0.0], [0.5, 0.5, 0.1], [0.9, 0.9, 0.3]])
    teacher.mixture = {"weight": np.array([0.9, 0.05, 0.05]), "mean": mean, "cov": cov}
    teacher.utility = teacher.worth(teacher.mixture).tolist()
    drawn = np.array([task for task, _ in teacher.propose(4000)])
    near = np.abs(drawn[:, None] - mean[:, :2]).max(2) < 0.01
    assert near.mean(0) == pytest.approx([0, 0.2, 0.6], abs=0.03)
    assert (~near.any(1)).mean() == pytest.approx(0.2, abs=0.025)


def test_pick_without_any_weight_is_uniform() -> None:
    random = rng(0)
    counts = np.bincount([pick([0.0, 0.0, 0.0], random) for _ in range(3000)], minlength=3)
    assert counts / 3000 == pytest.approx([1 / 3] * 3, abs=0.04)


def test_fits_use_the_last_window_only() -> None:
    """Windows of 40: the first one is dull, the second lively on the right."""
    teacher, random = made(ALP, every=40, most=3, random=0.0), rng(1)
    for turn in range(80):
        x, y = random.random(2)
        learned(teacher, [x, y], None, float(turn % 2) if turn >= 40 and x > 0.5 else 0.0)
        if turn == 39:
            assert teacher.fits == 1 and sum(teacher.utility) == pytest.approx(0, abs=1e-6)
    assert teacher.fits == 2 and not teacher.rows
    assert np.mean([each[0] for each, _ in teacher.propose(200)]) > 0.6


def test_covariance_of_time_and_score() -> None:
    teacher = made(COVAR, every=10)
    assert teacher.row(point(0.1, 0.2), 0.7) == [0.1, 0.2, 0.0, 0.7]
    teacher.rows = [[0.0] * 4] * 3
    assert teacher.row(point(0.1, 0.2), 0.7) == [0.1, 0.2, 0.3, 0.7]
    cov = np.zeros((2, 4, 4))
    cov[0, 2, 3], cov[1, 2, 3] = 0.04, -0.06
    mixture = {"weight": np.ones(2) / 2, "mean": np.zeros((2, 4)), "cov": cov}
    assert teacher.worth(mixture).tolist() == [0.04, 0.0]


def test_riac_progress_is_between_halves_and_scores_a_cut() -> None:
    """Of the last four scores |0.1 - 0.8|. Below: 4 rows, progress 1; above: 3 rows, progress
    0.25 -> 4 * 3 * 0.75."""
    teacher = made(RIAC, window=4)
    for scores, progress in (
        ((9.0, 0.0, 0.2, 0.6, 1.0), 0.7),
        ((9.0, 0.0), 0.0),
        ((0.0, 0.5, 0.1), 0.3),
    ):
        assert teacher.progress([[0.5, 0.5, s] for s in scores]) == pytest.approx(progress)
    below = [[0.1, 0.0, s] for s in (0.0, 0.0, 1.0, 1.0)]
    above = [[0.9, 0.0, s] for s in (0.5, 0.25, 0.25)]
    assert made(RIAC).score(below, above) == pytest.approx(9.0)


def test_riac_cuts_where_progress_differs() -> None:
    """Scores rise for x > 0.6 only: the first cut is near 0.6, in x, with the parts' progress."""
    teacher, random = made(RIAC, most=200, attempts=300), rng(2)
    for turn in range(201):
        x, y = random.random(2)
        learned(teacher, [x, y], None, turn / 200 if x > 0.6 else 0.3)
    root, left, right = teacher.regions
    element, threshold, below, above = root["cut"]
    assert element == 0 and threshold == pytest.approx(0.6, abs=0.06) and (below, above) == (1, 2)
    assert right["alp"] > 0.4 > 0.1 > left["alp"]
    assert left["high"] == [threshold, 1.0] and right["low"] == [threshold, 0.0]
    assert len(left["rows"]) + len(right["rows"]) == 201
    more = len(right["rows"]) + 1
    learned(teacher, [0.9, 0.5], None, 1.0)
    assert len(teacher.regions[2]["rows"]) == more and len(root["rows"]) == 201


def test_riac_forgets_where_no_cut_is_valid() -> None:
    """All tasks in one place: no cut leaves enough on both sides, a quarter goes."""
    teacher = made(RIAC, most=40, fewest=5)
    learned(teacher, [0.5, 0.5], None, *[1.0] * 41)
    assert len(teacher.regions) == 1 and len(teacher.regions[0]["rows"]) == 41 - 10


def test_riac_samples_as_its_shares_say() -> None:
    teacher = made(RIAC, spec=LINE, random=0.2, mutated=0.1, mutation=0.001)
    rows = [[0.93, 0.1], [0.97, 0.9]]
    teacher.regions = [
        {"low": [0.0], "high": [1.0], "rows": [], "alp": 0.0, "cut": [0, 0.9, 1, 2]},
        {"low": [0.0], "high": [0.9], "rows": [], "alp": 0.0, "cut": None},
        {"low": [0.9], "high": [1.0], "rows": rows, "alp": 0.5, "cut": None},
    ]
    drawn = np.array([each[0] for each, _ in teacher.propose(5000)])
    assert np.mean(drawn < 0.9) == pytest.approx(0.2 * 0.9, abs=0.02)
    near_worst = np.mean(abs(drawn - 0.93) < 0.004)
    assert near_worst == pytest.approx(0.1 + 0.008 * (7 + 0.2), abs=0.02)


def test_one_component_is_the_sample_mean_and_covariance() -> None:
    """K = 2, D = 3: 1 + 6 + 12 = 19 free numbers; AIC = 38 - 2 log L."""
    assert price(2, 3, -10.0) == 58.0
    rows = rng().normal(size=(200, 2)) @ np.array([[1.0, 0.4], [0.0, 0.5]]) + 3
    ((mixture, likelihood),) = fit(rows, [1], rng())
    assert mixture["mean"][0] == pytest.approx(rows.mean(0))
    cov = np.cov(rows.T, bias=True) + 1e-6 * np.eye(2)
    assert mixture["cov"][0] == pytest.approx(cov)
    off = rows - rows.mean(0)
    each = -0.5 * np.einsum("ni,ij,nj->n", off, np.linalg.inv(cov), off)
    assert likelihood == pytest.approx(each.sum() - 100 * math.log(np.linalg.det(2 * np.pi * cov)))


def test_three_clusters_are_three() -> None:
    centres = np.array([[0.1, 0.1], [0.9, 0.1], [0.5, 0.9]])
    rows = np.concatenate([c + 0.03 * rng(i).normal(size=(80, 2)) for i, c in enumerate(centres)])
    found = best(rows, range(1, 7), rng())
    assert found is not None and len(found["weight"]) == 3
    order = np.argsort(found["mean"] @ [1.0, 10.0])
    assert found["mean"][order] == pytest.approx(centres, abs=0.02)
    assert found["weight"].sum() == pytest.approx(1)


def test_rows_that_coincide_and_too_few_rows() -> None:
    found = best(np.full((40, 2), 0.5), range(2, 6), rng())
    assert found is not None and np.isfinite(found["cov"]).all()
    assert draw(found, 0, 2, rng()) == pytest.approx([0.5, 0.5], abs=0.01)
    assert best(np.zeros((3, 2)), range(2, 6), rng()) is None


def test_a_component_without_a_row_is_no_component() -> None:
    rows = np.repeat([[0.4, 0.6], [0.8, 0.2]], 10, axis=0)
    for mixture, likelihood in fit(rows, [2, 5], rng()):
        assert np.isfinite(likelihood) and (mixture["weight"] > 0).all()
        gap = np.abs(mixture["mean"][:, None] - rows[[0, 10]]).sum(2).min(1)
        assert gap.max() < 1e-6, "each lies where rows are"


def test_draws_are_of_the_component() -> None:
    cov = np.array([[[0.04, 0.03, 0.0], [0.03, 0.09, 0.0], [0.0, 0.0, 1.0]]])
    mixture = {"weight": np.ones(1), "mean": np.array([[1.0, 2.0, 3.0]]), "cov": cov}
    random = rng()
    drawn = np.stack([draw(mixture, 0, 2, random) for _ in range(4000)])
    assert drawn.mean(0) == pytest.approx([1, 2], abs=0.02)
    assert np.cov(drawn.T) == pytest.approx(cov[0, :2, :2], abs=0.006)


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
