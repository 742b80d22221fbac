"""Distillation: the divergence by hand, residual teachers, what is refused, the contract."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied.checks.check import Check
from embodied.checks.learner import CHECKS, SPEC, LearnerSubject
from embodied.compose import PACKAGED
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec, SpecMismatch
from embodied.core.tensors import Tensors
from embodied.policies.steering.residual import Residual
from tests.builders import make_learner, make_policy, node_of

WHICH = "privileged/body"
STUDENT = SPEC.with_obs(**{"body": Leaf((2,)), WHICH: Leaf((1,), "int64", low=0)})
KIND = "diagonal_gaussian.DiagonalGaussian"


def normal(spec: Spec, mean: float, std: float, seed: int = 0) -> Any:
    """A policy N(mean, std^2) in each element of the action, at every observation."""
    policy = make_policy(KIND, spec, seed, hidden=[4], zero_head=True, log_std=math.log(std))
    with torch.no_grad():
        policy.net[-1].bias.fill_(mean)
    return policy


def saved(folder: Path, policy: Policy) -> str:
    checkpoint.save(folder / "checkpoints" / "00000001", policy, 1)
    return str(folder)


def distilling(folder: Path, student: Any, **settings: Any) -> Any:
    runs = [
        saved(folder / str(number), normal(SPEC, mean, std))
        for number, (mean, std) in enumerate([(0.2, 0.1), (-0.4, 0.3)])
    ]
    found = {"teachers": runs, "batch_size": 8, **settings}
    return make_learner("imitation.distill.Distill", student, **found)


def seen(n: int = 8) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        "state": torch.randn(n, 3, generator=generator),
        "body": torch.randn(n, 2, generator=generator),
        WHICH: torch.arange(n)[:, None] % 2,
    }


def by_hand(mean: float, std: float, of: float, spread: float) -> float:
    """KL(N(mean, std^2) || N(of, spread^2))."""
    ratio = (std**2 + (mean - of) ** 2) / (2 * spread**2)
    return math.log(spread / std) + ratio - 0.5


def test_the_divergence_by_hand(tmp_path: Path) -> None:
    """Two elements of the action; each observation has its own teacher."""
    learner = distilling(tmp_path, normal(STUDENT, 0.1, 0.2))
    first = 2 * by_hand(0.2, 0.1, 0.1, 0.2)
    second = 2 * by_hand(-0.4, 0.3, 0.1, 0.2)
    obs = seen()
    assert learner.kl(obs).tolist() == pytest.approx([first, second] * 4, rel=1e-5)
    metrics = learner.update({f"obs/{name}": value for name, value in obs.items()})
    assert metrics["kl_loss"].item() == pytest.approx((first + second) / 2, rel=1e-5)
    assert metrics["worst_kl"].item() == pytest.approx(max(first, second), rel=1e-5)


def test_a_student_of_teachers_that_it_can_tell_apart_becomes_both(tmp_path: Path) -> None:
    """The body tells the teacher; the one std of all bodies is the root mean square of theirs."""
    student = make_policy(KIND, STUDENT, hidden=[32])
    learner = distilling(tmp_path, student, lr=0.01)
    obs = seen(64)
    obs["body"] = torch.cat([obs[WHICH].float(), 1 - obs[WHICH].float()], 1)
    batch = {f"obs/{name}": value for name, value in obs.items()}
    for _ in range(400):
        learner.update(batch)
    mean, log_std = student.gaussian(obs)
    wanted = torch.where(obs[WHICH] == 0, 0.2, -0.4)
    assert (mean - wanted).abs().max() < 0.05
    spread = math.sqrt((0.1**2 + 0.3**2) / 2)
    assert log_std.exp()[0].tolist() == pytest.approx([spread, spread], rel=0.05)


def test_squashed_teachers_have_squashed_students(tmp_path: Path) -> None:
    """tanh of both does not change the divergence: that of the normal numbers before it."""
    teacher = make_policy("gaussian.Gaussian", SPEC, 1, hidden=[4])
    student = make_policy("gaussian.Gaussian", STUDENT, 2, hidden=[4])
    learner = distilling(tmp_path, student, teachers=[saved(tmp_path / "sac", teacher)])
    obs = seen()
    assert torch.allclose(learner.kl(obs), teacher.kl(obs, student))


def test_teachers_do_not_change(tmp_path: Path) -> None:
    learner = distilling(tmp_path, normal(STUDENT, 0.1, 0.2))
    before = [value.clone() for value in learner.teachers.state_dict().values()]
    learner.update({f"obs/{name}": value for name, value in seen().items()})
    after = learner.teachers.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def residual(base: Any, inner: dict[str, Any], **settings: Any) -> Any:
    node = node_of("policies.steering.residual.Residual", **settings)
    return Residual.wrap(base, node, inner)


def test_a_residual_is_a_gaussian_around_its_base() -> None:
    """0.3 + 0.5 * 0.2 = 0.4, with half of the standard deviation 0.1."""
    inner = node_of(f"policies.{KIND}", hidden=[4], zero_head=True, log_std=math.log(0.1))
    policy = residual(normal(SPEC, 0.3, 1.0), inner, scale=0.5)
    with torch.no_grad():
        policy.inner.net[-1].bias.fill_(0.2)
    mean, log_std = policy.gaussian({"state": torch.randn(4, 3)})
    assert torch.allclose(mean, torch.full((4, 2), 0.4))
    assert torch.allclose(log_std.exp(), torch.full((4, 2), 0.05))


def test_its_mean_is_what_it_does() -> None:
    """The mean of `gaussian` is the action without exploration, also at the limit of the range."""
    inner = node_of(f"policies.{KIND}", hidden=[8], head=3.0)
    policy = residual(make_policy(KIND, SPEC, hidden=[8], head=3.0), inner, scale=0.7)
    obs = {"state": 3 * torch.randn(16, 3, generator=torch.Generator().manual_seed(0))}
    noise = policy.sample_noise(16)
    decided, carry = policy.observe(obs, policy.initial(16), noise)
    action, _ = policy.act(decided, carry, noise)
    assert torch.allclose(policy.gaussian(obs)[0], action[:, 0], atol=1e-6)
    assert action.abs().max() == 1


def test_residuals_that_have_no_gaussian() -> None:
    inner = node_of(f"policies.{KIND}", hidden=[4])
    squashed = node_of("policies.gaussian.Gaussian", hidden=[4])
    base = make_policy(KIND, SPEC, hidden=[4])
    chunked = make_policy(KIND, SPEC, hidden=[4], chunk=2)
    obs = {"state": torch.zeros(2, 3)}
    wrong = [residual(base, squashed), residual(base, inner, dims=[0]), residual(chunked, inner)]
    for policy in wrong:
        with pytest.raises(ConfigError, match="without action chunks"):
            policy.gaussian(obs)


def test_what_is_refused(tmp_path: Path) -> None:
    student = normal(STUDENT, 0.0, 1.0)
    with pytest.raises(ConfigError, match="names trained runs"):
        make_learner("imitation.distill.Distill", student)
    with pytest.raises(ConfigError, match="tells which of 2 teachers"):
        distilling(tmp_path, student, which="nothing")
    certain = make_policy("deterministic.Deterministic", SPEC, hidden=[4])
    with pytest.raises(ConfigError, match="no normal distribution"):
        distilling(tmp_path, student, teachers=[saved(tmp_path / "certain", certain)])
    with pytest.raises(ConfigError, match="no normal distribution"):
        distilling(tmp_path, certain, teachers=[str(tmp_path / "0")])
    squashed = make_policy("gaussian.Gaussian", SPEC, hidden=[4])
    with pytest.raises(ConfigError, match="only one of them squashes"):
        distilling(tmp_path, student, teachers=[saved(tmp_path / "squashed", squashed)])
    other = normal(SPEC.with_obs(more=Leaf((1,))), 0.0, 1.0)
    with pytest.raises(SpecMismatch, match="more"):
        distilling(tmp_path, student, teachers=[saved(tmp_path / "other", other)])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(check: Check, tmp_path: Path) -> None:
    """With one teacher no observation tells which."""
    node = yaml.safe_load((PACKAGED / "learner" / "distill.yaml").read_text())
    node |= {"teachers": [saved(tmp_path, normal(SPEC, 0.2, 0.1))]}
    check(LearnerSubject(node, (node_of(f"policies.{KIND}", hidden=[8]),)))
