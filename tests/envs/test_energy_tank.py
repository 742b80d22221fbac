"""EnergyTank: what the tank pays for is done, what it cannot pay for is not, and the policy sees
it."""

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
from embodied.envs.toy.contact_maze import MASS, ContactMaze, stiffness_of
from embodied.envs.wrappers.energy_tank import Config, EnergyTank

YAML = Path(__file__).resolve().parents[2] / "configs" / "env" / "contact_maze_tank.yaml"


def tank(num_envs: int = 8, push: float = 0.0, **more: Any) -> EnergyTank:
    """As the YAML has it, with ticks of 20 ms."""
    node = yaml.safe_load(YAML.read_text())
    inner = build(node["env"] | {"num_envs": num_envs, "push": push, "limit": 1e9}, VecEnv)
    made = node["wrappers"][0] | more
    made.pop("_target_")
    return EnergyTank(Config(**made), inner)


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
    """10^4 ticks of random set-points and stiffness, held for a while or not; walls only take."""
    env = tank(100)
    env.reset(0)
    random = torch.Generator().manual_seed(0)
    most = 3.0 * np.ones(100)
    for k in range(100):
        if k % 5 == 0:
            action = 2 * torch.rand(100, 3, generator=random) - 1
        action[:, 2] = 2 * torch.rand(100, generator=random) - 1
        env.step(action)
        total = stored(env, action)
        assert (total <= 3.0 + 0.01).all(), total.max()
        # The skin of a wall is a spring too: what it holds comes back.
        most = np.minimum(most, total + 0.5)
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
    obs, same = env.reset(3), plain.reset(3)
    random = torch.Generator().manual_seed(1)
    for _ in range(60):
        action = 2 * torch.rand(4, 3, generator=random) - 1
        step, bare = env.step(action), plain.step(action)
        assert torch.allclose(step.next_obs["state"], bare.next_obs["state"], atol=1e-3)
    assert obs["state"].equal(same["state"])


def test_what_is_wanted_and_not_done_has_a_price() -> None:
    free, dear = tank(1, start=0.1, price=0.0), tank(1, start=0.1, price=2.0)
    push = torch.tensor([[1.0, 0.0, 1.0]])
    steps = [env.step(push) for env in (free, dear) if env.reset(0)]
    difference = steps[0].reward - steps[1].reward
    assert difference == pytest.approx(2.0 * steps[1].log["clipped"], rel=1e-5)


def test_an_action_and_its_impedance_belong_together() -> None:
    env = maze(tank(5))
    random = torch.Generator().manual_seed(2)
    action = 2 * torch.rand(5, 3, generator=random) - 1
    _, stiffness = env.impedance(action)
    assert torch.allclose(stiffness, stiffness_of(action[:, 2:]).expand(-1, 2))
    again = env.scaled(action, torch.ones(5), stiffness)
    assert torch.allclose(again, action, atol=1e-5)
    half = env.impedance(env.scaled(action, 0.5 * torch.ones(5), stiffness))[0]
    wanted = env.impedance(action)[0]
    assert torch.allclose(half - env.setpoints, 0.5 * (wanted - env.setpoints), atol=1e-6)


def test_it_needs_springs() -> None:
    other = build({"_target_": "embodied.envs.toy.two_gap.TwoGap", "num_envs": 1}, VecEnv)
    with pytest.raises(ConfigError, match="impedance-controlled"):
        EnergyTank(Config(start=1.0, most=1.0, least=0.1, power=1.0), other)
