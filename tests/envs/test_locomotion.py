"""Our batched walkers against Gymnasium's, number for number."""

from __future__ import annotations

from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
import torch

from embodied.envs.mujoco.batch_env import Floats, Outcome
from embodied.envs.mujoco.locomotion import WORLDS, Config, Locomotion
from tests.tiers import usually

ROWS, STEPS = 2, 1000


class Exact(Locomotion):
    """The same world with float64 observations, and the reward before it is rounded."""

    precision = np.float64
    paid: Floats

    def outcome(self, action: Floats) -> Outcome:
        outcome = super().outcome(action)
        self.paid = outcome.reward
        return outcome


def follow(peer: Any, env: Locomotion, row: int) -> np.ndarray:
    """Begin a Gymnasium environment where `env` began `row`, the way its own reset does."""
    mujoco.mj_resetData(peer.model, peer.data)
    peer.set_state(env.batch.qpos[row].copy(), env.batch.qvel[row].copy())
    return peer._get_obs()


@pytest.mark.parametrize("name", usually(["Ant-v5", "Hopper-v5"], sorted(WORLDS)))
def test_equal_to_gymnasium_over_a_thousand_steps(name: str) -> None:
    env = Exact(Config(name, ROWS, horizon=120))
    peers: list[Any] = [gymnasium.make(name).unwrapped for _ in range(ROWS)]
    obs = env.reset(seed=3)
    for row, peer in enumerate(peers):
        peer.reset(seed=0)
        np.testing.assert_allclose(obs["state"][row].numpy(), follow(peer, env, row), atol=1e-9)
    high = peers[0].model.actuator_ctrlrange[:, 1]
    generator, ended = torch.Generator().manual_seed(0), torch.zeros(2)
    for _ in range(STEPS):
        action = torch.rand((ROWS, env.spec.act.size), generator=generator) * 2 - 1
        step = env.step(action)
        for row, peer in enumerate(peers):
            seen, reward, terminated, _, _ = peer.step(action[row].double().numpy() * high)
            np.testing.assert_allclose(step.next_obs["state"][row], seen, rtol=1e-12, atol=1e-9)
            assert env.paid[row] == pytest.approx(reward, rel=1e-12, abs=1e-9)
            assert bool(step.terminated[row]) == terminated
            if step.ended[row]:
                begun = follow(peer, env, row)
                np.testing.assert_allclose(step.obs["state"][row], begun, rtol=1e-12, atol=1e-9)
        ended += torch.stack([step.terminated.sum(), step.truncated.sum()])
    # The end that the world has was seen.
    assert ended[int(name == "HalfCheetah-v5")] >= 5


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_spec_agrees_with_gymnasium(name: str) -> None:
    env, peer = Locomotion(Config(name, 2)), gymnasium.make(name)
    assert env.spec.obs["state"].shape == peer.observation_space.shape
    assert env.spec.act.shape == peer.action_space.shape
    assert env.spec.dt == pytest.approx(peer.unwrapped.dt)  # type: ignore[attr-defined]
    assert env.horizon == peer.spec.max_episode_steps  # type: ignore[union-attr]
    assert env.reset(seed=0)["state"].dtype == torch.float32


def test_an_unknown_world_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown environment 'Ant-v4'; choose from .*Ant-v5"):
        Locomotion(Config("Ant-v4"))
