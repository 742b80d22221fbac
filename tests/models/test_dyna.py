"""Updates from imagined transitions, at the budget of updates from the replay buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.buffers.replay import ReplayBuffer
from embodied.cli import main
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.models.dyna import Config, Dyna
from embodied.models.dynamics import Dynamics, Fit, Prediction, Progress
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


@pytest.fixture
def dyna(monkeypatch: pytest.MonkeyPatch) -> Dyna:
    monkeypatch.setattr("embodied.models.dyna.build", lambda node, role, spec: Exact(spec))
    torch.manual_seed(0)
    replay = ReplayBuffer(100)
    state = 2 * torch.rand(50, 2) - 1
    action = 2 * torch.rand(50, 1) - 1
    following, reward, ended = step(state, action)
    discount = 0.9 * (~ended).float()
    rows = {"obs/state": state, "action": action, "reward": reward, "discount": discount}
    replay.add({**rows, "next_obs/state": following})
    node = {"_target_": "embodied.policies.gaussian.Gaussian"}
    policy = build(node, Policy, spec=SPEC)
    return Dyna(Config({}, steps=5, every=3), replay, policy, 0.9, torch.device("cpu"))


def test_the_transitions_are_those_of_the_model(dyna: Dyna) -> None:
    """As many as asked for; each row is a step of the system; a rollout goes on from where it was,
    or after a termination from the buffer; the model is fitted in every third batch."""
    batch = dyna.sample(32)
    assert set(batch) == set(dyna.replay.sample(2)) and tt.length(batch) == 32
    following, reward, ended = step(batch["obs/state"], batch["action"].clamp(-1, 1))
    assert torch.allclose(batch["next_obs/state"], following)
    assert torch.allclose(batch["reward"], reward)
    assert torch.equal(batch["discount"], 0.9 * (~ended).float())
    starts, known = 7, dyna.replay.take(torch.arange(50))["obs/state"]  # 32 / 5, rounded up
    for row in range(32):
        here = batch["obs/state"][row]
        before = row - starts
        if before >= 0 and batch["discount"][before] > 0:
            assert torch.equal(here, batch["next_obs/state"][before])
        else:
            assert float((known - here).abs().amax(1).min()) == 0
    assert bool((batch["next_obs/state"][:, 0] > WALL).any())
    for _ in range(4):
        dyna.sample(10)
    assert isinstance(dyna.model, Exact) and dyna.model.fits == 2 and dyna.batches == 5


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == 0


def test_a_run_and_its_resume(tmp_path: Path) -> None:
    small = ["data.imagined.model.hidden=[8]", "data.imagined.model.most_updates=20"]
    out = f"out={tmp_path / 'run'}"
    run("train", "experiment=pendulum_sac_dyna", *small, "size=debug", "device=cpu", out)
    run("train", f"resume={tmp_path / 'run'}", "steps=280")


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "experiment=pendulum_sac_dyna",
        "size=debug",
        "learner.n_step=2",
        f"out={tmp_path}/run",
    ]
    with pytest.raises(SystemExit) as stopped:
        main(["train", *words])
    assert stopped.value.code != 0
    assert "data.imagined replaces every batch" in capsys.readouterr().err


def test_a_model_of_latents_is_refused(dyna: Dyna, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "embodied.models.dyna.build", lambda node, role, spec: Exact(SPEC.with_obs(more=spec.act))
    )
    with pytest.raises(ConfigError, match="predicts every observation"):
        Dyna(Config({}), dyna.replay, dyna.policy, 0.9, torch.device("cpu"))
