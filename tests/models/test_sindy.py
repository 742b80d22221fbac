"""Sparse equations: the pendulum's coefficients, thresholding by hand, ends, text and C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.export.c_header import FLAGS
from embodied.models import dynamics
from embodied.models.dynamics import Dynamics
from embodied.models.sindy import Config, Library, Sindy, readable, stlsq
from embodied.models.train import TrainConfig, train
from tests.linear_system import SPEC, record

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
    state = torch.rand(count, 2, generator=random) * torch.tensor([6.0, 8.0]) - torch.tensor(
        [3.0, 4.0]
    )
    action = 2 * torch.rand(count, 1, generator=random) - 1
    speed = state[:, 1] + DT * (GRAVITY * state[:, 0].sin() + TORQUE * action[:, 0])
    following = torch.stack([state[:, 0] + DT * state[:, 1], speed], 1)
    reward = -(state[:, 0].square() + 0.1 * state[:, 1].square() + 0.01 * action[:, 0].square())
    return {
        "obs/state": state,
        "action": action,
        "reward": reward,
        "discount": torch.ones(count),
        "next_obs/state": following,
        "episode": torch.arange(count) // 25,
    }


def test_the_pendulum_is_recovered() -> None:
    """From 500 noiseless samples every coefficient to 1e-3, and no other term."""
    model = make(angles=[0])
    fit = model.fit(swing())
    names = model.names()
    assert names == [
        "state/angle",
        "state/speed",
        *("sin(state/angle)", "cos(state/angle)"),
        "action[0]",
    ]
    words = [readable(term, names) for term in model.dynamics.terms]
    found = [
        {word: c for word, c in zip(words, column.tolist(), strict=True) if c}
        for column in model.agreed(model.changes).T
    ]
    assert found[0] == {"state/speed": pytest.approx(DT, abs=1e-3)}
    assert found[1] == {
        "sin(state/angle)": pytest.approx(DT * GRAVITY, abs=1e-3),
        "action[0]": pytest.approx(DT * TORQUE, abs=1e-3),
    }
    assert all(output.explained > 0.9999 for output in fit.outputs[:3])
    assert fit.facts["terms"].startswith("3 of")
    text = model.equations()
    assert "state/angle' = state/angle + 0.05 state/speed\n" in text
    assert "+ 0.75 sin(state/angle)" in text and "- 0.1 state/speed^2" in text


def test_thresholding_by_hand() -> None:
    """Orthogonal terms: each coefficient is its correlation, and small ones are dropped. Of two
    equal terms a ridge gives each half; where one is missing the other takes it all."""
    every = torch.ones(3, dtype=torch.bool)
    config = Config(threshold=0.1, ridge=1e-9)
    cross = torch.tensor([0.5, 0.05, -0.2], dtype=torch.float64)
    found = stlsq(torch.eye(3, dtype=torch.float64), cross, every, config)
    torch.testing.assert_close(found, torch.tensor([0.5, 0.0, -0.2], dtype=torch.float64))
    twins = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    both = torch.ones(2, dtype=torch.float64)
    assert stlsq(twins, both, every[:2], config).tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    one = torch.tensor([True, False])
    assert stlsq(twins, both, one, config).tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


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
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dynamics]:
    folder = tmp_path_factory.mktemp("sindy")
    node = {"_target_": "embodied.models.sindy.Sindy"}
    config = TrainConfig(node, str(record(folder / "demos")), str(folder / "model"), device="cpu")
    return folder / "model", train(config)[0]


def test_ends_are_learned(fitted: tuple[Path, Dynamics]) -> None:
    """The linear system ends beyond a wall: a few per cent of the steps."""
    model = fitted[1]
    for x, ends in ((-0.3, False), (0.15, False), (0.42, True)):
        state, zero = torch.tensor([[x, 0.0]]), torch.zeros(1, 1)
        assert bool(model.step({"state": state}, zero, zero).terminated) == ends, x


def test_a_folder_holds_equations_and_the_same_model(fitted: tuple[Path, Dynamics]) -> None:
    folder, model = fitted
    assert "state/x' = state/x + 0.1 state/v" in (folder / "equations.txt").read_text()
    again = dynamics.load(folder)
    state, action = torch.rand(8, 2) - 0.5, 2 * torch.rand(8, 1) - 1
    zero = torch.zeros(8, 1)
    one, other = (each.step({"state": state}, action, zero) for each in (model, again))
    assert torch.equal(one.next_obs["state"], other.next_obs["state"])
    assert torch.equal(one.reward, other.reward)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("circles", [[], [[0, 1]]])
def test_the_c_code_is_the_same(tmp_path: Path, circles: list[list[int]]) -> None:
    model = make(angles=[0], circles=circles, outside="end")
    model.fit(swing())
    (tmp_path / "model.h").write_text(model.header())
    (tmp_path / "main.c").write_text(
        '#include "model.h"\nint run(const float *, const float *, float *, float *);\n'
        "int run(const float *x, const float *u, float *n, float *r) "
        "{ return model_step(x, u, n, r); }\n"
    )
    library = tmp_path / "model.so"
    words = ["cc", *FLAGS, "-shared", "-fPIC", "-o", str(library), "main.c", "-lm"]
    subprocess.run(words, cwd=tmp_path, check=True)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ctypes.c_void_p] * 4
    state, action = 8 * torch.rand(50, 2) - 4, 2 * torch.rand(50, 1) - 1
    expected = model.step({"state": state}, action, torch.zeros(50, 1))
    found, reward = torch.zeros(50, 2), torch.zeros(50)
    ends = [
        bool(run(*(t.data_ptr() for t in (state[k], action[k], found[k], reward[k : k + 1]))))
        for k in range(50)
    ]
    torch.testing.assert_close(found, expected.next_obs["state"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reward, expected.reward, atol=1e-4, rtol=1e-4)
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
