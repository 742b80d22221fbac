"""Partial: columns by hand, in observations and successors; names that are wrong."""

from __future__ import annotations

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.envs.gym import Config as GymConfig
from embodied.envs.gym import Gym
from embodied.envs.wrappers.partial_observation import Config, Partial


def test_columns() -> None:
    env, whole = Gym(GymConfig("CartPole-v1", 2)), Gym(GymConfig("CartPole-v1", 2))
    partial = Partial(Config({"state": (2, 0)}), env)
    assert partial.spec.obs["state"].shape == (2,)
    assert partial.spec.act == whole.spec.act
    seen, all_of_it = partial.reset(seed=3), whole.reset(seed=3)
    assert torch.equal(seen["state"], all_of_it["state"][:, [2, 0]])
    for _ in range(30):  # poles fall: rows begin again
        action = torch.ones(2, dtype=torch.int64)
        one, other = partial.step(action), whole.step(action)
        assert torch.equal(one.obs["state"], other.obs["state"][:, [2, 0]])
        assert torch.equal(one.next_obs["state"], other.next_obs["state"][:, [2, 0]])
        assert torch.equal(one.terminated, other.terminated)


@pytest.mark.parametrize("elements", [{"stat": (0,)}, {"state": (4,)}, {"state": ()}])
def test_what_is_not_there_is_refused(elements: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match="Partial"):
        Partial(Config(elements), Gym(GymConfig("CartPole-v1", 1)))
