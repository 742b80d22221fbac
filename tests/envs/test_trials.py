"""Trials: one task for a lifetime, memory across its episodes, saved state, and RL2 learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError
from embodied.core.env import Step
from embodied.core.spec import SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.envs.batched import BatchedEnv
from embodied.envs.fr3.tasks.task import Parameter
from embodied.envs.maze.env import Config as MazeConfig
from embodied.envs.maze.env import Maze
from embodied.envs.row_rng import RowRng
from embodied.envs.toy.two_gap import Config as TwoGapConfig
from embodied.envs.toy.two_gap import TwoGap
from embodied.envs.wrappers.trials import Config, Trials
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from tests.builders import make_learner, make_policy, node_of
from tests.tiers import only_all


@dataclass(frozen=True)
class ArmsConfig:
    num_envs: int = 4
    length: int = 1


class Arms(BatchedEnv):
    """A bandit: one of two arms pays 1, the one that the task [1] names (above 0.5: arm 1)."""

    name = "arms"
    kept: ClassVar = {"task": "task", "age": "age"}
    parameters = (Parameter("arm", 0.0, 1.0, ""),)

    def __init__(self, config: ArmsConfig) -> None:
        self.num_envs = config.num_envs
        self.length = config.length
        act = Leaf((), "int64", 0, 1, unit=SYMBOL)
        task = Leaf((1,), low=0.0, high=1.0)
        self.spec = Spec({"state": Leaf((1,))}, act, 0.1, task, "pull the arm that pays")
        self.streams = RowRng(0, self.num_envs)
        self.task = torch.zeros(self.num_envs, 1)
        self.age = torch.zeros(self.num_envs, dtype=torch.int64)

    def begin(self, rows: Tensor, task: Tensor | None = None) -> None:
        if task is not None:
            self.task[rows] = task[rows]
        self.age[rows] = 0

    def observe(self, rows: Tensor) -> Tensors:
        return {"state": self.age[rows][:, None].float()}

    def step(self, action: Tensor) -> Step:
        won = action == (self.task[:, 0] > 0.5)
        self.age = self.age + 1
        following = self.observe(torch.arange(self.num_envs))
        ended = self.age >= self.length
        return self.finish(following, won.float(), ended, torch.zeros_like(ended), {"success": won})


def arms(episodes: int = 3, num_envs: int = 4, length: int = 1) -> Trials:
    return Trials(Config(episodes), Arms(ArmsConfig(num_envs, length)))


def test_a_lifetime_by_hand() -> None:
    env = arms(episodes=2, num_envs=1, length=2)
    seen, tasks, steps = [env.reset(0)], [env.env.task.item()], []
    for _ in range(5):
        steps.append(env.step(torch.tensor([1])))
        seen.append(steps[-1].obs)
        tasks.append(env.env.task.item())
    assert [float(obs["first"]) for obs in seen] == [1, 0, 1, 0, 1, 0]
    assert [bool(step.terminated) for step in steps] == [False, False, False, True, False]
    assert not any(bool(step.truncated) for step in steps)
    assert [int(step.log["trial"]) for step in steps] == [0, 0, 1, 1, 0]
    pays, later = float(tasks[0] > 0.5), float(tasks[4] > 0.5)
    assert [float(obs["last_reward"]) for obs in seen] == [0, pays, pays, pays, 0, later]
    assert seen[0]["last_action"].tolist() == [[0, 0]]
    assert seen[2]["last_action"].tolist() == [[0, 1]]
    assert len(set(tasks[:4])) == 1 and tasks[4] != tasks[3], "one task in a lifetime"
    # An inner episode ends: the successor is the start of the next; a lifetime ends: it is the end.
    ends = [steps[1].next_obs, steps[3].next_obs]
    assert [(obs["state"].item(), obs["first"].item()) for obs in ends] == [(0, 1), (2, 0)]


def test_a_given_task_stays() -> None:
    env = arms()
    task = torch.tensor([[0.1], [0.9], [0.2], [0.8]])
    env.reset(0, task)
    for _ in range(2):
        env.step(torch.zeros(4, dtype=torch.int64))
        assert torch.equal(env.env.task, task)


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


MEMORIES: dict[str, dict[str, Any]] = {
    "recurrent.Recurrent": {"width": 16},
    "transformer.Transformer": {"width": 16, "heads": 2, "layers": 1, "window": 8},
}


@only_all
@pytest.mark.parametrize(("memory", "settings"), MEMORIES.items())
def test_a_policy_with_memory_learns_within_a_lifetime(
    memory: str, settings: dict[str, Any]
) -> None:
    """The arm that paid in the episode before is pulled; the first episode can only guess."""
    env = arms(episodes=3, num_envs=64)
    inner = node_of("policies.categorical.Categorical", hidden=[16])
    policy = make_policy(memory, env.spec, inner=inner, **settings)
    ppo = {"horizon": 12, "batch_size": 192, "epochs": 4, "lr": 0.01, "entropy": 0.01}
    ppo |= {"normalize": False, "value": {"hidden": [16]}}
    learner = make_learner("on_policy.ppo.Ppo", policy, **ppo)
    loop = OnPolicyLoop(Collector(env, learner.policy, learner.gamma, seed=0), learner)
    for _ in range(40 * 12):
        loop.advance()
    actor = Actor(learner.policy, env.num_envs)
    obs, first, rewards = env.reset(9), torch.ones(env.num_envs, dtype=torch.bool), []
    for _ in range(3):
        step = env.step(actor(obs, first))
        rewards.append(step.reward.mean().item())
        obs, first = step.obs, step.ended
    assert 0.2 < rewards[0] < 0.8 and min(rewards[1:]) > 0.95
