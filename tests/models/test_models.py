"""Learned models: a linear system to small error, elites on held-out data, folders, the command;
sparse equations: the pendulum's coefficients, thresholding by hand, ends, text and C.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.transitions import read_joined
from embodied.export.c_header import FLAGS
from embodied.models import dynamics
from embodied.models.dynamics import Dynamics, Fit
from embodied.models.ensemble import MlpEnsemble, bounded, gaussian_loss, held_out, predicted
from embodied.models.sindy import Config, Library, Sindy, readable, stlsq
from embodied.models.train import TrainConfig, model_transitions, train
from tests.builders import exit_of
from tests.linear_system import SPEC, node, record, step

RANDOM = "embodied.policies.random.Random"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[Dynamics, Fit]:
    demos = str(record(folder / "demos", 120))
    return train(TrainConfig(node(most_updates=3000), demos, str(folder / "model"), device="cpu"))


def spoiled(kind: type[MlpEnsemble], **settings: Any) -> MlpEnsemble:
    """A small ensemble with another loss."""
    torch.manual_seed(0)
    built = build(node(**settings), Dynamics, spec=SPEC)
    assert isinstance(built, MlpEnsemble)
    return kind(built.config, SPEC)


def equal(one: Dynamics, other: Dynamics, noise_size: int) -> bool:
    """Whether two models predict the same."""
    state, action = points(16)
    noise = torch.randn(16, noise_size)
    a, b = (model.step({"state": state}, action, noise) for model in (one, other))
    return torch.equal(a.next_obs["state"], b.next_obs["state"]) and torch.equal(a.reward, b.reward)


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
    assert [o.name for o in fit.outputs] == ["state/x", "state/v", "reward", "terminated"]
    assert all(output.explained > 0.999 for output in fit.outputs[:3])
    assert fit.outputs[0].unit == "m"


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
    one, same, other = (
        model.step({"state": state}, action, each).next_obs["state"]
        for each in (noise, noise, -noise)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    noise = torch.zeros(64, model.noise_size)
    noise[:, 0] = torch.linspace(-9, 9, 64)
    mean, _, _ = model(model.inputs({"state": state}, action))
    change = (mean[model.elites] * model.scale + model.shift)[..., :2]
    found = model.step({"state": state}, action, noise).next_obs["state"]
    torch.testing.assert_close(found[0], state[0] + change[0, 0])
    torch.testing.assert_close(found[-1], state[-1] + change[-1, -1])


def test_elites_have_the_least_held_out_error(folder: Path, made: tuple[Dynamics, Fit]) -> None:
    """Two of three networks learn from spoiled targets: the third one is the first elite."""

    class Spoiled(MlpEnsemble):
        def loss(self, batch: Any) -> torch.Tensor:
            y = batch.y.clone()
            y[:2] = -y[:2]
            return super().loss(type(batch)(batch.x, y, batch.ended))

    model = spoiled(Spoiled, most_updates=300)
    model.fit(model_transitions(read_joined([str(folder / "demos")]), SPEC.obs))
    assert int(model.elites[0]) == 2


def test_the_best_parameters_are_kept(folder: Path, made: tuple[Dynamics, Fit]) -> None:
    """A fit whose updates only make it worse ends with the parameters that it began with."""

    class Wrong(MlpEnsemble):
        def loss(self, batch: Any) -> torch.Tensor:
            return -self(batch.x)[0].square().mean((1, 2)) + 0 * super().loss(batch)

    model = spoiled(Wrong, most_updates=3000, patience=2)
    before = [weight.clone() for weight in model.net.weights]
    fit = model.fit(model_transitions(read_joined([str(folder / "demos")]), SPEC.obs))
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
    assert equal(made[0], again, again.noise_size) and again.spec == made[0].spec
    files = "about.json metrics.jsonl model.safetensors model.yaml spec.json"
    assert sorted(file.name for file in (folder / "model").iterdir()) == files.split()
    about = json.loads((folder / "model" / "about.json").read_text())["held_out"]["state/x"]
    assert about["error"] < 0.01 * about["spread"]


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        ("model.yaml", "embodied.models.ensemble.MlpEnsemble", RANDOM, "is no Dynamics"),
        ("model.yaml", "networks: 3", "networks: 4", "do not fit"),
        ("about.json", '"format": 1', '"format": 2', "newer"),
        ("about.json", None, None, "holds no model"),
    ],
)
def test_a_folder_of_another_person_builds_models_only(
    folder: Path, made: Any, tmp_path: Path, file: str, old: str, new: str, why: str
) -> None:
    if old:
        shutil.copytree(folder / "model", tmp_path, dirs_exist_ok=True)
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=why):
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
    place, eye = Leaf((1,), low=0.0, high=100.0), Leaf((4, 4, 3), "uint8")
    spec = Spec({"state": place, "eye": eye}, Leaf((), "int64", 0, 2), dt=0.1)
    with pytest.raises(ConfigError, match=r"eye is uint8.*model.obs=\[state\]"):
        build(node(), Dynamics, spec=spec)
    with pytest.raises(ConfigError, match='no observation "stat"'):
        predicted(spec, ("stat",))
    state, action = 50 * torch.rand(600, 1), torch.randint(3, (600,))
    rows = {"obs/state": state, "action": action, "reward": action.float()}
    rows |= {"discount": torch.ones(600), "next_obs/state": state + action[:, None]}
    torch.manual_seed(0)
    model = build(node(obs=["state"], most_updates=1500), Dynamics, spec=spec)
    model.fit(rows)
    at = torch.tensor([[20.0], [20.0], [20.0], [100.0]])
    choice, noise = torch.tensor([0, 1, 2, 2]), torch.zeros(4, model.noise_size)
    noise[:, -1] = -20.0
    found = model.step({"state": at}, choice, noise)
    after = found.next_obs["state"][:, 0]
    assert torch.allclose(after[:3], torch.tensor([20.0, 21, 22]), atol=0.1)
    assert torch.allclose(found.reward[:3], torch.arange(3).float(), atol=0.1)
    assert after[3] == 100.0, "observations stay within their bounds"
    assert not found.terminated.any(), "none in the data"


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
    other = f"out={tmp_path / 'c'}"
    for words, why in (
        ([f"demos={demos[0]}", f"out={out}"], f"out={out} exists"),
        ([f"demos={demos[0]}", other, "model.elites=9"], "model.elites=9"),
        (["demos=nowhere", other], "demos=nowhere"),
    ):
        assert exit_of("model", "train", *words) == 2
        assert why in capsys.readouterr().err


PENDULUM = Spec(
    {"state": Leaf((2,), names=("angle", "speed"))}, Leaf((1,), low=-1.0, high=1.0), dt=0.05
)
GRAVITY, TORQUE, DT = 15.0, 3.0, 0.05


def make(spec: Spec = PENDULUM, **settings: Any) -> Sindy:
    torch.manual_seed(0)
    node = {"_target_": "embodied.models.sindy.Sindy", **settings}
    model = build(node, Dynamics, spec=spec)
    assert isinstance(model, Sindy)
    return model


def swing(count: int = 500) -> Tensors:
    """Transitions of the Euler-discretised pendulum, without noise: episodes of 25 steps."""
    random = torch.Generator().manual_seed(3)
    state = torch.tensor([6.0, 8.0]) * (torch.rand(count, 2, generator=random) - 0.5)
    action = 2 * torch.rand(count, 1, generator=random) - 1
    angle, speed = state.T
    faster = speed + DT * (GRAVITY * angle.sin() + TORQUE * action[:, 0])
    return {
        "obs/state": state,
        "action": action,
        "reward": -(angle.square() + 0.1 * speed.square() + 0.01 * action[:, 0].square()),
        "discount": torch.ones(count),
        "next_obs/state": torch.stack([angle + DT * speed, faster], 1),
        "episode": torch.arange(count) // 25,
    }


def test_the_pendulum_is_recovered() -> None:
    """From 500 noiseless samples every coefficient to 1e-3, and no other term."""
    model = make(angles=[0])
    fit = model.fit(swing())
    names = ["state/angle", "state/speed", "sin(state/angle)", "cos(state/angle)", "action[0]"]
    assert model.names() == names
    words = [readable(term, names) for term in model.dynamics.terms]
    found = [
        {word: c for word, c in zip(words, column, strict=True) if c}
        for column in model.agreed(model.changes).T.tolist()
    ]
    expected = {"sin(state/angle)": DT * GRAVITY, "action[0]": DT * TORQUE}
    assert found[0] == pytest.approx({"state/speed": DT}, abs=1e-3)
    assert found[1] == pytest.approx(expected, abs=1e-3)
    assert all(output.explained > 0.9999 for output in fit.outputs[:3])
    assert fit.facts["terms"].startswith("3 of")
    text = model.equations()
    assert "state/angle' = state/angle + 0.05 state/speed\n" in text
    assert "+ 0.75 sin(state/angle)" in text and "- 0.1 state/speed^2" in text


def test_thresholding_by_hand() -> None:
    """Orthogonal terms: each coefficient is its correlation, and small ones are dropped. Of two
    equal terms a ridge gives each half; where one is missing the other takes it all."""
    config = Config(threshold=0.1, ridge=1e-9)
    for gram, cross, known, expected in (
        (torch.eye(3), [0.5, 0.05, -0.2], [True, True, True], [0.5, 0.0, -0.2]),
        (torch.ones(2, 2), [1.0, 1.0], [True, True], [0.5, 0.5]),
        (torch.ones(2, 2), [1.0, 1.0], [True, False], [1.0, 0.0]),
    ):
        given = torch.tensor(cross, dtype=torch.float64)
        found = stlsq(gram.double(), given, torch.tensor(known), config)
        assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_library_by_hand() -> None:
    """Of degree 2 in x, y and an action a that occurs once at most in a term."""
    library = Library(3, 2, last=2, most=1)
    words = [readable(term, ["x", "y", "a"]) for term in library.terms]
    assert words == ["", "x", "y", "a", "x^2", "x y", "x a", "y^2", "y a"]
    assert len(Library(3, 2, last=2, most=1, once=[0]).terms) == 8, "x^2 is left out"
    values = library(torch.tensor([[2.0, 3.0, 5.0]]))
    assert values.tolist() == [[1.0, 2.0, 3.0, 5.0, 4.0, 6.0, 10.0, 9.0, 15.0]]


def test_states_stay_on_circles_and_within_borders() -> None:
    model = make(circles=[[0, 1]], outside="end")
    model.least.copy_(torch.tensor([-0.9, -1.0]))
    model.most.copy_(torch.tensor([0.9, 1.0]))
    found, outside = model.kept(torch.tensor([[3.0, 4.0], [-2.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [-0.9, 0.0]]))
    assert outside.tolist() == [False, True]
    end = model.step({"state": torch.tensor([[1.0, 0.0]])}, torch.zeros(1, 1), torch.zeros(1, 1))
    assert bool(end.terminated), "untrained, the state stays at 1, outside of 0.9"


def test_a_member_that_goes_astray_is_left_out() -> None:
    model = make(angles=[0], members=5, drop=0, rollout=5)
    rows = swing()
    model.fit(rows)
    assert model.used.all()
    before = model.agreed(model.changes)
    model.changes[0] += 0.05
    held = torch.arange(500) >= 400
    # Rollouts follow recorded actions, and these rows are no episodes: one step.
    model.config = Config(angles=(0,), members=5, drop=0, rollout=1)
    model._judge(model.rows(rows), held, rows["episode"])  # pyright: ignore[reportPrivateUsage]
    assert model.used.tolist() == [False, True, True, True, True]
    torch.testing.assert_close(model.agreed(model.changes), before, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def equations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dynamics]:
    folder = tmp_path_factory.mktemp("sindy")
    node = {"_target_": "embodied.models.sindy.Sindy"}
    config = TrainConfig(node, str(record(folder / "demos")), str(folder / "model"), device="cpu")
    return folder / "model", train(config)[0]


def test_transitions_of_no_episodes_are_not_rolled_out() -> None:
    """In the order of a replay, the next one may be of another environment."""
    rows = {key: value for key, value in swing().items() if key != "episode"}
    model = make(degree=1, rollout=2)
    facts = model.fit(rows).facts
    assert facts["error_after_2_steps"] is None and model.used.all()


def test_ends_are_learned(equations: tuple[Path, Dynamics]) -> None:
    """The linear system ends beyond a wall: a few per cent of the steps."""
    model = equations[1]
    for x, ends in ((-0.3, False), (0.15, False), (0.42, True)):
        state, zero = torch.tensor([[x, 0.0]]), torch.zeros(1, 1)
        assert bool(model.step({"state": state}, zero, zero).terminated) == ends, x


def test_a_folder_holds_equations_and_the_same_model(equations: tuple[Path, Dynamics]) -> None:
    folder, model = equations
    assert "state/x' = state/x + 0.1 state/v" in (folder / "equations.txt").read_text()
    assert equal(model, dynamics.load(folder), 1)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("circles", [[], [[0, 1]]])
def test_the_c_code_is_the_same(tmp_path: Path, circles: list[list[int]]) -> None:
    model = make(angles=[0], circles=circles, outside="end")
    model.fit(swing())
    (tmp_path / "model.h").write_text(model.header())
    given = "(const float *x, const float *u, float *n, float *r)"
    body = "{ return model_step(x, u, n, r); }"
    source = f'#include "model.h"\nint run{given};\nint run{given} {body}\n'
    (tmp_path / "main.c").write_text(source)
    library = tmp_path / "model.so"
    words = ["cc", *FLAGS, "-shared", "-fPIC", "-o", str(library), "main.c", "-lm"]
    subprocess.run(words, cwd=tmp_path, check=True)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ctypes.c_void_p] * 4
    state, action = 8 * torch.rand(50, 2) - 4, 2 * torch.rand(50, 1) - 1
    found, reward = torch.zeros(50, 2), torch.zeros(50, 1)
    tensors = zip(state, action, found, reward, strict=True)
    ends = [bool(run(*(row.data_ptr() for row in rows))) for rows in tensors]
    expected = model.step({"state": state}, action, torch.zeros(50, 1))
    torch.testing.assert_close(found, expected.next_obs["state"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reward[:, 0], expected.reward, atol=1e-4, rtol=1e-4)
    assert ends == expected.terminated.tolist()
    assert 0 < sum(ends) < 50 or circles, "beyond the data an episode ends"


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="place 7 should be below 2"):
        make(angles=[7])
    with pytest.raises(ConfigError, match="drop=0"):
        make(members=2)


def test_a_member_is_drawn() -> None:
    model = make(SPEC, use="member", members=3)
    model.changes[:, 0, 0] = torch.tensor([1.0, 2.0, 3.0])  # the constant of the first equation
    model.used.copy_(torch.tensor([True, False, True]))
    noise = torch.tensor([[-9.0], [9.0]])
    found = model.step({"state": torch.zeros(2, 2)}, torch.zeros(2, 1), noise).next_obs["state"]
    assert found[:, 0].tolist() == [1.0, 3.0]
