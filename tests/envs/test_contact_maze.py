"""The contact maze by hand, and the energy tank around it: what it pays for is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.envs.toy.contact_maze import (
    GOAL,
    LOWER,
    MASS,
    UPPER,
    Config,
    ContactMaze,
    contact,
    distance,
    inside,
    stiffness_of,
)
from embodied.envs.wrappers.energy_tank import Config as TankConfig
from embodied.envs.wrappers.energy_tank import EnergyTank


def quiet(n: int = 1, **settings: float) -> ContactMaze:
    env = ContactMaze(Config(num_envs=n, push=0.0, **settings))  # type: ignore[arg-type]
    env.reset(0)
    return env


def put(env: ContactMaze, *places: tuple[float, float]) -> None:
    env.places = torch.tensor(places)
    env.setpoints = torch.tensor(places)


def test_a_wall_pushes_back_as_a_spring_and_a_damper_and_never_pulls() -> None:
    """The left border ends at x = 0; a disc of 20 mm at 18 mm is 2 mm deep: 10,000 x 0.002 = 20 N,
    and 60 N s/m x 0.1 m/s = 6 N more where it comes on at 0.1 m/s."""
    boxes = quiet().boxes
    x = torch.tensor([[0.018, 0.45]] * 3 + [[0.021, 0.45]])
    v = torch.tensor([[0.0, 0.0], [-0.1, 0.0], [9.0, 0.0], [-9.0, 0.0]])
    expected = torch.tensor([[20.0, 0.0], [26.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(contact(x, v, boxes), expected, atol=1e-3, rtol=0)


def test_the_stiffness_goes_in_equal_ratios() -> None:
    stiffness = stiffness_of(torch.tensor([-1.0, 0.0, 1.0]))
    torch.testing.assert_close(stiffness, torch.tensor([100.0, 100 * 10**0.5, 1000.0]))


@pytest.mark.parametrize(("stiffness", "force", "violated"), [(-1.0, 5.0, False), (1.0, 50, True)])
def test_a_stiff_arm_presses_too_hard_and_a_soft_one_does_not(
    stiffness: float, force: float, violated: bool
) -> None:
    """The set-point gets 50 mm beyond the tool, which the wall holds: 0.05 K newtons."""
    env, action = quiet(limit=1e3 if violated else 30.0), torch.tensor([[-1.0, 0.0, stiffness]])
    put(env, (0.02, 0.45))
    steps = [env.step(action) for _ in range(40)]
    assert not any(step.terminated for step in steps)
    assert steps[-1].log["force"].item() == pytest.approx(force, rel=0.02)
    env.config = Config(num_envs=1, push=0.0)
    assert bool(env.step(action).log["violated"]) == violated


def test_a_violation_ends_the_episode_and_is_no_success() -> None:
    env = quiet(2)
    put(env, (0.05, 0.45), (0.3, 0.3))
    env.velocity = torch.tensor([[-3.0, 0.0], [0.0, 0.0]])
    step = env.step(torch.zeros(2, 3))
    while not step.log["violated"][0]:
        step = env.step(torch.zeros(2, 3))
    assert step.log["violated"].tolist() == step.terminated.tolist() == [True, False]
    assert not (step.truncated | step.log["success"]).any() and step.log["force"][0] > 30
    assert step.next_obs["state"][0, 0] < 0.03 and step.obs["state"][0, 4:6].eq(0).all()


def test_nobody_moves_it_but_a_hand_does() -> None:
    env = quiet()
    begun = env.places[0, 0].item()
    env.push[:, 0], env.when[:] = torch.tensor([10.0, 0.0]), 12
    places = [env.step(torch.zeros(1, 3)).next_obs["state"][0, 0].item() for _ in range(20)]
    assert places[:12] == pytest.approx([begun] * 12, abs=1e-6)
    # At most 10 N / K, K = 316 N/m: 32 mm, and it comes back a little.
    assert 0.01 < max(places) - begun < 0.032


def test_distances_go_round_the_ends_of_the_walls() -> None:
    first, second, goal = (torch.tensor(place) for place in (UPPER, LOWER, GOAL))
    last = (second - goal).norm()
    at = torch.stack([first - torch.tensor([0.03, 0.04]), torch.tensor([0.3, 0.24]), goal])
    expected = torch.stack([0.05 + (first - second).norm() + last, 0.1 + last, torch.tensor(0.0)])
    torch.testing.assert_close(distance(at), expected)
    places = torch.tensor([[0.2, 0.3], [0.2, 0.36], [0.4, 0.3]])
    assert inside(places, quiet().boxes).tolist() == [True, False, True]


def test_there_is_a_way() -> None:
    """From point to point at half speed and middle stiffness, nothing is hit."""
    env, (won, bad) = quiet(8), torch.zeros(2, 8, dtype=torch.bool)
    points = torch.tensor([[0.1, 0.4], [0.2, 0.4], [0.3, 0.3], [0.4, 0.2], GOAL])
    at = torch.zeros(8, dtype=torch.int64)
    for _ in range(240):
        at = (at + ((points[at] - env.places).norm(dim=1) < 0.03)).clamp(max=len(points) - 1)
        aim = points[at] - env.places
        aim = aim / aim.norm(dim=1, keepdim=True).clamp(min=0.05)
        step = env.step(torch.cat([0.5 * aim, torch.zeros(8, 1)], 1))
        won, bad = won | step.log["success"], bad | step.log["violated"]
    assert won.all() and not bad.any()


YAML = Path(__file__).resolve().parents[2] / "configs" / "env" / "contact_maze_tank.yaml"


def tank(num_envs: int = 8, push: float = 0.0, **more: Any) -> EnergyTank:
    """As the YAML has it, with ticks of 20 ms."""
    node = yaml.safe_load(YAML.read_text())
    inner = build(node["env"] | {"num_envs": num_envs, "push": push, "limit": 1e9}, VecEnv)
    made = node["wrappers"][0] | more
    made.pop("_target_")
    return EnergyTank(TankConfig(**made), inner)


def maze(env: EnergyTank) -> ContactMaze:
    assert isinstance(env.env, ContactMaze)
    return env.env


def stored(env: EnergyTank, action: Tensor) -> np.ndarray:
    """Kinetic, in the springs, and in the tank [B], J: what was last done with `action`."""
    inner = maze(env)
    stiffness = torch.from_numpy(env.tank.stiffness[:, 0])
    e, v = inner.setpoints - inner.places, inner.velocity
    energy = 0.5 * MASS * (v * v).sum(1) + 0.5 * stiffness * (e * e).sum(1)
    return energy.numpy() + env.tank.level


def test_energy_and_tank_never_grow_without_a_hand() -> None:
    """10^4 ticks of random set-points and stiffness, held for a while or not; walls only take, but
    for what their skin, a spring too, gives back."""
    env, random = tank(100), torch.Generator().manual_seed(0)
    env.reset(0)
    for k in range(100):
        if k % 5 == 0:
            action = 2 * torch.rand(100, 3, generator=random) - 1
        action[:, 2] = 2 * torch.rand(100, generator=random) - 1
        env.step(action)
        assert (stored(env, action) <= 3.0 + 0.01).all()
    assert env.tank.level.min() >= 0.099


def test_an_empty_tank_does_not_move_and_says_so() -> None:
    env = tank(2, start=0.1)
    before = env.reset(0)["state"].clone()
    step = env.step(torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, -1.0]]))
    assert step.log["frozen"].tolist() == [True, False]
    assert step.log["clipped"][0] == pytest.approx(0.5 * 1000 * 0.008**2, rel=1e-3)
    assert step.log["spent"].tolist() == [0.0, 0.0]
    assert torch.allclose(step.next_obs["state"][:, :2], before[:, :2])
    assert step.next_obs["tank"][0].tolist() == pytest.approx([0.1 / 4, 0.0])
    assert step.next_obs["tank"][1, 1] == 1.0


def test_a_full_tank_changes_nothing() -> None:
    env, plain = tank(4, most=1e9, start=1e9, power=1e9, push=15.0), tank(4, push=15.0).env
    assert env.reset(3)["state"].equal(plain.reset(3)["state"])
    for action in 2 * torch.rand(60, 4, 3, generator=torch.Generator().manual_seed(1)) - 1:
        step, bare = env.step(action), plain.step(action)
        assert torch.allclose(step.next_obs["state"], bare.next_obs["state"], atol=1e-3)


def test_what_is_wanted_and_not_done_has_a_price() -> None:
    free, dear = tank(1, start=0.1, price=0.0), tank(1, start=0.1, price=2.0)
    free.reset(0)
    dear.reset(0)
    push = torch.tensor([[1.0, 0.0, 1.0]])
    given, paid = free.step(push), dear.step(push)
    assert given.reward - paid.reward == pytest.approx(2.0 * paid.log["clipped"], rel=1e-5)


def test_an_action_and_its_impedance_belong_together() -> None:
    env = maze(tank(5))
    action = 2 * torch.rand(5, 3, generator=torch.Generator().manual_seed(2)) - 1
    wanted, stiffness = env.impedance(action)
    assert torch.allclose(stiffness, stiffness_of(action[:, 2:]).expand(-1, 2))
    whole, half = (env.scaled(action, share * torch.ones(5), stiffness) for share in (1, 0.5))
    assert torch.allclose(whole, action, atol=1e-5)
    moved = env.impedance(half)[0] - env.setpoints
    assert torch.allclose(moved, 0.5 * (wanted - env.setpoints), atol=1e-6)


def test_it_needs_springs() -> None:
    other = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}, VecEnv)
    with pytest.raises(ConfigError, match="impedance-controlled"):
        EnergyTank(TankConfig(start=1.0, most=1.0, least=0.1, power=1.0), other)
