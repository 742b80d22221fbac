"""The magnet: its force by hand, and nothing of it without help."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embodied.core.env import VecEnv
from embodied.envs.fr3.assist_force import AssistForce, Config
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.gym import Config as GymConfig
from embodied.envs.gym import Gym


def lift(rows: int = 2) -> Fr3:
    return Fr3(Fr3Config(task="lift", num_envs=rows, threads=1))


def inner(world: AssistForce) -> Fr3:
    assert isinstance(world.env, Fr3)
    return world.env


def above(world: AssistForce, height: float) -> None:
    """Put the cube of each row `height` below the tool, at rest."""
    batch, at = inner(world).batch, world._at
    tool = inner(world).view(np.arange(world.num_envs)).tool
    batch.qpos[:, at : at + 3] = tool - [0, 0, height]
    batch.qvel[:, world._speed : world._speed + 3] = 0


def test_the_force_is_what_its_law_says() -> None:
    world = AssistForce(Config(body="cube", weights=2.0, reach=0.1, damping=5.0), lift())
    world.reset(0)
    above(world, 0.025)
    mass, weight = 0.08, 0.08 * 9.81
    force = world.force(np.array([1.0, 0.5]), np.array([1.0, 0.5]))
    # A quarter of the way out of its reach; with half the help, half of it.
    near, far = 2 * weight * 0.75, 0.5 * 2 * weight * 0.5 * 0.5
    np.testing.assert_allclose(force, [[0, 0, near], [0, 0, far]], atol=1e-9)
    inner(world).batch.qvel[:, world._speed] = 0.2
    force = world.force(np.array([1.0, 1.0]), np.array([0.0, 0.0]))
    np.testing.assert_allclose(force[:, 0], -5 * mass * 0.2)
    above(world, 0.11)
    assert not world.force(np.ones(2), np.ones(2)).any()


def test_without_a_teacher_there_is_no_help_and_the_world_is_the_same() -> None:
    world, plain = AssistForce(Config(body="cube"), lift()), lift()
    obs, before = world.reset(3), plain.reset(3)
    assert torch.equal(obs["state"], before["state"]) and not obs["help"].any()
    random = torch.Generator().manual_seed(0)
    for _ in range(30):
        action = torch.rand(2, 5, generator=random) * 2 - 1
        helped, other = world.step(action), plain.step(action[:, :4])
        assert torch.equal(helped.obs["state"], other.obs["state"])
        assert torch.equal(helped.reward, other.reward)


def test_help_lifts_the_cube_costs_and_ends_with_the_episode() -> None:
    world = AssistForce(Config(body="cube", cost=0.01), lift())
    task = torch.full((2, 6), 0.5)
    task[:, -1] = torch.tensor([1.0, 0.5])
    obs = world.reset(0, task)
    assert obs["help"].flatten().tolist() == [1.0, 0.5]
    above(world, 0.02)
    action = torch.zeros(2, 5)
    action[:, 3], action[:, 4] = 1.0, 1.0
    step = world.step(action)
    paid = step.log["success"].float() - 0.01 * torch.tensor([1.0, 0.5])
    assert torch.allclose(step.reward, paid)
    assert step.next_obs["help"].flatten().tolist() == [1.0, 0.5]
    while not step.ended.all():
        world.reset(None, task, step.ended)
        step = world.step(-action)
    assert not step.obs["help"].any() and step.next_obs["help"].any()


def test_settings_that_make_no_magnet() -> None:
    def magnet(env: VecEnv, body: str = "cube") -> AssistForce:
        return AssistForce(Config(body=body), env)

    for make, says in (
        (lambda: magnet(lift(), "cup"), "no free body"),
        (lambda: magnet(Gym(GymConfig("Pendulum-v1", 1))), "FR3 environment"),
        (lambda: magnet(magnet(lift())), "already has"),
        (lambda: magnet(lift()).reset(0, torch.full((2, 6), 1.5)), r"\[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
