"""HIB and RMA: codes of the past, the bottleneck and the two stages, by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, nest
from embodied.learners.imitation.rma import Config as RmaConfig
from embodied.learners.imitation.rma import Rma
from embodied.learners.off_policy.hib import Config, Hib, divergence
from embodied.policies.deterministic import Config as PolicyConfig
from embodied.policies.deterministic import Deterministic
from embodied.policies.networks.history import CODE, PastEncoder, PrivilegedEncoder

STEPS = 12
VEHICLE = Leaf((2,), names=("mass", "lag"))
OBS = {"sent": Leaf((STEPS, 2)), "state": Leaf((STEPS, 3)), "privileged/vehicle": VEHICLE}
SPEC = Spec(OBS, Leaf((2,), low=-1.0, high=1.0), 0.01)
PAST = "embodied.policies.networks.history.PastEncoder"
PRIVILEGED = "embodied.policies.networks.history.PrivilegedEncoder"


def make_policy() -> Deterministic:
    return Deterministic(PolicyConfig(hidden=(16,), extractor=PAST), SPEC)


def make(**settings: Any) -> Hib:
    torch.manual_seed(0)
    critics = tuple(OBS)
    config = Config(batch_size=64, hidden=(16,), critic_obs=critics, actor_lr=3e-3, **settings)
    learner = Hib(config, make_policy(), SPEC)
    learner.fit(batch())
    return learner


def batch() -> Tensors:
    """The mass is the mean of the past of the first element; the lag is not predicted."""
    state = torch.randn(64, STEPS, 3)
    state[:, :, 0] += torch.randn(64, 1)
    vehicle = torch.stack([10 + state[:, :, 0].mean(1), torch.randn(64)], 1)
    obs = {"sent": torch.randn(64, STEPS, 2), "state": state, "privileged/vehicle": vehicle}
    rows = {"action": torch.rand(64, 2), "reward": torch.zeros(64), "discount": torch.zeros(64)}
    return {**nest(obs, "obs"), **nest(obs, "next_obs"), **rows}


def seen(rows: Tensors) -> Tensors:
    return {key: rows[f"obs/{key}"] for key in OBS}


def test_the_divergence_from_a_standard_normal() -> None:
    mean = torch.tensor([[0.0, 1.0]])
    std = torch.tensor([[1.0, 2.0]])
    # 0 + (1 + 4 - 1) / 2 - log 2
    torch.testing.assert_close(divergence(mean, std), torch.tensor([2 - math.log(2)]))


def test_features_are_the_present_and_a_code() -> None:
    encoder = PastEncoder(OBS)
    obs = seen(batch())
    features = encoder(obs)
    now = torch.cat([obs["sent"][:, -1], obs["state"][:, -1]], 1)
    torch.testing.assert_close(features, torch.cat([now, encoder.posterior(obs)[0]], 1))


def test_the_teacher_does_not_read_the_past() -> None:
    encoder = PrivilegedEncoder(OBS)
    obs = seen(batch())
    other = {**obs, "state": obs["state"].clone()}
    other["state"][:, :-1] = 0.0
    torch.testing.assert_close(encoder(obs), encoder(other))
    heavier = {**obs, "privileged/vehicle": obs["privileged/vehicle"] + 1}
    assert (encoder(obs) != encoder(heavier)).any()


def test_the_error_is_a_gaussian_likelihood() -> None:
    learner = make()
    for parameter in learner.tell.parameters():
        torch.nn.init.zeros_(parameter)
    rows = batch()
    learner.known.fit(rows)
    _, error, predicted = learner.bottleneck(seen(rows), torch.zeros(64, CODE))
    # A mean of 0 and a variance of 1 for two standardised numbers (2 * 1/2): nothing is predicted.
    assert error.item() == pytest.approx(1.0, abs=0.05)
    assert predicted.item() == pytest.approx(0.0, abs=0.05)


def test_it_learns_what_the_past_tells() -> None:
    learner = make(code_lr=3e-3)
    for _ in range(150):
        metrics = learner.update(batch())
    assert 0.3 < metrics["predicted"] < 0.6  # of two numbers, one is in the past


def test_a_heavy_bottleneck_forgets() -> None:
    rates: list[float] = []
    for beta in (1e-3, 100.0):
        learner = make(beta=beta, code_lr=3e-3)
        for _ in range(150):
            metrics = learner.update(batch())
        rates.append(metrics["rate"].item())
    assert rates[1] < 0.2 * rates[0]  # RL moves the code too


def test_a_resumed_learner_goes_on_the_same() -> None:
    learner = make()
    rows = [batch() for _ in range(3)]
    for each in rows[:2]:
        learner.update(each)
    other = make()
    other.set_state(learner.get_state())
    torch.manual_seed(1)
    wanted = [learner.update(rows[2]) for _ in range(2)][-1]
    torch.manual_seed(1)
    assert [other.update(rows[2]) for _ in range(2)][-1] == wanted
    for one, two in zip(learner.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_the_student_learns_the_teachers_code(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = "embodied.policies.deterministic.Deterministic"
    node = {"_target_": kind, "hidden": [16], "extractor": PRIVILEGED}
    teacher = build(node, Deterministic, spec=SPEC)
    teacher.fit(batch())
    checkpoint.save(tmp_path / "1", teacher, step=1)
    policy = make_policy()
    learner = Rma(RmaConfig(teacher=str(tmp_path / "1"), lr=3e-3), policy, SPEC)
    for name, value in teacher.net.state_dict().items():
        torch.testing.assert_close(policy.net.state_dict()[name], value)
    first = learner.update(batch())["code_loss"]
    for _ in range(200):
        last = learner.update(batch())["code_loss"]
    assert last < 0.8 * first  # the lag, and what the code says of it, stays unknown
    for name, value in teacher.net.state_dict().items():
        torch.testing.assert_close(policy.net.state_dict()[name], value)


def test_other_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="code of the past"):
        Hib(Config(), Deterministic(PolicyConfig(), SPEC), SPEC)
    with pytest.raises(ConfigError, match="FrameStack"):
        PastEncoder({"state": Leaf((2,), names=("x", "v"))})
    with pytest.raises(ConfigError, match=r"learner\.teacher=RUN"):
        Rma(RmaConfig(), make_policy(), SPEC)
