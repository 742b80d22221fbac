"""Confined by hand: box against both maps, the planner's ways, the frame of the maps, rewards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.spec import DEMONSTRATOR
from embodied.envs.confined import env as confined
from embodied.envs.confined import planner
from embodied.envs.confined.env import Config, Confined
from embodied.envs.confined.planner import lattice, planned, ways
from embodied.envs.confined.tunnel import HIGH, SIZE, drawn, heights, room, way_through


def tunnel(*pyramids: tuple[float, float, float], ceiling: bool = False) -> Tensor:
    """One tunnel with pyramids (x, height, half the base) on the floor or on the ceiling."""
    maps = torch.zeros(1, 2, max(len(pyramids), 1), 3)
    maps[..., 2] = 0.1
    if pyramids:
        maps[0, int(ceiling)] = torch.tensor(pyramids)
    return maps


def gap(x: float, z: float, pitch: float, maps: Tensor, margin: float = 0.0) -> float:
    return room(torch.tensor([[[x, z, pitch]]]), maps, margin).item()


def test_height_maps() -> None:
    """Half a base from the tip the map has half the height; beyond the base none."""
    maps = tunnel((1.0, 0.2, 0.1), (1.1, 0.3, 0.2))
    seen = heights(torch.tensor([[0.9, 0.95, 1.0, 1.1, 1.2, 1.4]]), maps)
    assert seen[0, 0].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.15, 0.0])
    assert seen[0, 1].tolist() == [0.0] * 6


@pytest.mark.parametrize("ceiling", [False, True])
def test_a_level_box_above_a_tip_and_beside_it(ceiling: bool) -> None:
    """Half a height is 0.065 m, half a length 0.21 m. The ceiling is the floor, mirrored."""

    def at(x: float, z: float, margin: float = 0.0) -> float:
        return gap(x, HIGH - z if ceiling else z, 0.0, maps, margin)

    maps = tunnel((1.0, 0.2, 0.1), ceiling=ceiling)
    assert at(0.0, 0.1) == pytest.approx(0.1 - 0.065, abs=1e-6)
    assert at(1.0, 0.3) == pytest.approx(0.3 - 0.065 - 0.2, abs=1e-6)
    assert at(1.15, 0.3) == pytest.approx(0.3 - 0.065 - 0.2, abs=1e-6)
    assert at(1.26, 0.2) == pytest.approx(0.2 - 0.065 - 0.1, abs=1e-6)  # over half the base
    assert at(1.26, 0.14) == pytest.approx(0.14 - 0.065 - 0.1, abs=1e-6)  # and now in it
    assert at(1.26, 0.2, margin=0.02) == pytest.approx(0.2 - 0.085 - 0.14, abs=1e-6)


def test_a_tilted_box() -> None:
    """A pitch of atan(3 / 4): a tip under the middle meets the lower side 0.065 / 0.8 below it; one
    0.2 m behind the middle meets the low end, at (0.2 0.8 - 0.21) / 0.6."""
    pitch = math.atan2(3, 4)
    maps = tunnel((1.0, 0.15, 0.02))
    lowest = 0.25 - 0.21 * 0.6 - 0.065 * 0.8
    assert gap(0.0, 0.25, pitch, maps) == pytest.approx(lowest, abs=1e-6)
    assert gap(1.0, 0.25, pitch, maps) == pytest.approx(0.25 - 0.065 / 0.8 - 0.15, abs=1e-6)
    assert gap(1.2, 0.25, pitch, maps) == pytest.approx(0.25 + (0.16 - 0.21) / 0.6 - 0.15, abs=1e-6)
    assert gap(0.8, 0.25, -pitch, maps) == pytest.approx(gap(1.2, 0.25, pitch, maps), abs=1e-6)


def test_the_check_agrees_with_points_on_the_outline() -> None:
    lots = torch.Generator().manual_seed(0)
    maps = drawn(torch.rand(40, 6 * 5 + 10, generator=lots), 0.4, 2.8, 5, 0.03)
    pose = torch.rand(40, 30, 3, generator=lots) * torch.tensor([3.0, 0.3, 1.2])
    pose += torch.tensor([0.0, 0.1, -0.6])
    side = torch.linspace(-1, 1, 201)
    end = torch.ones_like(side)
    edges = torch.cat([torch.stack([side, way * end], 1) for way in (-1, 1)])
    edges = torch.cat([edges, edges.flip(1)]) * torch.tensor(SIZE) / 2
    x, z, pitch = pose[..., None].unbind(2)
    across = x + pitch.cos() * edges[:, 0] - pitch.sin() * edges[:, 1]
    above = z + pitch.sin() * edges[:, 0] + pitch.cos() * edges[:, 1]
    reach = heights(across.flatten(1), maps).unflatten(2, across.shape[1:])
    sampled = torch.minimum(above - reach[:, 0], HIGH - above - reach[:, 1]).amin(2)
    exact = room(pose, maps)
    assert (exact <= sampled + 1e-5).all()  # points may miss a tip between them
    assert (sampled - exact).mean() < 0.01
    assert 0.1 < (exact > 0).float().mean() < 0.9


def test_a_way_is_left_free() -> None:
    lots = torch.rand(50, 6 * 5 + 10, generator=torch.Generator().manual_seed(1))
    maps = drawn(lots, 0.4, 2.8, 5, 0.03)
    way = way_through(lots[:, 30:], 0.03)
    assert (room(way, maps, 0.03) > -1e-5).all()
    assert ((maps[..., 1] >= 0) & (maps[..., 1] <= 0.35)).all()
    assert (maps[..., 1] > 0.15).any()


NODES = lattice(3.2)
FAR = torch.tensor([[3.2, 0.26, 0.0]])


def plan(maps: Tensor, pose: list[float], goal: Tensor = FAR) -> tuple[list[float], bool]:
    """The waypoint of a box at `pose`, and whether there is a way to the goal."""
    field = ways(NODES, goal, maps, 0.01)
    target, found = planned(NODES, field, torch.tensor([pose]), maps, 0.01)
    return target[0].tolist(), bool(found)


def node(x: float, z: float, pitch: float) -> tuple[int, ...]:
    parts = zip((x, z, pitch), planner.FIRST, planner.STEP, strict=True)
    return tuple(round((value - first) / step) for value, first, step in parts)


def test_the_lengths_of_ways() -> None:
    """A move ahead is 0.1 m, with a node up or down; one up alone is 0.02 m. Within 0.1 m of the
    goal the way is the distance: after three moves ahead and down, 0.04 m are left.
    """
    field = ways(NODES, FAR, tunnel(), 0.01)[0]
    assert field[node(3.2, 0.26, 0)].item() == pytest.approx(0, abs=1e-5)
    assert field[node(3.2, 0.36, 0)].item() == pytest.approx(0.1, abs=1e-5)
    assert field[node(3.0, 0.26, 0)].item() == pytest.approx(0.2, abs=1e-5)
    assert field[node(2.9, 0.36, 0)].item() == pytest.approx(0.34, abs=1e-5)
    assert field[node(1.0, 0.08, math.radians(40))].item() == planner.NONE  # it touches the floor


def test_the_waypoint_is_the_farthest_node_in_a_straight_line() -> None:
    """In a flat tunnel the sixth node on the way: 0.1 m ahead, then 0.1 m each."""
    target, found = plan(tunnel(), [0.0, 0.26, 0.0])
    assert found and target[0] == pytest.approx(0.6)


def test_the_way_goes_over_a_pyramid() -> None:
    """A tip of 0.3 m: a box above it has its middle higher than 0.3 + 0.065 + 0.01."""
    maps = tunnel((1.0, 0.3, 0.1))
    field = ways(NODES, FAR, maps, 0.01)[0]
    assert field[node(1.0, 0.36, 0)].item() == planner.NONE
    assert field[node(1.0, 0.38, 0)].item() < 2.5
    target, found = plan(maps, [0.6, 0.26, 0.0])
    assert found and target[1] > 0.26
    assert planner.clear(torch.tensor([[0.6, 0.26, 0.0]]), torch.tensor([[target]]), maps, 0).all()


def test_a_dead_end_of_the_local_planner() -> None:
    """Right behind a pyramid of the floor one hangs from the ceiling: the box passes between them
    with its nose down, and only if it is far up in time."""
    maps = torch.cat([tunnel((1.0, 0.25, 0.1)), tunnel((1.5, 0.25, 0.1), ceiling=True)], 3)
    maps = maps.view(1, 2, 2, 3)
    assert plan(maps, [0.0, 0.1, 0.0])[1]


def test_there_is_no_way_through_a_wall() -> None:
    assert not plan(tunnel((1.0, 0.45, 0.1)), [0.0, 0.26, 0.0])[1]


def alone(**settings: Any) -> Confined:
    """One body in a flat tunnel."""
    env = Confined(Config(num_envs=1, **settings))
    env.reset(0)
    env.tunnel[..., 1] = 0.0
    env.goal[:] = torch.tensor([3.2, 0.25, 0.0])
    env.pose[:, 1] = 0.25
    if env.config.waypoints == "planned":
        env.field[:] = ways(env.nodes, env.goal, env.tunnel, 0.01)
    env.aim(env.every)
    return env


def test_the_maps_are_level_and_relative_to_the_body() -> None:
    env = alone(behind=0.2, waypoints="straight")
    env.tunnel[0, :, 0] = torch.tensor([[0.5, 0.2, 0.1], [0.3, 0.1, 0.1]])
    obs = env.observe(env.every)
    assert obs["floor"].shape == (1, 13)
    floor = [-0.25] * 13
    floor[7] = 0.2 - 0.25  # 0.2 m behind, so the eighth is 0.5 m ahead
    assert obs["floor"][0].tolist() == pytest.approx(floor, abs=1e-5)
    assert obs["ceiling"][0, 5].item() == pytest.approx(0.4 - 0.25)
    env.pose[:, 2] = 0.3
    pitched = env.observe(env.every)
    assert all(torch.equal(pitched[key], obs[key]) for key in ("floor", "ceiling"))
    assert pitched["waypoint"][0].tolist() == pytest.approx([0.5, 0.0, -0.3])
    env.pose[:, 1] += 0.05
    assert torch.allclose(env.observe(env.every)["floor"], obs["floor"] - 0.05)
    env.pose[:, 0] += 0.1
    assert env.observe(env.every)["floor"][0, 6].item() == pytest.approx(-0.1, abs=1e-5)


def test_what_a_body_is_led_by() -> None:
    assert alone(waypoints="goal").waypoint[0].tolist() == pytest.approx([3.2, 0.25, 0.0])
    env = alone(waypoints="straight")
    assert env.waypoint[0].tolist() == pytest.approx([0.5, 0.25, 0.0])


def test_without_a_way_the_final_goal_leads() -> None:
    env = alone()
    env.tunnel[0, 0, 0] = torch.tensor([1.0, 0.45, 0.1])
    env.field[:] = ways(env.nodes, env.goal, env.tunnel, 0.01)
    env.aim(env.every)
    assert torch.equal(env.waypoint, env.goal) and not env.clear.any()


def test_a_step_from_rest() -> None:
    """Four parts of 0.025 s: v <- v + 0.025 (2 - 2 v)."""
    env = alone(waypoints="goal")
    speed = place = 0.0
    for _ in range(4):
        speed += 0.025 * (2 - 2 * speed)
        place += 0.025 * speed
    step = env.step(torch.tensor([[1.0, 0.0, 0.0]]))
    assert step.next_obs["state"][0, 0].item() == pytest.approx(speed)
    assert env.pose[0].tolist() == pytest.approx([place, 0.25, 0.0])
    # Toward the waypoint at `speed` of 0.5 m/s, and an action that changed by 1.
    assert step.reward.item() == pytest.approx(0.02 * speed / 0.5 - 1e-4)
    assert not step.log["touched"].any()


def test_a_contact_stops_the_body_and_costs_but_ends_nothing() -> None:
    env = alone()
    env.tunnel[0, 0, 0] = torch.tensor([0.35, 0.3, 0.1])
    env.velocity[:] = torch.tensor([1.0, 0.0, 0.0])
    for _ in range(3):
        step = env.step(torch.tensor([[1.0, 0.0, 0.0]]))
    assert step.log["touched"].all() and not step.ended.any()
    assert room(env.pose[:, None], env.tunnel).item() > 0
    assert env.velocity.abs().max() == 0
    assert step.reward.item() == pytest.approx(-0.01 - 0.005)


def test_a_waypoint_pays_once_and_the_goal_ends_the_episode() -> None:
    env = alone()
    env.pose[:] = torch.tensor([0.45, 0.25, 0.0])
    env.waypoint[:] = torch.tensor([0.5, 0.25, 0.0])
    still = torch.zeros(1, 3)
    assert env.step(still).reward.item() == pytest.approx(0.2 - 0.005)
    assert env.waypoint[0, 0].item() > 0.9  # the next one is planned
    env.waypoint[:] = torch.tensor([0.5, 0.25, 0.0])
    assert env.step(still).reward.item() == pytest.approx(-0.005)  # nearer than before: it is not
    env.pose[:] = torch.tensor([3.05, 0.25, 0.0])
    step = env.step(still)
    assert step.log["success"].all() and step.terminated.all()
    assert step.reward.item() > 1 - 0.01


def test_the_task_is_the_distance() -> None:
    env = Confined(Config(num_envs=3))
    env.reset(0, torch.tensor([[0.0], [0.1], [1.0]]))
    assert env.goal[:, 0].tolist() == pytest.approx([1.2, 1.4, 3.2])
    env.reset(0)
    assert env.goal[:, 0].tolist() == pytest.approx([3.2] * 3)  # evaluation: the farthest
    with pytest.raises(ConfigError, match="low <= high"):
        Confined(Config(distance=(2.0, 1.0)))


def test_where_tasks_are_given_an_end_draws_no_tunnel() -> None:
    env = alone()
    env.expect_given_tasks()
    env.pose[:] = torch.tensor([3.05, 0.25, 0.0])
    step = env.step(torch.zeros(1, 3))
    assert step.terminated.all() and not env.tunnel[..., 1].any()
    assert torch.equal(step.obs["state"], step.next_obs["state"])
    env.reset(task=torch.zeros(1, 1))
    assert env.tunnel[..., 1].any() and env.goal[0, 0].item() == pytest.approx(1.2)


def test_the_controller_follows_the_planner_through_most_tunnels() -> None:
    env = Confined(Config(num_envs=40, play=True))
    obs = env.reset(0)
    won = torch.zeros(40, dtype=torch.bool)
    for _ in range(150):
        step = env.step(obs[DEMONSTRATOR])
        obs = step.obs
        won |= step.log["success"]
    assert won.float().mean() > 0.8


def test_the_picture_shows_body_and_waypoint() -> None:
    env = alone()
    picture = env.render(0, 320, 240).view(-1, 3)
    for colour in ((60, 100, 190), (230, 130, 30), (240, 190, 120)):
        assert (picture == torch.tensor(colour, dtype=torch.uint8)).all(1).any()
    assert "3.2 m to go" in env.describe()
    assert confined.GOAL == 0.2
