"""Teachers with networks: labels and losses by hand, the flow is a flow, goals are as feasible as
asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.teachers.tasks.networks import Flow, critic_loss, normal
from embodied.teachers.torch_teacher import mlp, tensor
from tests.teachers.place import ended, made, point

GAN = "tasks.networks.GoalGan"
SETTER = "tasks.networks.SetterSolver"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def test_weights_come_from_the_given_generator() -> None:
    before = torch.get_rng_state()
    one, two, other = (mlp((3, 5, 2), rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one[0].weight, two[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    assert one[0].weight.abs().max() <= 1 / math.sqrt(3) and len(one) == 3


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
    where = [teacher.open[number]["point"].tolist() for number in range(3)]
    teacher.update(tickets[[4, 0, 2]], ended(1.0, 0.0, 1.0))
    assert not teacher.labels
    teacher.update(tickets[[3, 1, 5]], ended(0.0, 0.0, 1.0))
    assert teacher.labels == [1.0, 0.0, 0.0] and teacher.labelled == [where[1], where[0], where[2]]
    assert teacher.passed.tolist() == [where[2]] and not teacher.open


def test_passed_goals_are_kept_apart() -> None:
    """0.1 of the diagonal of the square is 0.141."""
    teacher = made(GAN, pretrain=0, apart=0.1)
    for x in (0.2, 0.33, 0.35, 0.2):
        teacher.keep(point(x, 0.5))
    assert teacher.passed[:, 0].tolist() == [0.2, 0.35]


def test_no_good_goal_changes_nothing() -> None:
    teacher = made(GAN, rollouts=1, every=5, pretrain=0)
    before = [p.clone() for p in teacher.maker.parameters()]
    for _ in range(10):
        teacher.update(teacher.sample(1)[1], ended(0.0))
    assert teacher.trained == 0 and not teacher.labels
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.maker.parameters(), strict=True))


def test_outputs_span_the_cube_or_twice_of_it() -> None:
    teacher = made(GAN, pretrain=0)
    with torch.no_grad():
        teacher.maker[-1].weight.mul_(100)
    assert (teacher.made(500) >= 0).all() and (teacher.made(500) <= 1).all()
    full = made(GAN, pretrain=0, full_range=True)
    with torch.no_grad():
        full.maker[-1].weight.mul_(100)
    outside = (full.made(500) < 0) | (full.made(500) > 1)
    assert outside.float().mean() > 0.4


def test_it_learns_to_make_the_good_goals() -> None:
    """Good goals are those with x in [0.6, 0.8]: they become several times as many."""
    teacher = made(
        GAN,
        rollouts=1,
        every=100,
        random=0.3,
        old=0.0,
        pretrain=50,
        iterations=80,
        generator_width=64,
        discriminator_width=64,
    )
    for _ in range(8):
        tasks, tickets = teacher.sample(100)
        good = (tasks[:, 0] > 0.6) & (tasks[:, 0] < 0.8)
        teacher.update(tickets, ended(*(0.5 * good).tolist()))
    with torch.no_grad():
        x = teacher.made(500)[:, 0]
    assert ((x > 0.55) & (x < 0.85)).float().mean() > 0.5


def test_it_starts_around_the_easy_task() -> None:
    teacher = made(GAN, easy={"x": 0.2, "y": 0.8}, pretrain=150, generator_width=64)
    with torch.no_grad():
        assert teacher.made(200).mean(0).tolist() == pytest.approx([0.2, 0.8], abs=0.15)


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
    for wanted in (0.2, 0.5, 0.8):
        with torch.no_grad():
            goals = teacher.setter(teacher.normal(400, 2), torch.full((400,), wanted))[0]
        assert 1 - goals[:, 0].mean().item() == pytest.approx(wanted, abs=0.15)
    assert goals[:, 1].std() > 0.15  # y is free, and is used


def test_only_episodes_above_the_threshold_count_as_success() -> None:
    """Returns of 0.01, 0.4, 0.6 and 1 with solved=0.6: two successes, for judge and setter."""
    teacher = made(SETTER, every=100, signal="return", solved=0.6)
    _, tickets = teacher.sample(4)
    outcome = ended(0.0, 0.0, 0.0, 0.0)
    teacher.update(tickets, replace(outcome, ret=torch.tensor([0.01, 0.4, 0.6, 1.0])))
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
