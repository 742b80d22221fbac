"""Two gaps by hand: what is wall, and a closed gap."""

from __future__ import annotations

import torch

from embodied.envs.toy.two_gap import Config, TwoGap, inside, moved


def test_a_closed_gap_is_wall() -> None:
    place = torch.tensor([[0.5, 0.25], [0.5, 0.75], [0.5, 0.5], [0.2, 0.25]])
    assert inside(place).tolist() == [False, False, True, False]
    assert inside(place, (0.75,)).tolist() == [True, False, True, False]


def test_the_point_stops_at_it() -> None:
    """From x = 0.43 a step of 0.05 would end at 0.48, inside the closed lower gap."""
    place, stride = torch.tensor([[0.43, 0.25], [0.43, 0.75]]), torch.tensor([[0.05, 0.0]] * 2)
    assert torch.allclose(moved(place, stride, (0.75,))[:, 0], torch.tensor([0.43, 0.48]))


def test_the_world_closes_it() -> None:
    for gaps, x in (((0.25, 0.75), 0.48), ((0.75,), 0.43)):
        env = TwoGap(Config(num_envs=1, gaps=gaps))
        env.reset(0)
        env.place = torch.tensor([[0.43, 0.25]])
        seen = env.step(torch.tensor([[1.0, 0.0]])).next_obs["state"]
        assert abs(seen[0, 0].item() - x) < 1e-6
