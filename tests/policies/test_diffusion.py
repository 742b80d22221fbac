"""Denoising against the schedulers' own steps."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.policies.generative.diffusion import Config, Diffusion
from tests.builders import make_policy

SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def make(**settings: float) -> Diffusion:
    given = {"chunk": 3, "width": 16, **settings}
    return make_policy("generative.diffusion.Diffusion", SPEC, **given)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [4, 10, 100])
@torch.no_grad()
def test_steps_are_those_of_the_scheduler(eta: float, count: int) -> None:
    policy = make(steps=count, eta=eta)
    obs, noise = {"state": torch.randn(5, 2)}, policy.sample_noise(5)
    assert noise.shape == (5, 3 if eta == 0 else 3 * count)
    features, (x, *fresh) = policy.encoder(obs), noise.split(3, 1)
    for i, t in enumerate(policy.sampler.timesteps):
        predicted = policy.net(x, torch.full((5,), float(t) / 100), features)
        given = {"variance_noise": fresh[i]} if i < len(fresh) else {}
        # The last step adds no noise in either, whatever it is given.
        last = {"variance_noise": torch.zeros(5, 3)} if eta and not given else {}
        x = policy.sampler.step(
            predicted, t, x, eta=eta, use_clipped_model_output=True, **given, **last
        ).prev_sample
    actions, _ = policy.act(obs, {}, noise)
    torch.testing.assert_close(actions[:, :, 0], x.clamp(-1, 1), atol=1e-5, rtol=0)


def test_one_step_equals_the_schedulers_to_a_millionth() -> None:
    policy = make(steps=10)
    for step in policy.grid:
        x, e = torch.randn(50), torch.randn(50)
        expected = policy.sampler.step(e, step.t, x, use_clipped_model_output=True).prev_sample
        x0 = ((x - step.remain * e) / step.keep).clamp(-1, 1)
        ours = step.next_keep * x0 + step.next_remain * (x - step.keep * x0) / step.remain
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)


def test_without_eta_the_noise_decides() -> None:
    policy = make(eta=0.0)
    obs, noise = {"state": torch.randn(4, 2)}, policy.sample_noise(4)
    first, _ = policy.act(obs, {}, noise)
    torch.manual_seed(7)
    assert torch.equal(first, policy.act(obs, {}, noise)[0])


def test_the_schedule_is_the_squared_cosine() -> None:
    policy = make(train_steps=20, steps=5)

    def level(t: float) -> float:
        return math.cos((t / 20 + 0.008) / 1.008 * math.pi / 2) ** 2

    for step in policy.grid:
        # abar is a product of betas cut off at 0.999, and level(0) is not quite 1.
        assert step.keep**2 == pytest.approx(level(step.t + 1) / level(0), abs=1e-4)
    assert [step.t for step in policy.grid] == [16, 12, 8, 4, 0]
    assert policy.grid[-1].next_keep == 1.0 and policy.grid[-1].next_remain == 0.0


def test_a_network_that_knows_the_noise_finds_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data at one point c, e = (x - keep c) / remain is exact, and acting ends at c."""
    policy = make()
    keep = {step.t / 100: (step.keep, step.remain) for step in policy.grid}
    levels = torch.tensor([[step.t / 100] for step in policy.grid])
    monkeypatch.setattr(policy, "embedded", lambda: levels)

    def exact(x: Tensor, time: Tensor, features: Tensor) -> Tensor:
        near = min(keep, key=lambda t: abs(t - time.item()))
        return (x - 0.4 * keep[near][0]) / keep[near][1]

    monkeypatch.setattr(policy.net, "at", exact)
    actions, _ = policy.act({"state": torch.zeros(6, 2)}, {}, policy.sample_noise(6))
    torch.testing.assert_close(actions, torch.full((6, 3, 1), 0.4), atol=1e-5, rtol=0)


def test_steps_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=7 must divide train_steps=100"):
        make(steps=7)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.schedulers.scheduling_ddim", None)
    with pytest.raises(ConfigError, match=r'pip install "embodied-rl\[diffusion\]"'):
        Diffusion(Config(), SPEC)
