"""The hover environment in native code: equals the PyTorch code, which stays the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.cli import main
from embodied.core.env import NotFinite, Step
from embodied.core.tensors import Tensors
from embodied.envs.quadrotor.hover_env import Config, Quadrotor
from embodied.nn import native

ALL = {"inertia": (0.8, 1.2), "mass": (0.9, 1.1), "blend": (0.0, 1.0), "disturbance": (0.0, 2.0)}
ALL |= {"thrust": (0.95, 1.1), "torque": (0.8, 1.2), "lag": (0.7, 1.3)}
SETTINGS: dict[str, dict[str, Any]] = {
    "as configured": {"num_envs": 37},
    "one flight": {"num_envs": 1, "horizon": 40},
    "no history": {"num_envs": 16, "history": 0},
    "other vehicle, weights": {"num_envs": 20, "vehicle": "library", "weights": {"position": 8.0}},
    "short, guided, more noise": {"horizon": 7, "guidance": 0.8, "noise": 3.0, "disturbance": 2.0},
    "no noise": {"num_envs": 16, "noise": 0.0, "disturbance": 0.0, "history": 1},
    "randomized": {"num_envs": 50, "ranges": ALL},
}


def made(code: bool, **settings: Any) -> Quadrotor:
    env = Quadrotor(Config(native=code, **settings))
    assert (env.native_obstacle() is None) == code
    return env


def held_up(env: Quadrotor, known: Tensor, random: torch.Generator) -> Tensor:
    """Actions that keep most flights in the box for a while, and random ones."""
    height, rise = known[:, 2:3], known[:, 14:15]
    push = 2 * torch.rand(env.num_envs, 4, generator=random) - 1
    return env.vehicle.hover - 0.6 * height - 0.3 * rise + 0.2 * push


def close(one: Tensors, other: Tensors) -> None:
    """Velocities of a tumbling quadrotor reach 50 rad/s."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=1e-4, atol=5e-5, msg=key)


def exact(one: Step, other: Step, rows: slice) -> None:
    for key in one.obs:
        assert torch.equal(one.obs[key], other.obs[key][rows]), key
        assert torch.equal(one.next_obs[key], other.next_obs[key][rows]), key
    for name in ("reward", "terminated", "truncated"):
        assert torch.equal(getattr(one, name), getattr(other, name)[rows]), name


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_reference_over_300_steps(name: str) -> None:
    slow, fast = (made(code, **SETTINGS[name]) for code in (False, True))
    close(slow.reset(3), fast.reset(3))
    random, obs, ended = torch.Generator().manual_seed(0), slow.reset(), 0
    fast.reset()
    for _ in range(300):
        action = held_up(slow, obs["critic/state"], random)
        here, there = slow.step(action), fast.step(action)
        assert torch.equal(here.terminated, there.terminated)
        assert torch.equal(here.truncated, there.truncated)
        torch.testing.assert_close(here.reward, there.reward, rtol=1e-4, atol=5e-5)
        close(here.next_obs, there.next_obs)
        close(here.obs, there.obs)
        obs, ended = here.obs, ended + int(here.ended.sum())
    assert ended >= 2
    one, other = slow.get_state(), fast.get_state()
    assert torch.equal(one["stream"], other["stream"]) and torch.equal(one["count"], other["count"])
    close(one, other)


def test_either_goes_on_from_the_state_of_the_other() -> None:
    slow, fast = (made(code, num_envs=9, ranges=ALL) for code in (False, True))
    fast.reset(4)
    random = torch.Generator().manual_seed(1)
    for _ in range(30):
        obs = fast.step(held_up(fast, torch.zeros(9, 28), random)).obs
    close(obs, slow.set_state(fast.get_state()))
    action = held_up(fast, obs["critic/state"], random)
    close(slow.step(action).obs, fast.step(action).obs)


def test_state_goes_back_bit_for_bit_over_resets() -> None:
    env, other = (made(True, num_envs=8, ranges=ALL, seed=seed) for seed in (0, 9))
    env.reset(5)
    random = torch.Generator().manual_seed(1)
    plan = [torch.rand(8, 4, generator=random) * 2 - 1 for _ in range(100)]
    env.step(plan[0])
    state = env.get_state()
    kept = {key: value.clone() for key, value in state.items()}
    other.set_state(state)
    ended = 0
    for action in plan:
        here = env.step(action)
        exact(here, other.step(action), slice(None))
        ended += int(here.ended.sum())
    assert ended > 5
    assert all(torch.equal(state[key], value) for key, value in kept.items())


def test_a_flight_does_not_depend_on_the_others_bit_for_bit() -> None:
    few, many = made(True, num_envs=3), made(True, num_envs=37)
    few.reset(4)
    many.reset(4)
    random = torch.Generator().manual_seed(0)
    for _ in range(120):
        action = torch.rand(37, 4, generator=random) * 2 - 1
        exact(few.step(action[:3]), many.step(action), slice(0, 3))


def test_earlier_observations_stay_as_they_were() -> None:
    env = made(True, num_envs=4)
    obs = env.reset(0)
    kept = {key: value.clone() for key, value in obs.items()}
    step = env.step(torch.ones(4, 4))
    env.step(torch.ones(4, 4))
    assert all(torch.equal(obs[key], value) for key, value in kept.items())
    assert step.obs is step.next_obs


def test_resets_of_some_with_tasks() -> None:
    slow, fast = (made(code, num_envs=5, ranges=ALL) for code in (False, True))
    for env in (slow, fast):
        env.reset(0)
    task = torch.rand(5, len(ALL), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([True, False, True, False, False])
    close(slow.reset(7, task, mask), fast.reset(7, task, mask))
    torch.testing.assert_close(fast.task[:, 2], task[2])


def test_hooks_see_the_last_state_before_a_reset() -> None:
    env, seen = made(True, num_envs=6), []
    env.add_pre_reset_hook(lambda rows: seen.append(env.state[:3, rows].clone()))
    env.reset(0)
    for _ in range(60):
        step = env.step(torch.full((6, 4), -1.0))
        if step.ended.any():
            last = step.next_obs["critic/state"][step.ended, :3].T
            assert torch.equal(seen[-1], last)
    assert seen


def test_a_wrong_action_changes_nothing() -> None:
    env = made(True, num_envs=2)
    env.reset(0)
    before = env.get_state()
    with pytest.raises(NotFinite, match="quadrotor"):
        env.step(torch.tensor([[0.0] * 4, [float("nan")] * 4]))
    with pytest.raises(ValueError, match="action is"):
        env.step(torch.zeros(3, 4))
    assert all(torch.equal(value, before[key]) for key, value in env.get_state().items())


def test_without_a_compiler_the_reference_flies(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    env = Quadrotor(Config(native=True))
    assert env.native is None and "no C++ compiler" in str(env.native_obstacle())
    env.reset(0)
    env.step(torch.zeros(16, 4))
    monkeypatch.undo()
    native.load.cache_clear()
    assert "compile=true" in str(Quadrotor(Config(native=True, compile=True)).native_obstacle())


def test_a_run_says_which_code_flies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "experiment=quadrotor_ppo", "size=debug", "video=false"]
    found = {"false": "native code", "true": "PyTorch (native=false, compile=false)"}
    for deterministic, code in found.items():
        with pytest.raises(SystemExit, match="0"):
            main([*words, f"deterministic={deterministic}", f"out={tmp_path / deterministic}"])
        assert f"environment: {code}" in capsys.readouterr().out
