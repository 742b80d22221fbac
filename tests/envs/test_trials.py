"""Trials: one task for a lifetime, memory across its episodes, saved state, and RL2 learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, build
from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.fr3.tasks.task import Parameter
from embodied.envs.maze.env import Config as MazeConfig
from embodied.envs.maze.env import Maze
from embodied.envs.toy.two_gap import Config as TwoGapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.envs.wrappers.trials import Config, Trials
from embodied.learners.learner import Learner
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.tiers import only_all


@dataclass(frozen=True)
class ArmsConfig:
    num_envs: int = 4
    length: int = 1


class Arms(VecEnv):
    """A bandit: one of two arms pays 1, the one that the task [1] names (above 0.5: arm 1)."""

    parameters = (Parameter("arm", 0.0, 1.0, ""),)

    def __init__(self, config: ArmsConfig) -> None:
        self.num_envs = config.num_envs
        self.length = config.length
        act = Leaf((), "int64", 0, 1, unit=SYMBOL)
        self.spec = Spec({"state": Leaf((1,))}, act, dt=0.1, text="pull the arm that pays")
        self.task = torch.zeros(self.num_envs, 1)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        rows = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        assert task is not None, "Trials chooses the task"
        self.task = torch.where(rows[:, None], task, self.task)
        self.age = self.age.masked_fill(rows, 0)
        return {"state": self.age[:, None].float()}

    def step(self, action: Tensor) -> Step:
        won = action == (self.task[:, 0] > 0.5)
        self.age = self.age + 1
        following = {"state": self.age[:, None].float()}
        ended = self.age >= self.length
        self.age = self.age.masked_fill(ended, 0)
        obs = {"state": self.age[:, None].float()}
        return Step(obs, following, won.float(), ended, torch.zeros_like(ended), {"success": won})

    def get_state(self) -> Tensors:
        return {"task": self.task.clone(), "age": self.age.clone()}

    def set_state(self, state: Tensors) -> Tensors:
        self.task = state["task"].clone()
        self.age = state["age"].clone()
        return {"state": self.age[:, None].float()}


def arms(episodes: int = 3, num_envs: int = 4, length: int = 1) -> Trials:
    return Trials(Config(episodes), Arms(ArmsConfig(num_envs, length)))


def test_a_lifetime_by_hand() -> None:
    env = arms(episodes=2, num_envs=1, length=2)
    obs = env.reset(0)
    seen = [(obs["first"], obs["last_reward"], obs["last_action"])]
    steps = []
    tasks = [env.env.task.item()]
    for _ in range(5):
        steps.append(env.step(torch.tensor([1])))
        obs = steps[-1].obs
        seen.append((obs["first"], obs["last_reward"], obs["last_action"]))
        tasks.append(env.env.task.item())
    assert [float(first) for first, _, _ in seen] == [1, 0, 1, 0, 1, 0]
    assert [bool(step.terminated) for step in steps] == [False, False, False, True, False]
    assert not any(bool(step.truncated) for step in steps)
    assert [int(step.log["trial"]) for step in steps] == [0, 0, 1, 1, 0]
    pays = float(tasks[0] > 0.5)
    assert [float(reward) for _, reward, _ in seen] == [
        0,
        pays,
        pays,
        pays,
        0,
        float(tasks[4] > 0.5),
    ]
    assert seen[0][2].tolist() == [[0, 0]] and seen[2][2].tolist() == [[0, 1]]
    assert len(set(tasks[:4])) == 1 and tasks[4] != tasks[3], "one task in a lifetime"
    # An inner episode ends: the successor is the start of the next; a lifetime ends: it is the end.
    assert steps[1].next_obs["state"].item() == 0 and steps[1].next_obs["first"].item() == 1
    assert steps[3].next_obs["state"].item() == 2 and steps[3].next_obs["first"].item() == 0


def test_given_tasks_and_seeds() -> None:
    env = arms()
    task = torch.tensor([[0.1], [0.9], [0.2], [0.8]])
    env.reset(0, task)
    for _ in range(2):
        env.step(torch.zeros(4, dtype=torch.int64))
        assert torch.equal(env.env.task, task)
    env.reset(5)
    drawn = env.env.task.clone()
    env.reset(5)
    assert torch.equal(env.env.task, drawn) and len(set(drawn.flatten().tolist())) == 4


def test_a_level_is_a_task_too() -> None:
    env = Trials(Config(2), Maze(MazeConfig(side=5, blocks=3, horizon=3, num_envs=2)))
    env.reset(0)
    task = env.memory["task"].clone()
    for expected in (True, False):
        for _ in range(3):
            env.step(torch.zeros(2, dtype=torch.int64))
        assert torch.equal(env.memory["task"], task) == expected


def test_an_environment_without_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="task vector"):
        Trials(Config(), TwoGap(TwoGapConfig(num_envs=1)))


INNER = {"_target_": "embodied.policies.categorical.Categorical", "hidden": [16]}
MEMORIES: dict[str, dict[str, Any]] = {
    "gru": {"_target_": "embodied.policies.recurrent.Recurrent", "width": 16, "inner": INNER},
    "transformer": {
        "_target_": "embodied.policies.transformer.Transformer",
        "width": 16,
        "heads": 2,
        "layers": 1,
        "window": 8,
        "inner": INNER,
    },
}


@only_all
@pytest.mark.parametrize("memory", ["gru", "transformer"])
def test_a_policy_with_memory_learns_within_a_lifetime(memory: str) -> None:
    """The arm that paid in the episode before is pulled; the first episode can only guess."""
    env = arms(episodes=3, num_envs=64)
    torch.manual_seed(0)
    learner = build(
        {
            "_target_": "embodied.learners.on_policy.ppo.Ppo",
            "horizon": 12,
            "batch_size": 192,
            "epochs": 4,
            "lr": 0.01,
            "entropy": 0.01,
            "normalize": False,
            "value": {"hidden": [16]},
        },
        Learner,
        policy=build(MEMORIES[memory], Policy, spec=env.spec),
        spec=env.spec,
    )
    loop = OnPolicyLoop(Collector(env, learner.policy, learner.gamma, seed=0), learner)
    for _ in range(40 * 12):
        loop.advance()
    actor = Actor(learner.policy, env.num_envs)
    obs = env.reset(9)
    first = torch.ones(env.num_envs, dtype=torch.bool)
    rewards = []
    for _ in range(3):
        step = env.step(actor(obs, first))
        rewards.append(step.reward.mean().item())
        obs = step.obs
        first = step.ended
    assert 0.2 < rewards[0] < 0.8
    assert min(rewards[1:]) > 0.95
