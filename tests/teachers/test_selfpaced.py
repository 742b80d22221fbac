"""SPDL: divergences and densities against other formulas, the bound, the line search, and the pace
on values that are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from embodied.core.build import ConfigError
from embodied.teachers.tasks.selfpaced import Gaussian, kl, log_density, step
from embodied.teachers.teacher import Outcome
from tests.teachers.place import LINE, ended, made

TARGET = "tasks.selfpaced.SelfPaced"


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


def test_flat_and_back() -> None:
    own = gaussian(2)
    again = Gaussian.unflat(own.flat(), 3)
    assert torch.equal(again.flat(), own.flat()) and torch.equal(again.root(), own.root())
    wider = own.stretched(torch.tensor([2.0, 1.0, 1.0]).double())
    assert wider.root().norm(dim=1)[0].item() == pytest.approx(2 * own.root().norm(dim=1)[0].item())


def test_a_step_goes_to_the_bound_and_no_further() -> None:
    """A linear gain, whose best step is along the mean: KL = m^2 / 2 s^2 = eps."""
    old = Gaussian(torch.zeros(1).double(), torch.zeros(1, 1).double())
    for eps in (0.01, 0.1, 0.5):
        new = step(old, lambda g: 3 * g.mean[0], eps, 0.0, 10)
        assert kl(old, new).item() == pytest.approx(eps, rel=1e-6) or kl(old, new) < eps
        assert new.mean.item() in (
            pytest.approx(math.sqrt(2 * eps)), pytest.approx(math.sqrt(2 * eps) / 2),
        )  # fmt: skip


def test_the_line_search_halves_until_it_gains() -> None:
    """The gain is highest at 0.1; a full step to 0.447 loses, as does half of it."""
    old = Gaussian(torch.zeros(1).double(), torch.zeros(1, 1).double())

    def gain(g: Gaussian) -> Any:
        return -((g.mean[0] - 0.1) ** 2)

    new = step(old, gain, 0.1, 0.0, 10)
    assert new.mean.item() == pytest.approx(math.sqrt(0.2) / 4)
    assert torch.equal(step(old, gain, 0.1, 0.0, 2).mean, old.mean)  # two tries are not enough
    assert torch.equal(step(old, lambda g: 0 * g.mean[0], 0.1, 0.0, 10).mean, old.mean)


def test_the_pull_of_the_target() -> None:
    """alpha = zeta mean V / KL; nothing for negative values and in the first `offset` updates."""
    teacher = made(TARGET, spec=LINE, easy={"x": 0.2}, width=0.25, zeta=0.5)
    gap = 0.3**2 / (2 * 0.25**2)  # to (0.5, 0.25)
    assert teacher.weight(torch.tensor([1.0, 3.0])) == pytest.approx(0.5 * 2 / gap)
    assert teacher.weight(torch.tensor([-1.0, -3.0])) == 0
    assert made(TARGET, offset=1).weight(torch.tensor([1.0])) == 0
    there = made(TARGET, spec=LINE, easy={"x": 0.5}, width=0.25)
    assert there.weight(torch.tensor([1.0])) == 1e5  # already there: capped


def test_it_follows_values_that_move() -> None:
    """V(c) = 1 - |c - c*|, c* moving from 0.2 to 0.8: never more than eps, and it arrives."""
    ends = {"easy": {"x": 0.2, "y": 0.2}, "hard": {"x": 0.8, "y": 0.8}, "spread": 0.1}
    teacher = made(TARGET, zeta=0.5, **ends)
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


def test_without_a_pull_it_stays_where_values_are() -> None:
    teacher = made(TARGET, easy={"x": 0.3, "y": 0.3}, zeta=0.0)
    for _ in range(15):
        tasks, tickets = teacher.sample(200)
        teacher.update(tickets, ended(*(1 - (tasks - 0.3).norm(dim=1)).tolist()))
    assert teacher.mean.tolist() == pytest.approx([0.3, 0.3], abs=0.06)


def test_tickets_hold_where_it_was_drawn_or_what_was_played() -> None:
    for clipped in (False, True):
        teacher = made(TARGET, easy={"x": 0.0, "y": 0.0}, clipped=clipped)
        rows = teacher.propose(200)
        drawn = np.array([memo[:2] for _, memo in rows])
        assert (np.stack([played for played, _ in rows]) >= 0).all()
        assert (drawn.min() < 0) != clipped
        logs = log_density(teacher.now(), torch.from_numpy(drawn))
        assert np.array([memo[2] for _, memo in rows]) == pytest.approx(logs.numpy())


def test_values_are_the_critics_the_score_or_discounted() -> None:
    teacher = made(TARGET, value="discounted", gamma=0.5)
    outcome = Outcome(torch.tensor([1.0, 0.5]), torch.ones(2), torch.tensor([2.0, 1.0]))
    assert teacher.scores(outcome).tolist() == [0.25, 0.25]
    critic = made(TARGET, value="critic", every=2, box={"x": [0.0, 0.5]})
    with pytest.raises(ConfigError, match="value=score"):
        critic.values(torch.zeros(1, 2), torch.zeros(1))

    class Student:
        def values(self, tasks: np.ndarray) -> np.ndarray:
            return 10 * tasks[:, 0]

    critic.student = Student()
    asked = critic.values(torch.tensor([[0.5, 0.0], [1.0, 0.0]]).double(), torch.zeros(2))
    assert asked.tolist() == [2.5, 5.0]  # of tasks as the world counts them


def test_a_floor_under_the_deviation_while_far_away() -> None:
    far = made(TARGET, spec=LINE, easy={"x": 0.1}, width=0.01, floor=0.05, apart=1.0)
    assert far.wide(far.now()).root().item() == pytest.approx(0.05)
    near = made(TARGET, spec=LINE, easy={"x": 0.5}, width=0.1, floor=0.2, apart=1.0)
    assert near.wide(near.now()).root().item() == pytest.approx(0.1)
