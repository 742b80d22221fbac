"""Noise on what is measured: as much as was asked for, where it was, and the same again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors
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
