"""The quadrotor: physics by hand, resets and observations; native code equals PyTorch's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.cli import main
from embodied.core.env import NotFinite
from embodied.core.tensors import Tensors
from embodied.embodiments.crazyflie import BOX, GRAVITY, LIBRARY, PAPER, VEHICLES, Vehicle
from embodied.envs.quadrotor.dynamics import Body, Physics, numbers, tilted
from embodied.envs.quadrotor.hover_env import TARGET, Config, Quadrotor, hover
from embodied.nn import native


class Flight:
    """One vehicle in double precision, without a disturbance."""

    def __init__(self, vehicle: Vehicle = PAPER, speed: float | None = None) -> None:
        self.vehicle, exact = vehicle, torch.float64
        self.physics = Physics(vehicle, torch.device("cpu"), exact)
        still = torch.zeros(3, 1, dtype=exact)
        self.body: Body = self.physics.body(numbers(vehicle, exact), still, still)
        self.state = torch.zeros(17, 1, dtype=torch.float64)
        self.state[3] = 1
        self.state[13:] = (vehicle.hover + 1) / 2 if speed is None else speed

    def fly(self, action: list[float] | float, seconds: float, dt: float = 0.01) -> Tensor:
        values = [action] * 4 if isinstance(action, float) else action
        held = torch.tensor(values, dtype=torch.float64)[:, None]
        for _ in range(round(seconds / dt)):
            self.state = self.physics.fly(self.state, held, self.body, dt)
        return self.state


@pytest.mark.parametrize(("name", "vehicle"), VEHICLES.items())
def test_hover_stays(name: str, vehicle: Vehicle) -> None:
    assert Flight(vehicle).fly(vehicle.hover, 5.0)[:3].norm() < 1e-9
    env = Quadrotor(Config(num_envs=1, vehicle=name, disturbance=0.0))
    env.reset(0)
    state = env.get_state()
    state["flight"][0] = Flight(vehicle).state[:, 0].float()
    env.set_state(state)
    for _ in range(499):
        step = env.step(torch.full((1, 4), vehicle.hover))
    assert step.obs["critic/state"][0, :3].norm() < 5e-5  # in single precision


@pytest.mark.parametrize(
    ("rotor", "signs"), enumerate([(-1, -1, -1), (-1, 1, 1), (1, 1, -1), (1, -1, 1)])
)
def test_a_push_of_one_rotor_turns_as_measured(rotor: int, signs: tuple[int, ...]) -> None:
    """+0.1 for 50 ms: 0.544, 0.544 and 0.075 rad/s."""
    action = [PAPER.hover] * 4
    action[rotor] += 0.1
    rate = Flight().fly(action, 0.05)[10:13, 0]
    expected = torch.tensor([0.544, 0.544, 0.075], dtype=torch.float64) * torch.tensor(signs)
    torch.testing.assert_close(rate, expected, atol=6e-4, rtol=0)


def test_free_fall_keeps_its_energy_and_momentum() -> None:
    flight = Flight(speed=0.0)
    flight.state[3:13, 0] = torch.tensor([0.8, 0.36, -0.48, 0.0, 0.3, -0.2, 0.5, 4.0, -3.0, 2.0])
    inertia = torch.tensor(PAPER.inertia, dtype=torch.float64)

    def balance() -> tuple[float, Tensor]:
        state = flight.state
        momentum = inertia * state[10:13, 0]
        falling = PAPER.mass * (GRAVITY * state[2] + state[7:10].square().sum() / 2)
        turning = (momentum * state[10:13, 0]).sum() / 2
        return float(falling + turning), flight.physics.turn(state)[:, 0].view(3, 3) @ momentum

    (before, spin), _ = balance(), flight.fly(-1.0, 2.0)
    after, spun = balance()
    assert after == pytest.approx(before, rel=1e-5)
    torch.testing.assert_close(spun, spin, rtol=1e-4, atol=1e-10)


def test_one_step_is_of_fourth_order() -> None:
    """Half the step, a sixteenth of the error (away from motors that change between steps)."""
    ends = []
    for dt in (0.04, 0.02, 0.01, 0.000625):
        flight = Flight()
        flight.state[10:13, 0] = torch.tensor([6.0, -4.0, 3.0])
        ends.append(flight.fly([0.5, 0.45, 0.55, 0.4], 0.4, dt)[:13].clone())
    error = torch.stack([end - ends[-1] for end in ends[:-1]]).flatten(1).norm(dim=1)
    ratio = error[:-1] / error[1:]
    assert ((ratio > 11) & (ratio < 22)).all()


@pytest.mark.parametrize(("start", "end", "lag"), [(0.2, 0.9, 0.0555), (0.9, 0.2, 0.2494)])
def test_motors_follow_with_their_lag(start: float, end: float, lag: float) -> None:
    """After one time constant 1 - 1/e of the way, up and down with their own constants."""
    speed = Flight(LIBRARY, speed=start).fly(2 * end - 1, lag, lag / 5)[13]
    assert float(speed) == pytest.approx(end + (start - end) / math.e, abs=1e-4)


def test_rotations_of_a_start() -> None:
    """Angles below a quarter turn with P(angle < a) = (a - sin a) / (pi/2 - 1), any direction."""
    random = torch.Generator().manual_seed(0)
    n = 20_000
    q = tilted(torch.randn(3, n, generator=random), torch.rand(n, generator=random))
    torch.testing.assert_close(q.norm(dim=0), torch.ones(n))
    angle = 2 * q[0].clamp(-1, 1).acos()
    assert angle.max() <= math.pi / 2 + 1e-3
    for limit in (0.5, 1.0, 1.3):
        share = (limit - math.sin(limit)) / (math.pi / 2 - 1)
        assert float((angle < limit).float().mean()) == pytest.approx(share, abs=0.02)
    assert q[1:].mean(1).abs().max() < 0.02
    level = tilted(torch.ones(3, 1), torch.zeros(1))
    torch.testing.assert_close(level[:, 0], torch.tensor([1.0, 0, 0, 0]))


def test_the_distribution_of_starts() -> None:
    env = Quadrotor(Config(num_envs=4000))
    known = env.reset(1)["critic/state"]
    place, matrix, motion, upset, speeds = known.split([3, 9, 6, 6, 4], 1)
    guided = (place == 0).all(1)
    assert float(guided.float().mean()) == pytest.approx(0.1, abs=0.02)
    identity = torch.eye(3).flatten().expand(int(guided.sum()), -1)
    torch.testing.assert_close(matrix[guided], identity)
    assert 0.19 < place.abs().max() <= 0.2 and 0.98 < motion.abs().max() <= 1
    assert (speeds == 0).all()
    force, torque = upset.split(3, 1)
    assert float(force.std()) == pytest.approx(0.027 * 9.81 / 20, rel=0.03)
    assert float(torque.std()) == pytest.approx(0.027 * 9.81 / 10_000, rel=0.03)


def test_noise_is_on_what_the_policy_sees_only() -> None:
    env = Quadrotor(Config(num_envs=3000))
    obs = env.reset(2)
    miss = obs["state"][:, :18] - obs["critic/state"][:, :18]
    expected = torch.tensor([0.001] * 12 + [0.002] * 6)
    torch.testing.assert_close(miss.std(0), expected, rtol=0.08, atol=0)
    assert miss.mean(0).abs().max() < 2e-4
    quiet = Quadrotor(Config(num_envs=4, noise=0.0)).reset(2)
    assert torch.equal(quiet["state"][:, :18], quiet["critic/state"][:, :18])


def test_history_is_oldest_first_and_starts_anew() -> None:
    env = Quadrotor(Config(num_envs=2, history=3, horizon=5, guidance=1.0))
    assert (env.reset(0)["state"][:, 18:] == 0).all()  # what keeps the rotors at their start speed
    assert env.spec.obs["state"].names[18] == "front_right_3"
    for count, push in enumerate((0.1, 0.2, 0.3, 0.4, 3.0)):
        step = env.step(torch.full((2, 4), push))
        past = step.next_obs["state"][:, 18:].view(2, 3, 4)[:, :, 0]
        shown = [0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 1.0][count : count + 3]
        torch.testing.assert_close(past[0], torch.tensor(shown))
    assert step.truncated.all() and step.log["success"].all()
    assert (step.obs["state"][:, 18:] == 0).all()


def test_reward_is_of_the_state_before_and_nothing_in_the_step_that_leaves() -> None:
    env = Quadrotor(Config(num_envs=64))
    obs, left = env.reset(3), torch.zeros(64, dtype=torch.bool)
    action = torch.full((64, 4), -1.0)
    for _ in range(60):
        step = env.step(action)
        expected = hover(obs["critic/state"], action, TARGET, PAPER.hover)
        torch.testing.assert_close(step.reward, expected * ~step.terminated)
        outside = step.next_obs["critic/state"][:, :3].abs().amax(1) > BOX
        assert torch.equal(outside, step.terminated)
        obs, left = step.obs, left | step.terminated
    assert left.all()


def test_reward_by_hand() -> None:
    state = torch.zeros(1, 28)
    state[:, 3:12:4] = 1.0
    state[0, :3], state[0, 12:15] = torch.tensor([0.1, 0.0, -0.2]), torch.tensor([0.0, 1.0, 0.0])
    action = torch.full((1, 4), 0.834)
    expected = 2 - 0.5 * (40 * 0.05 + 0 + 1 + 4 * 0.25)
    assert float(hover(state, action, TARGET, 0.334)) == pytest.approx(expected)


def test_a_task_is_a_vehicle() -> None:
    """Twice the mass hovers at twice the thrust; blend 1 is the other vehicle."""
    env = Quadrotor(Config(num_envs=3, ranges={"mass": (1.0, 2.0), "blend": (0.0, 1.0)}))
    assert env.spec.task is not None and env.spec.task.names == ("mass", "blend")
    obs = env.reset(0, task=torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(obs["privileged/vehicle"], torch.tensor([[1.0, 0], [2, 0], [1, 1]]))
    body = Body.of(env.bodies)
    # All rotors at their highest; the constant part of the thrust is counted once a rotor.
    full = (body.still + 4 * (body.linear + body.quadratic))[0].tolist()
    paper, library = PAPER.lift * GRAVITY, LIBRARY.lift * GRAVITY
    assert full == pytest.approx([paper, paper / 2, library], rel=1e-5)
    for ranges, says in (
        ({"wind": (0.0, 1.0)}, r"unknown parameter .wind."),
        ({"mass": (0.0, 1.0)}, r"mass=\[0, 1\] is not a valid range"),
    ):
        with pytest.raises(ValueError, match=says):
            Quadrotor(Config(ranges=ranges))


def test_words_and_picture() -> None:
    env = Quadrotor(Config(num_envs=2, guidance=1.0, horizon=50))
    env.reset(0)
    said, centre = env.describe(1), env.render(0, 64, 48)
    assert said.startswith("The quadrotor is 0.00 m from the target") and "tilted 0 degrees" in said
    assert centre.shape == (48, 64, 3) and centre.dtype == torch.uint8
    for _ in range(25):
        env.step(torch.full((2, 4), -1.0))
    assert not torch.equal(env.render(0, 64, 48), centre) and "sinking" in env.describe(0)
    model, data = env.scene(0)
    assert data.qpos[2] == pytest.approx(float(env.state[2, 0])) and model.nbody == 2
    env.close()


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
        close({**here.next_obs, "reward": here.reward}, {**there.next_obs, "reward": there.reward})
        close(here.obs, there.obs)
        obs, ended = here.obs, ended + int(here.ended.sum())
    assert ended >= 2
    one, other = slow.get_state(), fast.get_state()
    assert torch.equal(one["stream"], other["stream"]) and torch.equal(one["count"], other["count"])
    close(one, other)
    action = held_up(slow, obs["critic/state"], random)
    close(slow.set_state(other), fast.set_state(one))
    close(slow.step(action).obs, fast.step(action).obs)


def test_resets_of_some_with_tasks() -> None:
    slow, fast = (made(code, num_envs=5, ranges=ALL) for code in (False, True))
    slow.reset(0)
    fast.reset(0)
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
            assert torch.equal(seen[-1], step.next_obs["critic/state"][step.ended, :3].T)
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
