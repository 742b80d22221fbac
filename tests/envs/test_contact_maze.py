"""The contact maze by hand: what walls do, how hard springs press, and that there is a way."""

from __future__ import annotations

import pytest
import torch

from embodied.envs.toy.contact_maze import (
    GOAL,
    LOWER,
    UPPER,
    Config,
    ContactMaze,
    contact,
    distance,
    inside,
    stiffness_of,
)


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
