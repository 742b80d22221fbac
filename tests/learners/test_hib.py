"""HIB: the code of the past and its bottleneck, by hand."""

import math

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import nest
from embodied.learners.off_policy.hib import Config, Hib, divergence
from embodied.policies.deterministic import Config as PolicyConfig
from embodied.policies.deterministic import Deterministic
from embodied.policies.networks.history import LATENT, HistoryEncoder

STEPS = 16
NAMES = ("x", "v", *(f"{motor}_{age}" for age in range(STEPS, 0, -1) for motor in ("a", "b")))
OBS = {
    "state": Leaf((len(NAMES),), names=NAMES),
    "privileged/vehicle": Leaf((2,), names=("mass", "lag")),
}
SPEC = Spec(OBS, Leaf((2,), low=-1.0, high=1.0), 0.01)
EXTRACTOR = "embodied.policies.networks.history.HistoryEncoder"


def make(**settings: float) -> Hib:
    torch.manual_seed(0)
    policy = Deterministic(PolicyConfig(hidden=(16,), extractor=EXTRACTOR), SPEC)
    critics = ("state", "privileged/vehicle")
    config = Config(batch_size=64, hidden=(16,), critic_obs=critics, actor_lr=3e-3, **settings)
    return Hib(config, policy, SPEC)


def batch() -> dict[str, torch.Tensor]:
    """The mass is the mean of the past `a`; the lag is not to be told."""
    state = torch.randn(64, len(NAMES))
    state[:, 2::2] += torch.randn(64, 1)
    vehicle = torch.stack([10 + state[:, 2::2].mean(1), torch.randn(64)], 1)
    obs = {"state": state, "privileged/vehicle": vehicle}
    rows = {"action": torch.rand(64, 2), "reward": torch.zeros(64), "discount": torch.zeros(64)}
    return {**nest(obs, "obs"), **nest(obs, "next_obs"), **rows}


def test_the_divergence_from_a_standard_normal() -> None:
    mean = torch.tensor([[0.0, 1.0]])
    std = torch.tensor([[1.0, 2.0]])
    # 0 + (1 + 4 - 1) / 2 - log 2
    torch.testing.assert_close(divergence(mean, std), torch.tensor([2 - math.log(2)]))


def test_the_past_is_in_the_order_of_time() -> None:
    encoder = HistoryEncoder(OBS)
    assert encoder.now.tolist() == [0, 1]
    assert encoder.past.tolist() == list(range(2, 2 + 2 * STEPS))
    state = torch.randn(3, len(NAMES))
    assert encoder({"state": state}).shape == (3, 2 + LATENT)
    moved = state.clone()
    moved[:, 0] += 1  # the code does not depend on the present
    for part, other in zip(
        encoder.posterior({"state": state}), encoder.posterior({"state": moved}), strict=True
    ):
        torch.testing.assert_close(part, other)


def test_the_error_is_a_gaussian_likelihood() -> None:
    learner = make()
    for parameter in learner.tell.parameters():
        torch.nn.init.zeros_(parameter)
    rows = batch()
    learner.scale.fit(rows["obs/privileged/vehicle"])
    obs = {key.removeprefix("obs/"): leaf for key, leaf in rows.items() if key.startswith("obs/")}
    _, error, told = learner.bottleneck(obs, torch.zeros(64, LATENT))
    # A mean of 0 and a variance of 1 for two standardised numbers: 2 * 1/2, and nothing is told.
    assert error.item() == pytest.approx(1.0, abs=0.05)
    assert told.item() == pytest.approx(0.0, abs=0.05)


def test_it_learns_what_the_past_tells() -> None:
    learner = make(weight=1.0)
    for _ in range(150):
        metrics = learner.update(batch())
    assert 0.3 < metrics["told"] < 0.6  # of two numbers, one is in the past


def test_a_heavy_bottleneck_forgets() -> None:
    learner = make(weight=1.0, beta=100.0)
    for _ in range(150):
        metrics = learner.update(batch())
    assert metrics["rate"] < 0.05


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


def test_other_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="code of the past"):
        Hib(Config(), Deterministic(PolicyConfig(), SPEC), SPEC)
    with pytest.raises(ConfigError, match=r"env\.history=32"):
        HistoryEncoder({"state": Leaf((2,), names=("x", "v"))})
