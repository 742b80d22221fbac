"""Bodies by hand: what they can follow, the lidar, rewards and ends, the planner."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import DEMONSTRATOR
from embodied.envs.toy import bodies
from embodied.envs.toy.bodies import BODIES, WHICH, Bodies, Config, followed, lidar


def follow(name: str, velocity: list[float], command: list[float]) -> Tensor:
    limits = torch.tensor([astuple(BODIES[name])])
    return followed(torch.tensor([velocity]), torch.tensor([command]), limits)[0]


def alone(**settings: Any) -> Bodies:
    """One body at (2, 4), heading to x, a disc of radius 0.5 at (4, 4), the goal at (6, 4)."""
    env = Bodies(Config(num_envs=1, obstacles=1, **{"bodies": ("unicycle",), **settings}))
    env.reset(0)
    env.place[:] = torch.tensor([2.0, 4.0])
    env.goal[:] = torch.tensor([6.0, 4.0])
    env.heading[:] = 0.0
    env.velocity[:] = 0.0
    env.discs[:] = torch.tensor([4.0, 4.0, 0.5])
    return env


def test_a_lag_is_a_first_order_filter() -> None:
    """The tracked body: 0.8 (1 - exp(-0.1 / 0.8)), and the rest of that a step later."""
    share = 1 - math.exp(-0.1 / 0.8)
    first = follow("tracked", [0, 0, 0], [1, 1, 1.5])
    assert first.tolist() == pytest.approx([0.8 * share, 0.0, 0.9 * share])
    second = follow("tracked", first.tolist(), [1, 1, 1.5])
    assert second[0].item() == pytest.approx(0.8 * (1 - (1 - share) ** 2))


def test_limits_of_each_way() -> None:
    share = 1 - math.exp(-0.1 / 0.1)
    omni = follow("omni", [0, 0, 0], [-1.0, 1.0, -1.5])
    assert omni.tolist() == pytest.approx([-0.5 * share, 0.5 * share, -0.6 * share])
    assert follow("unicycle", [0, 0, 0], [-1.0, 1.0, 0.0]).tolist() == [0.0, 0.0, 0.0]


def test_a_bicycle_turns_on_no_smaller_circle_than_its_own() -> None:
    """Turning at rest: not at all; at 0.9 m/s: 0.9 / 0.9 = 1 rad/s, also backwards."""
    assert follow("bicycle", [0, 0, 0], [0, 0, 1.5])[2] == 0
    for sign in (1, -1):
        steady = follow("bicycle", [0.9, 0, 1.5 * sign], [0.9, 0, 1.5 * sign])
        assert steady.tolist() == pytest.approx([0.9, 0, sign])


def test_what_the_lidar_measures() -> None:
    """From (2, 4): the disc 1.5 m ahead, the wall 2 m behind; nothing within 4 m to the left of
    (4, 1); a ray beside the disc passes."""
    discs = torch.tensor([[[4.0, 4.0, 0.5]]])
    place = torch.tensor([[2.0, 4.0]])
    seen = lidar(place, torch.tensor([[0.0, math.pi, math.pi / 2]]), discs)[0]
    assert seen.tolist() == pytest.approx([1.5, 2.0, bodies.REACH])
    beside = math.asin(0.5 / 2) + 0.01  # the tangent, and a little more
    assert lidar(place, torch.tensor([[beside]]), discs)[0, 0] == bodies.REACH


def test_the_observation_and_the_reward_of_a_step() -> None:
    """Straight ahead from rest: 1 - exp(-2) m/s for 0.1 s; the reward is -distance / 100."""
    env = alone()
    step = env.step(torch.tensor([[1.0, 1.0, 0.0]]))
    speed = 1 - math.exp(-0.1 / 0.05)
    left = 4 - 0.1 * speed
    state = step.next_obs["state"][0]
    assert state[:6].tolist() == pytest.approx([1.0, 0.0, left, speed, 0.0, 0.0])
    assert state[6].item() == pytest.approx(1.5 - 0.1 * speed)
    assert step.reward.item() == pytest.approx(-left / 100)
    assert not step.terminated and not step.truncated


@pytest.mark.parametrize(
    ("at", "reward", "success"), [((5.7, 4.0), 20.0, True), ((3.4, 4.0), -10.0, False)]
)
def test_goal_and_collision_end_an_episode(
    at: tuple[float, float], reward: float, success: bool
) -> None:
    env = alone()
    env.place[:] = torch.tensor(at)
    step = env.step(torch.zeros(1, 3))
    assert step.reward.item() == pytest.approx(reward - (6 - at[0]) / 100)
    assert step.terminated and bool(step.log["success"]) is success
    assert bool(step.log["collided"]) is not success


def test_time_truncates() -> None:
    env = alone(horizon=2)
    assert [bool(env.step(torch.zeros(1, 3)).truncated) for _ in range(2)] == [False, True]


def test_the_body_is_described_where_it_is_wanted() -> None:
    env = Bodies(Config(num_envs=64, describe=True, bodies=("omni", "tracked")))
    obs = env.reset(0)
    number = obs[WHICH][:, 0]
    assert set(number.tolist()) == {0, 1}
    limits = torch.tensor([astuple(BODIES[name]) for name in ("omni", "tracked")])
    assert torch.equal(obs["body"], limits[number])
    assert {*alone().spec.obs} == {"state"}


def test_the_planner_drives_the_unicycle_to_its_goals() -> None:
    env = Bodies(Config(num_envs=8, play=True, bodies=("unicycle",)))
    obs = env.reset(3)
    won = hit = 0
    for _ in range(120):
        step = env.step(obs[DEMONSTRATOR])
        obs = step.obs
        won += int(step.log["success"].sum())
        hit += int(step.log["collided"].sum())
    assert won >= 8 and hit == 0


def test_rows_do_not_depend_on_each_other() -> None:
    few, many = (Bodies(Config(num_envs=n)) for n in (2, 5))
    one, other = few.reset(7)["state"], many.reset(7)["state"]
    assert torch.allclose(one, other[:2])


def test_the_map_shows_goal_and_lidar() -> None:
    picture = alone().render(width=160, height=160)
    colours = {tuple(pixel) for pixel in picture.flatten(0, 1).tolist()}
    assert {(80, 170, 100), (230, 130, 30), (60, 100, 190), (70, 75, 85)} <= colours


def test_unknown_bodies_are_refused() -> None:
    with pytest.raises(ConfigError, match="should be some of unicycle"):
        Bodies(Config(bodies=("tricycle",)))
