"""The FR3 with noise on what is measured, and with a magnet that helps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.env import VecEnv
from embodied.core.tensors import Tensors
from embodied.envs.fr3.assist_force import AssistForce
from embodied.envs.fr3.assist_force import Config as MagnetConfig
from embodied.envs.fr3.env import Config as Fr3Config
from embodied.envs.fr3.env import Fr3
from embodied.envs.gym import Config as GymConfig
from embodied.envs.gym import Gym
from embodied.envs.wrappers.observations import Config, ObservationNoise, Partial, PartialConfig
from embodied.policies.scripted.fr3 import TRAITS, WORDS, DelayedConfig, DelayedLift

ROWS = 400


def made(num_envs: int = 2, **settings: Any) -> ObservationNoise:
    return ObservationNoise(Config(**settings), Fr3(Fr3Config(num_envs=num_envs, threads=1)))


def off(env: ObservationNoise, obs: Tensors, name: str) -> np.ndarray:
    """How far an element [B] is from what is so."""
    at = env.names.index(name)
    world: Any = env.env
    true = world.observe(np.arange(env.num_envs))["state"]
    return obs["state"][:, at].numpy() - true[:, at]


def test_it_is_as_large_as_asked_for_and_of_one_piece() -> None:
    env = made(ROWS, deviation={"dq": 0.01, "cube": 0.001}, bias={"cube": 0.002})
    obs = env.reset(0)
    # Of 400 numbers the deviation is known to 1 / sqrt(2 * 400) = 3.5%.
    assert off(env, obs, "dq3").std() == pytest.approx(0.01, rel=0.15)
    assert off(env, obs, "cube_x").std() == pytest.approx(np.hypot(0.001, 0.002), rel=0.15)
    assert off(env, obs, "q3").max() == off(env, obs, "tool_x").max() == 0
    # The tool is where it is said to be: what the cube is off, it is off from the tool too.
    from_tool = off(env, obs, "cube_from_tool_x")
    np.testing.assert_allclose(from_tool, off(env, obs, "cube_x"), atol=1e-6)


def test_the_bias_stays_for_an_episode() -> None:
    env = made(ROWS, bias={"cube": 0.002})
    first = off(env, env.reset(0), "cube_y")
    step = env.step(torch.zeros(ROWS, env.spec.act.size))
    np.testing.assert_allclose(off(env, step.obs, "cube_y"), first, atol=1e-6)
    mask = torch.arange(ROWS) < 200
    again = off(env, env.reset(mask=mask), "cube_y")
    np.testing.assert_allclose(again[200:], first[200:], atol=1e-6)
    assert np.abs(again[:200] - first[:200]).min() > 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"deviation": {"cubes": 0.1}}, 'did you mean "cube"'),
        ({"leaf": "points"}, "no vector that is observed"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        made(**settings)


def test_the_script_raises_once_the_hand_holds() -> None:
    """A cube of 4 cm that is turned by 0.2 rad is 4 (cos 0.2 + sin 0.2) = 4.715 cm wide."""
    env = Fr3(Fr3Config(num_envs=1, threads=1))
    script = DelayedLift(DelayedConfig(quality=1.0, sides=0, slack=0.006), env.spec)
    known = {"tool_x": 0.5, "tool_z": 0.02, "cube_x": 0.5, "cube_z": 0.02, "cube_half": 0.02}
    known |= {"cube_cos_4yaw": float(np.cos(0.8)), "cube_sin_4yaw": float(np.sin(0.8))}
    carry = script.initial(1) | {"begun": torch.ones(1, dtype=torch.bool)}
    carry |= {"phase": torch.tensor([4]), "traits": torch.full((1, TRAITS), 0.5)}

    def rise(width: float) -> float:
        row = [(known | {"width": width}).get(name, 0.0) for name in env.spec.obs["state"].names]
        action, _ = script.act({"state": torch.tensor([row])}, carry, torch.zeros(1, WORDS))
        return float(action[0, 0, 2])

    up = [rise(width) for width in (0.080, 0.0540, 0.0525, 0.040)]
    # Half of full speed, times the 0.8 of a middling trait.
    assert up == pytest.approx([0.0, 0.0, 0.4, 0.4], abs=0.01)


@pytest.mark.parametrize("elements", [{"stat": (0,)}, {"state": (4,)}, {"state": ()}])
def test_what_is_not_there_is_refused(elements: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match="Partial"):
        Partial(PartialConfig(elements), Gym(GymConfig("CartPole-v1", 1)))


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
    world = AssistForce(MagnetConfig(body="cube", weights=2.0, reach=0.1, damping=5.0), lift())
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
    world, plain = AssistForce(MagnetConfig(body="cube"), lift()), lift()
    obs, before = world.reset(3), plain.reset(3)
    assert torch.equal(obs["state"], before["state"]) and not obs["help"].any()
    for action in torch.rand(30, 2, 5, generator=torch.Generator().manual_seed(0)) * 2 - 1:
        helped, other = world.step(action), plain.step(action[:, :4])
        assert torch.equal(helped.obs["state"], other.obs["state"])
        assert torch.equal(helped.reward, other.reward)


def test_help_lifts_the_cube_costs_and_ends_with_the_episode() -> None:
    world = AssistForce(MagnetConfig(body="cube", cost=0.01), lift())
    task = torch.tensor([[0.5] * 5 + [1.0], [0.5] * 6])
    assert world.reset(0, task)["help"].flatten().tolist() == [1.0, 0.5]
    above(world, 0.02)
    action = torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0]] * 2)
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
        return AssistForce(MagnetConfig(body=body), env)

    for make, says in (
        (lambda: magnet(lift(), "cup"), "no free body"),
        (lambda: magnet(Gym(GymConfig("Pendulum-v1", 1))), "FR3 environment"),
        (lambda: magnet(magnet(lift())), "already has"),
        (lambda: magnet(lift()).reset(0, torch.full((2, 6), 1.5)), r"\[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
