"""Learned models: a linear system to small error, elites on held-out data, folders, the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.models import dynamics
from embodied.models.dynamics import Dynamics, Fit
from embodied.models.ensemble import MlpEnsemble, bounded, gaussian_loss, held_out, predicted
from embodied.models.train import TrainConfig, model_transitions, read, train
from tests.builders import exit_of
from tests.linear_system import SPEC, fitted, node, record, step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[Dynamics, Fit]:
    demos = str(record(folder / "demos", 120))
    return train(TrainConfig(node(most_updates=3000), demos, str(folder / "model"), device="cpu"))


def points(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """States and actions of which the model has seen the like."""
    random = torch.Generator().manual_seed(7)
    state = torch.rand(count, 2, generator=random) - torch.tensor([0.8, 0.5])
    return state, 2 * torch.rand(count, 1, generator=random) - 1


def test_a_linear_system_is_learned(made: tuple[Dynamics, Fit]) -> None:
    model, fit = made
    state, action = points()
    following, reward, _ = step(state, action)
    guess = model.step({"state": state}, action, torch.zeros(len(state), model.noise_size))
    change = (following - state).std(0)
    assert ((guess.next_obs["state"] - following).square().mean(0).sqrt() < 0.02 * change).all()
    assert (guess.reward - reward).square().mean().sqrt() < 0.02 * reward.std()
    by = {output.name: output for output in fit.outputs}
    assert list(by) == ["state/x", "state/v", "reward", "terminated"]
    assert all(by[name].explained > 0.999 for name in ("state/x", "state/v", "reward"))
    assert by["state/x"].unit == "m"


def test_terminations_are_learned(made: tuple[Dynamics, Fit]) -> None:
    model, _ = made
    for x, ends in ((-0.3, False), (0.2, False), (0.45, True)):
        state = torch.tensor([[x, 0.0]]).expand(64, 2)
        noise = torch.zeros(64, model.noise_size)
        noise[:, -1] = torch.linspace(-1, 1, 64)  # probabilities from 0.16 to 0.84
        found = model.step({"state": state}, torch.zeros(64, 1), noise).terminated
        assert bool((found == ends).all()), x


def test_noise_decides(made: tuple[Dynamics, Fit]) -> None:
    """Equal noise, equal outcome; the first element chooses an elite, never another network."""
    model = made[0]
    assert isinstance(model, MlpEnsemble)
    state, action = points(64)
    noise = torch.randn(64, model.noise_size)
    one, other = (model.step({"state": state}, action, noise) for _ in range(2))
    assert torch.equal(one.next_obs["state"], other.next_obs["state"])
    assert not torch.equal(
        one.next_obs["state"], model.step({"state": state}, action, -noise).next_obs["state"]
    )
    noise = torch.zeros(64, model.noise_size)
    noise[:, 0] = torch.linspace(-9, 9, 64)
    mean, _, _ = model(model.inputs({"state": state}, action))
    out = mean[model.elites] * model.scale + model.shift
    found = model.step({"state": state}, action, noise).next_obs["state"]
    assert torch.allclose(found[0], (state + out[0, :, :2])[0], atol=1e-6)
    assert torch.allclose(found[-1], (state + out[-1, :, :2])[-1], atol=1e-6)


def test_elites_have_the_least_held_out_error(folder: Path, made: tuple[Dynamics, Fit]) -> None:
    """Two of three networks learn from spoiled targets: the third one is the first elite."""

    class Spoiled(MlpEnsemble):
        def loss(self, batch: Any) -> torch.Tensor:
            y = batch.y.clone()
            y[:2] = -y[:2]
            return super().loss(type(batch)(batch.x, y, batch.ended))

    torch.manual_seed(0)
    built = build(node(most_updates=300), Dynamics, spec=SPEC)
    assert isinstance(built, MlpEnsemble)
    model = Spoiled(built.config, SPEC)
    rows = model_transitions(read([str(folder / "demos")]), SPEC.obs)
    model.fit(rows)
    assert int(model.elites[0]) == 2


def test_the_best_parameters_are_kept(folder: Path, made: tuple[Dynamics, Fit]) -> None:
    """A fit whose updates only make it worse ends with the parameters that it began with."""

    class Wrong(MlpEnsemble):
        def loss(self, batch: Any) -> torch.Tensor:
            return -self(batch.x)[0].square().mean((1, 2)) + 0 * super().loss(batch)

    built = build(node(most_updates=3000, patience=2), Dynamics, spec=SPEC)
    assert isinstance(built, MlpEnsemble)
    model = Wrong(built.config, SPEC)
    before = [weight.clone() for weight in model.net.weights]
    fit = model.fit(model_transitions(read([str(folder / "demos")]), SPEC.obs))
    assert fit.history[-1][0] == 200  # two looks without improvement
    assert all(torch.equal(a, b) for a, b in zip(before, model.net.weights, strict=True))


def test_episodes_are_held_out_whole() -> None:
    episode = torch.arange(10).repeat_interleave(torch.arange(1, 11))
    held = held_out(episode, len(episode), 0.2)
    shares = [held[episode == number].float().mean().item() for number in range(10)]
    assert sorted(shares) == [0.0] * 8 + [1.0] * 2
    assert int(held_out(None, 50, 0.1).sum()) == 5
    assert int(held_out(torch.zeros(50), 50, 0.1).sum()) == 5, "of a single episode, transitions"
    with pytest.raises(ConfigError, match="at least two"):
        held_out(None, 1, 0.1)


def test_the_loss_by_hand() -> None:
    mean, target = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[0.0, 4.0]]])
    log_var = torch.log(torch.tensor([[[1.0, 2.0]]]))
    by_hand = ((1 / 1 + 0.0) + (4 / 2 + torch.log(torch.tensor(2.0)))) / 2
    assert torch.allclose(gaussian_loss(mean, log_var, target), by_hand[None])
    low, high = torch.tensor([-10.0]), torch.tensor([0.5])
    found = bounded(torch.tensor([-100.0, -3.0, 100.0]), low, high)
    assert torch.allclose(found, torch.tensor([-10.0, -3.0, 0.5]), atol=0.05)


def test_a_folder_gives_the_same_model(folder: Path, made: tuple[Dynamics, Fit]) -> None:
    again = dynamics.load(folder / "model")
    state, action = points(16)
    noise = torch.randn(16, again.noise_size)
    one, other = (m.step({"state": state}, action, noise) for m in (made[0], again))
    assert torch.equal(one.next_obs["state"], other.next_obs["state"])
    assert torch.equal(one.reward, other.reward) and again.spec == made[0].spec
    files = "about.json metrics.jsonl model.safetensors model.yaml spec.json"
    assert sorted(file.name for file in (folder / "model").iterdir()) == files.split()
    about = json.loads((folder / "model" / "about.json").read_text())
    assert about["held_out"]["state/x"]["error"] < 0.01 * about["held_out"]["state/x"]["spread"]


def test_a_folder_of_another_person_builds_models_only(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.yaml"
    text = file.read_text()
    file.write_text(yaml.safe_dump({"_target_": "embodied.policies.encoded.Random"}))
    with pytest.raises(ConfigError, match="is no Dynamics"):
        dynamics.load(tmp_path / "model")
    file.write_text(text.replace("networks: 3", "networks: 4"))
    with pytest.raises(ConfigError, match="do not fit"):
        dynamics.load(tmp_path / "model")
    file.write_text(text)
    about = tmp_path / "model" / "about.json"
    about.write_text(about.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="newer"):
        dynamics.load(tmp_path / "model")
    with pytest.raises(ConfigError, match="holds no model"):
        dynamics.load(tmp_path)


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    demos = str(record(tmp_path / "demos", 10))
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(TrainConfig(node(most_updates=50), demos, str(tmp_path / name), seed=seed))
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not all(torch.equal(a[key], c[key]) for key in a)


def test_discrete_actions_and_chosen_observations() -> None:
    """The state moves by the number of the choice; a picture is left out by model.obs."""
    spec = Spec(
        {"state": Leaf((1,), low=0.0, high=100.0), "eye": Leaf((4, 4, 3), "uint8")},
        Leaf((), "int64", 0, 2),
        dt=0.1,
    )
    state = 50 * torch.rand(600, 1)
    action = torch.randint(3, (600,))
    rows = {
        "obs/state": state,
        "action": action,
        "reward": action.float(),
        "discount": torch.ones(600),
        "next_obs/state": state + action[:, None],
    }
    with pytest.raises(ConfigError, match=r"eye is uint8.*model.obs=\[state\]"):
        build(node(), Dynamics, spec=spec)
    with pytest.raises(ConfigError, match='no observation "stat"'):
        predicted(spec, ("stat",))
    torch.manual_seed(0)
    model = build(node(obs=["state"], most_updates=1500), Dynamics, spec=spec)
    model.fit(rows)
    at = torch.full((3, 1), 20.0)
    found = model.step({"state": at}, torch.arange(3), torch.zeros(3, model.noise_size))
    assert torch.allclose(found.next_obs["state"][:, 0], torch.tensor([20.0, 21, 22]), atol=0.1)
    assert torch.allclose(found.reward, torch.arange(3).float(), atol=0.1)
    end = model.step({"state": 100 * torch.ones(1, 1)}, torch.tensor([2]), torch.zeros(1, 4))
    assert end.next_obs["state"].item() == 100.0, "observations stay within their bounds"
    noise = torch.zeros(1, 4)
    noise[:, -1] = -20.0
    assert not model.step({"state": at[:1]}, torch.tensor([2]), noise).terminated, (
        "none in the data"
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demos = [str(record(tmp_path / name, 6, seed)) for seed, name in enumerate("ab")]
    given = ["model=ensemble", "model.hidden=[16]", "model.most_updates=100"]
    out = tmp_path / "model"
    assert exit_of("model", "train", f"demos=[{','.join(demos)}]", f"out={out}", *given) == 0
    shown = capsys.readouterr().out
    assert "state/v" in shown and "explained" in shown and f"env.model={out}" in shown
    about = json.loads((out / "about.json").read_text())
    assert about["episodes"] == 12 and about["demos"] == demos
    assert isinstance(dynamics.load(out), MlpEnsemble)
    assert exit_of("model", "train", f"demos={demos[0]}", f"out={out}") == 2
    assert f"out={out} exists" in capsys.readouterr().err
    other = f"out={tmp_path / 'c'}"
    assert exit_of("model", "train", f"demos={demos[0]}", other, "model.elites=9") == 2
    assert "model.elites=9" in capsys.readouterr().err
    assert exit_of("model", "train", "demos=nowhere", other) == 2
    assert "demos=nowhere" in capsys.readouterr().err


def test_settings_of_the_system_are_reusable(tmp_path: Path) -> None:
    given = fitted(tmp_path, most_updates=20)
    rows = model_transitions(read([given["starts"]]), SPEC.obs)
    assert tt.length(rows) > 400 and {"obs/state", "next_obs/state", "episode"} < rows.keys()
    assert int((rows["discount"] == 0).sum()) > 15
