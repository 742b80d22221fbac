"""Updates from imagined transitions, at the budget of updates from the replay buffer; MEX, whose
model is tilted: the term by hand, where it moves a model, and Dyna without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from embodied.buffers.replay import ReplayBuffer
from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.models import optimistic
from embodied.models.dyna import Config, Dyna
from embodied.models.dynamics import Dynamics, Fit, Prediction, Progress
from embodied.models.ensemble import MlpEnsemble, Rows
from embodied.models.optimistic import OptimisticDyna
from embodied.nn.optim import Adam
from tests.builders import exit_of, make_policy, node_of
from tests.linear_system import SPEC, WALL, step


class Exact(Dynamics):
    """The linear system itself; counts its fits."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec, self.noise_size, self.fits = spec, 1, 0

    def fit(self, transitions: Tensors, progress: Progress = lambda *_: None) -> Fit:
        self.fits += 1
        return Fit((), (), {})

    def step(self, obs: Tensors, action: torch.Tensor, noise: torch.Tensor) -> Prediction:
        following, reward, ended = step(obs["state"], action.clamp(-1, 1))
        return Prediction({"state": following}, reward, ended)


def recorded(count: int) -> Tensors:
    """Transitions of the system, at random."""
    torch.manual_seed(0)
    state, action = 2 * torch.rand(count, 2) - 1, 2 * torch.rand(count, 1) - 1
    following, reward, ended = step(state, action)
    rows = {"obs/state": state, "action": action, "reward": reward}
    return rows | {"discount": 0.9 * (~ended).float(), "next_obs/state": following}


def parts(rows: Tensors) -> tuple[ReplayBuffer, Policy, float, torch.device]:
    """What an imagining source is built with: replay, policy, gamma and device."""
    replay = ReplayBuffer(100)
    replay.add(rows)
    policy = make_policy("gaussian.Gaussian", SPEC, seed=None, hidden=[8])
    return replay, policy, 0.9, torch.device("cpu")


@pytest.fixture
def dyna(monkeypatch: pytest.MonkeyPatch) -> Dyna:
    monkeypatch.setattr("embodied.models.dyna.build", lambda node, role, spec: Exact(spec))
    return Dyna(Config({}, steps=5, every=3), *parts(recorded(50)))


def test_the_transitions_are_those_of_the_model(dyna: Dyna) -> None:
    """As many as asked for; each row is a step of the system; a rollout goes on from where it was,
    or after a termination from the buffer; the model is fitted in every third batch."""
    batch = dyna.sample(32)
    assert set(batch) == set(dyna.replay.sample(2)) and tt.length(batch) == 32
    state, after = batch["obs/state"], batch["next_obs/state"]
    following, reward, ended = step(state, batch["action"].clamp(-1, 1))
    expected = {"next_obs/state": following, "reward": reward, "discount": 0.9 * (~ended).float()}
    torch.testing.assert_close({key: batch[key] for key in expected}, expected)
    starts = 7  # 32 / 5, rounded up
    goes_on = torch.cat([torch.zeros(starts, dtype=torch.bool), batch["discount"][:-starts] > 0])
    assert torch.equal(state[goes_on], after[:-starts][goes_on[starts:]])
    known = dyna.replay.take(torch.arange(50))["obs/state"]
    assert torch.equal(torch.cdist(state[~goes_on], known).amin(1), torch.zeros((~goes_on).sum()))
    assert bool((after[:, 0] > WALL).any())
    for _ in range(4):
        dyna.sample(10)
    assert isinstance(dyna.model, Exact) and dyna.model.fits == 2 and dyna.batches == 5


def test_a_run_and_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.imagined.model.hidden=[8]", "data.imagined.model.most_updates=20"]
    words = ["experiment=pendulum_sac_dyna", *small, "size=debug", "device=cpu"]
    assert exit_of("train", *words, f"out={tmp_path / 'run'}") == 0
    assert exit_of("train", f"resume={tmp_path / 'run'}", "steps=280") == 0
    assert exit_of("train", *words, "learner.n_step=2", f"out={tmp_path}/other") != 0
    assert "data.imagined replaces every batch" in capsys.readouterr().err


def test_a_model_of_latents_is_refused(dyna: Dyna, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "embodied.models.dyna.build", lambda node, role, spec: Exact(SPEC.with_obs(more=spec.act))
    )
    with pytest.raises(ConfigError, match="predicts every observation"):
        Dyna(Config({}), dyna.replay, dyna.policy, 0.9, torch.device("cpu"))


class Likes:
    """Critics that value the first element of the state, and three times as much."""

    out = 1

    def __call__(self, obs: Tensors, action: Tensor) -> Tensor:
        return torch.stack([3 * obs["state"][:, 0] + 9, obs["state"][:, 0]])


def made(networks: int = 1, critic: Any = None, **settings: Any) -> tuple[OptimisticDyna, Rows]:
    rows = recorded(64)
    sizes = {"networks": networks, "elites": 1, "hidden": [8], "most_updates": 100}
    config = optimistic.Config(node_of("models.ensemble.MlpEnsemble", **sizes), **settings)
    dyna = OptimisticDyna(config, *parts(rows), critic or Likes())
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


@pytest.mark.parametrize(("kappa", "tilted"), [(0.0, False), (0.1, True)])
def test_without_weight_it_is_dyna(kappa: float, tilted: bool) -> None:
    dyna, _ = made(kappa=kappa)
    assert isinstance(dyna.model, MlpEnsemble)
    assert (dyna.model.further_loss is not None) == tilted
    dyna.fit()
    assert dyna.sample(20)["reward"].isfinite().all()


def test_other_critics_are_refused() -> None:
    with pytest.raises(ConfigError, match="learner=sac"):
        made(critic=lambda obs, action: obs)
