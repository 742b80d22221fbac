"""In every environment, observations that only critics may use do not reach the policy."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from embodied.core import tensors as tt
from embodied.core.env import VecEnv
from embodied.core.spec import hidden
from embodied.envs.adapters.gymnasium_env import GymView
from embodied.envs.adapters.lerobot_env import LeRobotEnv
from embodied.envs.gym import Config, Gym
from embodied.envs.maniskill import observations
from embodied.envs.process.worker import gymnasium_rows
from embodied.envs.process.worker.memory import grouped
from embodied.envs.spaces import entries
from tests.builders import make_policy

MARKS = ("privileged", "critic")


@torch.no_grad()
def require_hidden(env: VecEnv) -> None:
    marked = [name for name in env.spec.obs if any(mark in name.lower() for mark in MARKS)]
    shown = [name for name in marked if not hidden(name)]
    assert not shown, f"{shown} would reach the policy"
    assert len(marked) < len(env.spec.obs), "nothing is left for the policy"
    discrete = env.spec.act.dtype == "int64"
    kind = "categorical.Categorical" if discrete else "gaussian.Gaussian"
    policy = make_policy(kind, env.spec, hidden=[8]).eval()
    obs, noise, carry = env.reset(1), policy.sample_noise(2), policy.initial(2)
    other = {k: torch.ones_like(v) if hidden(k) else v for k, v in obs.items()}
    without = {k: v for k, v in obs.items() if not hidden(k)}
    expected = policy.act(tt.each(obs, torch.clone), carry, noise)[0]
    for given in (other, without):
        assert torch.equal(policy.act(tt.each(given, torch.clone), carry, noise)[0], expected)


def test_no_privileged_observation_reaches_the_policy(env: VecEnv) -> None:
    require_hidden(env)


class Asymmetric(gymnasium.Env):
    """A Gymnasium environment with observations for critics, as simulators name them."""

    def __init__(self) -> None:
        box = spaces.Box(-1, 1, (2,), np.float32)
        names = ("state", "privileged_state", "critic", "privileged")
        nested = spaces.Dict({"speed": box})
        self.observation_space = spaces.Dict({name: box for name in names} | {"privileged": nested})
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


gymnasium.register("embodied/Asymmetric-v0", Asymmetric, max_episode_steps=5)
HIDDEN = {"privileged/state", "critic/state", "privileged/speed"}


def test_gymnasium() -> None:
    env = Gym(Config("embodied/Asymmetric-v0", 2))
    assert {name for name in env.spec.obs if hidden(name)} == HIDDEN
    require_hidden(env)


MARKED = {
    ("privileged",): "privileged/state",
    ("critic",): "critic/state",
    ("privileged_state",): "privileged/state",
    ("state_privileged",): "privileged/state",
    ("privilegedState",): "privileged/State",
    ("critic-obs",): "critic/obs",
    ("privileged", "speed"): "privileged/speed",
    ("agent", "privileged_state"): "privileged/agent/state",
    ("obs", "critic"): "critic/obs",
}
"""Names of simulators for what only critics may see, and ours."""
PLAIN = {(): "alone", ("critical_angle",): "critical_angle", ("agent", "qpos"): "agent/qpos"}


def nested(path: tuple[str, ...], leaf: Any, kind: Any = dict) -> Any:
    return nested(path[:-1], kind({path[-1]: leaf}), kind) if path else leaf


@pytest.mark.parametrize(("path", "name"), (MARKED | PLAIN).items(), ids=str)
def test_every_adapter_has_one_rule_of_names(path: tuple[str, ...], name: str) -> None:
    """Gymnasium and EnvPool; another process; ManiSkill, which joins names by _; mjlab's groups."""
    box = nested(path, spaces.Box(-1, 1, (2,), np.float32), spaces.Dict)
    assert [entry.name for entry in entries(box, "alone", "")] == [name]
    assert [*gymnasium_rows._parts(box)] == [name if path else "state"]
    if not path:
        return
    (shown,) = observations.flat(nested(path, torch.zeros(1, 2)))
    assert shown == name if len(path) == 1 else hidden(shown) == hidden(name)
    assert [*grouped(nested(path, np.zeros(2)))] == [name]


def test_two_observations_of_one_name_are_refused() -> None:
    box = spaces.Box(-1, 1, (2,), np.float32)
    with pytest.raises(ValueError, match="privileged/state"):
        entries(spaces.Dict({"privileged_state": box, "state_privileged": box}), "state", "Env-v0")


def test_envpool_playground(apart: ProcessPoolExecutor) -> None:
    pytest.importorskip("envpool")
    apart.submit(_playground).result()


def _playground() -> None:
    from embodied.envs import envpool

    env = envpool.EnvPool(envpool.Config("G1JoystickFlatTerrain-v1", 2, threads=1))
    shapes = {name: leaf.shape for name, leaf in env.spec.obs.items()}
    assert shapes == {"state": (103,), "privileged/state": (216,)}
    require_hidden(env)


def test_views_for_other_libraries() -> None:
    """Their policies have no rule for our names: they are given what a policy may see."""
    view, asymmetric = (
        GymView(Gym(Config("embodied/Asymmetric-v0", 1)), asymmetric=both) for both in (False, True)
    )
    assert view.observation_space.shape == (2,), "one leaf is left: it stands for itself"
    assert view.observation_space.contains(view.reset(seed=0)[0])
    assert set(asymmetric.observation_space.spaces) == {"state", *HIDDEN}
    lerobot = LeRobotEnv(Gym(Config("embodied/Asymmetric-v0", 1)), "none", 5)
    assert [lerobot.own, lerobot.others] == [["state"], ["state"]]
