"""MEX, model-based: the term by hand, where it moves a model, and Dyna without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from embodied.buffers.replay import ReplayBuffer
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.models.dyna import OptimisticConfig, OptimisticDyna
from embodied.models.ensemble import MlpEnsemble, Rows
from embodied.nn.optim import Adam
from tests.builders import node_of
from tests.linear_system import SPEC, step


class Likes:
    """Critics that value the first element of the state, and three times as much."""

    out = 1

    def __call__(self, obs: Tensors, action: Tensor) -> Tensor:
        return torch.stack([3 * obs["state"][:, 0] + 9, obs["state"][:, 0]])


def made(networks: int = 1, critic: Any = None, **settings: Any) -> tuple[OptimisticDyna, Rows]:
    torch.manual_seed(0)
    replay = ReplayBuffer(100)
    state, action = 2 * torch.rand(64, 2) - 1, 2 * torch.rand(64, 1) - 1
    following, reward, ended = step(state, action)
    rows = {"obs/state": state, "action": action, "reward": reward}
    rows |= {"discount": 0.9 * (~ended).float(), "next_obs/state": following}
    replay.add(rows)
    policy = build(node_of("policies.gaussian.Gaussian", hidden=[8]), Policy, spec=SPEC)
    sizes = {"networks": networks, "elites": 1, "hidden": [8], "most_updates": 100}
    model = node_of("models.ensemble.MlpEnsemble", **sizes)
    device = torch.device("cpu")
    config = OptimisticConfig(model, **settings)
    dyna = OptimisticDyna(config, replay, policy, 0.9, device, critic or Likes())
    assert isinstance(dyna.model, MlpEnsemble)
    found = dyna.model.rows(rows)
    return dyna, found.take(torch.arange(64).expand(networks, 64))


def test_the_term_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    dyna, batch = made(kappa=0.5)
    model: Any = dyna.model
    noise = torch.randn(1, 64, 3)
    monkeypatch.setattr(torch, "randn_like", lambda like: noise)
    monkeypatch.setattr(dyna, "_act", lambda obs: torch.full((64, 1), 0.3))
    x = torch.cat([batch.x[0, :, :2], torch.full((64, 1), 0.3)], 1)
    mean, log_var, _ = (part.detach() for part in model(x))
    drawn = mean + (0.5 * log_var).exp() * noise
    state = x[:, :2]
    there = (state + drawn[0, :, :2]).clamp(model.low, model.high)
    # The smaller critic is the second one, wherever 2 s + 9 > 0.
    gain = drawn[0, :, 2] + 0.9 * there[:, 0] - state[:, 0]
    gain = (gain - gain.mean()) / gain.std(correction=0)
    likelihood = Normal(mean, (0.5 * log_var).exp()).log_prob(drawn)[0].sum(1)
    expected = -0.5 * (likelihood * gain).mean()
    assert dyna.tilt(batch).item() == pytest.approx(expected.item(), abs=1e-5)


def test_it_moves_the_model_to_what_is_liked() -> None:
    dyna, batch = made(networks=2, kappa=1.0)
    model: Any = dyna.model
    before = model(batch.x)[0][..., 0].mean(1).detach()
    adam = Adam(model.net.parameters(), 3e-3)
    for _ in range(60):
        dyna.tilt(batch).sum().backward()
        adam.step()
        model.min_log_var.grad = model.max_log_var.grad = None
    assert (model(batch.x)[0][..., 0].mean(1) > before + 0.1).all()
    assert all(p.grad is None for p in dyna.policy.parameters())


def test_without_weight_it_is_dyna() -> None:
    for kappa, tilted in ((0.0, False), (0.1, True)):
        dyna, _ = made(kappa=kappa)
        assert isinstance(dyna.model, MlpEnsemble)
        assert (dyna.model.further_loss is not None) == tilted
        dyna.fit()
    assert dyna.sample(20)["reward"].isfinite().all()


def test_other_critics_are_refused() -> None:
    with pytest.raises(ConfigError, match="learner=sac"):
        made(critic=lambda obs, action: obs)
